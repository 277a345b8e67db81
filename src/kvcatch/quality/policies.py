"""Token eviction: which keys and values of a prompt to keep. Scores per KV head; the highest stay.

All scores are made when the prompt has been read and use nothing later. Grouped heads share keys, so their attention is
averaged. Definitions: StreamingLLM (Xiao 2023), H2O (Zhang 2023), SnapKV (Li 2024), TOVA (Oren 2024), key norm (Devoto 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcatch.quality.formats import torch_

SINKS = 4
RECENT = 16
SNAP_WINDOW = 64
SNAP_KERNEL = 5
BLOCK = 16


def streaming(keys: Any, _attention: Any, seed: int) -> Any:
    """The first tokens and then the latest ones."""
    del seed
    torch = torch_()
    tokens = keys.shape[2]
    scores = torch.arange(tokens, dtype=torch.float32)
    scores[:SINKS] = tokens
    return scores.expand(keys.shape[:3])


def h2o(keys: Any, attention: Any, seed: int) -> Any:
    """Attention received, per query that could have given some."""
    del seed
    torch = torch_()
    tokens = keys.shape[2]
    received = attention.sum(dim=2) / torch.arange(tokens, 0, -1)
    return _by_group(received, keys)


def snapkv(keys: Any, attention: Any, seed: int) -> Any:
    """Attention of the last 64 queries to what came before, smoothed over five neighbours; those 64 stay."""
    del seed
    torch = torch_()
    window = min(SNAP_WINDOW, keys.shape[2] - 1)
    seen = attention[..., -window:, :-window].mean(dim=2)
    smooth = torch.nn.functional.avg_pool1d(seen, SNAP_KERNEL, stride=1, padding=SNAP_KERNEL // 2)
    return _then_last(_by_group(smooth, keys), window)


def tova(keys: Any, attention: Any, seed: int) -> Any:
    """Attention of the last query, averaged over all heads; the last token stays."""
    del seed
    seen = attention[..., -1, :-1].mean(dim=1, keepdim=True)
    return _then_last(seen.expand(-1, keys.shape[1], -1), 1)


def knorm(keys: Any, _attention: Any, seed: int) -> Any:
    """Keys of small norm first: they draw attention."""
    del seed
    torch = torch_()
    return -torch.linalg.vector_norm(keys.float(), dim=-1)


def at_random(keys: Any, _attention: Any, seed: int) -> Any:
    """Any tokens: what a policy has to beat."""
    torch = torch_()
    return torch.rand(*keys.shape[:3], generator=torch.Generator().manual_seed(seed))


#: name -> (keys (1, KV heads, tokens, size), attention (1, heads, queries, tokens), seed) -> (1, KV heads, tokens)
POLICIES: dict[str, Callable[[Any, Any, int], Any]] = {
    "streaming": streaming,
    "h2o": h2o,
    "snapkv": snapkv,
    "tova": tova,
    "knorm": knorm,
    "random": at_random,
}


def _by_group(per_head: Any, keys: Any) -> Any:
    """Mean over the query heads of each KV head."""
    batch, kv_heads = keys.shape[:2]
    return per_head.view(batch, kv_heads, -1, per_head.shape[-1]).mean(dim=2)


def _then_last(scores: Any, last: int) -> Any:
    """The scores of earlier tokens, and above all of them the last ones."""
    torch = torch_()
    return torch.nn.functional.pad(scores, (0, last), value=float(scores.max()) + 1.0)


def kept_count(tokens: int, budget: float, unit: int = 1) -> int:
    """Tokens that a budget leaves, whole units only, never more than the budget allows."""
    return int(tokens * budget + 1e-9) // unit * unit if budget < 1 else tokens


def choose(scores: Any, budget: float) -> Any:
    """Indices that stay, per KV head in their old order: sinks and the latest tokens always, then the highest scores.

    Args:
        scores: (1, KV heads, tokens).
        budget: share of the tokens, above 0 to 1.
    """
    torch = torch_()
    tokens = scores.shape[-1]
    count = kept_count(tokens, budget)
    sure = scores.clone().float()
    sinks = min(SINKS, count)
    recent = min(RECENT, count - sinks)
    sure[..., :sinks] = float("inf")
    if recent:
        sure[..., -recent:] = float("inf")
    return torch.topk(sure, count, dim=-1).indices.sort(dim=-1).values


def choose_blocks(scores: list[Any], budget: float, block: int = BLOCK) -> Any:
    """Indices that stay when whole blocks go, the same in every layer and head, as a paged engine frees memory.

    Each layer's and head's scores are ranked first, so that none outvotes the others; a block counts by its mean rank.
    The last block stays whatever the budget (so it can be exceeded by less than one block), then the first one.
    """
    torch = torch_()
    tokens = scores[0].shape[-1]
    if budget >= 1:
        return torch.arange(tokens)
    rows = torch.cat([one[0].float() for one in scores])
    rank = rows.argsort(dim=-1).argsort(dim=-1).float().mean(dim=0)
    whole = tokens // block
    tail = tokens - whole * block
    room = (kept_count(tokens, budget) - tail) // block
    if room <= 0 and tail:
        return torch.arange(whole * block, tokens)
    means = rank[: whole * block].view(whole, block).mean(dim=-1)
    # The latest tokens before the first ones, where only one of them fits.
    means[0] = tokens
    if not tail:
        means[-1] = 2 * tokens
    stay = torch.topk(means, max(1, min(room, whole))).indices.sort().values
    first = (stay[:, None] * block + torch.arange(block)).flatten()
    return torch.cat([first, torch.arange(whole * block, tokens)])

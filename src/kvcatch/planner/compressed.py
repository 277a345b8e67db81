"""DeepSeek V4: a short window at full rate, a compressed latent for the rest, and the states in between.

One decoder layer owns up to five caches, as ``models/deepseek_v4/attention.py`` and ``compressor.py`` of vLLM
0.32 register them.
"""

from __future__ import annotations

from typing import Any

from kvcatch.planner.configfile import Fields
from kvcatch.planner.specs import MLA, SLIDING, LayerShape

#: Bytes of one stored latent: 448 fp8 + 128 rope + 8 scale.
LATENT_BYTES = 584
#: Page alignment of the packed fp8 layout.
PAGE_ALIGNMENT = 576
#: Tokens per block: latent, window, compressor state of ratio 4 and of ratio 128.
BLOCK_TOKENS, WINDOW_BLOCK, STATE_BLOCKS = 256, 64, {4: 4, 128: 8}
_RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128, "sliding_attention": 0}


def applies(fields: Fields, family: str) -> bool:
    """Whether the model compresses its KV cache along the sequence."""
    return family.startswith("deepseek_v4") or fields.get("compress_ratios") is not None


def _ratios(fields: Fields, count: int) -> list[int]:
    stated = fields.numbers("compress_ratios", count)
    if stated is not None:
        ratios = stated[:count]
    else:
        kinds = fields.items("layer_types", count) or []
        ratios = [_RATIOS.get(kind, 0) if isinstance(kind, str) else 0 for kind in kinds[:count]]
    for index, ratio in enumerate(ratios):
        if ratio > 1 and ratio not in STATE_BLOCKS:
            raise fields.error(f"compress_ratios[{index}]", ratio, "0, 1, 4 or 128 is expected")
    return ratios


def layers(fields: Fields, count: int) -> tuple[LayerShape, ...]:
    """All caches of the model, layer by layer in registration order."""
    head = fields.need("head_dim")
    window = fields.need("sliding_window")
    index_dim = fields.need("index_head_dim")
    side = index_dim + index_dim // 128 * 4
    built: list[LayerShape] = []
    for index, ratio in enumerate(_ratios(fields, count)):
        if ratio == 4:
            built.append(_latent(index, side, ratio, "indexer"))
            built.append(_state(index, index_dim, ratio))
        built.append(
            LayerShape(
                kind=SLIDING,
                index=index,
                num_kv_heads=1,
                latent_dim=head,
                window=window,
                role="window",
                params={"cell": LATENT_BYTES, "block": WINDOW_BLOCK},
            )
        )
        if ratio > 1:
            built.append(_latent(index, LATENT_BYTES, ratio, "latent"))
            built.append(_state(index, head, ratio))
    return tuple(built)


def _latent(index: int, cell: int, ratio: int, role: str) -> LayerShape:
    params: dict[str, Any] = {"cell": cell, "block": BLOCK_TOKENS}
    return LayerShape(
        kind=MLA,
        index=index,
        num_kv_heads=1,
        latent_dim=cell,
        role=role,
        tokens_per_state=ratio,
        params=params,
    )


def _state(index: int, head: int, ratio: int) -> LayerShape:
    """Scores and values still being compressed, fp32; ratio 4 overlaps two windows."""
    overlap = 2 if ratio == 4 else 1
    params = {"cell": 2 * overlap * head * 4, "block": STATE_BLOCKS[ratio]}
    return LayerShape(
        kind=SLIDING,
        index=index,
        num_kv_heads=1,
        latent_dim=head,
        window=overlap * ratio,
        role="compressor",
        params=params,
    )

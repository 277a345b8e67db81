"""What a target tells of its cache's layout: the unit of reuse, recurrent state, drafts that give a block back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvcatch.analysis.evidence import Case
from kvcatch.events import EngineInfo
from kvcatch.sources.failures import Failures

_SECTIONS = ("cache", "scheduler", "speculative", "model", "observability")
#: speculative methods whose draft layers need the last matched block computed again, as parts of their names
_DROPPING = ("eagle", "mtp")


def setting(name: str, info: EngineInfo, log: Failures | None = None) -> str | None:
    """A resolved setting as text, wherever the target tells it; as asked for where only that is known."""
    places: list[Any] = [info.config.get(section) for section in _SECTIONS]
    places += [info.config]
    if log is not None:
        places += [log.config, log.args]
    for place in places:
        value = place.get(name) if isinstance(place, dict) else None
        if value is not None and str(value) != "None":
            return str(value)
    return None


def whole(name: str, info: EngineInfo, log: Failures | None = None) -> int | None:
    """A setting that is a positive whole number."""
    text = setting(name, info, log)
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


def reuse_unit(info: EngineInfo, log: Failures | None = None) -> int | None:
    """Tokens of the smallest step in which a prefix can hit; None when unknown.

    Several KV groups hit together only at borders that all of them have: the least common multiple of their blocks.
    """
    exact = whole("cache_hit_alignment_tokens", info, log) or whole("prefix_match_unit", info, log)
    if exact:
        return exact
    sizes = {group.block_size for group in info.groups if group.block_size > 0}
    if len(sizes) > 1:
        return math.lcm(*sizes)
    return (log.attention_block if log is not None else None) or info.block_size or None


def drafting(case: Case) -> str | None:
    """How requests are drafted (``mtp``, ``eagle`` ...), ``unknown`` where only that they are; None when not."""
    method, log = draft_method(case.info), case.log
    if log is not None and method is None:
        method = log.speculative
        if method is None and "num_speculative_tokens" in log.args:
            method = str(log.args.get("method", "unknown"))
    drafted = case.pages is not None and bool(case.pages[1].drafts)
    return method or ("unknown" if drafted else None)


def draft_method(info: EngineInfo) -> str | None:
    """``drafting`` of a recorded engine."""
    section = info.config.get("speculative")
    method = section.get("method") if isinstance(section, dict) else None
    return str(method) if method else ("unknown" if info.speculative else None)


def given_back(info: EngineInfo, method: str | None) -> int:
    """Tokens at the end of a match that are computed again although they are cached: a block with EAGLE or MTP.

    Of several KV groups the largest block counts, states excepted, which drafts do not have.
    """
    if method is None or not (method == "unknown" or any(part in method.lower() for part in _DROPPING)):
        return 0
    blocks = [group.block_size for group in info.groups if group.kind != "mamba"]
    return max(blocks) if len(info.groups) > 1 and blocks else info.hash_block_size or info.block_size


@dataclass(frozen=True)
class StateCache:
    """Layers with a recurrent state. Tokens, None where unknown.

    aligned: kept only where a prefill chunk ends on a block border. every: from one possible place to the next.
    chunk: most tokens of one prefill chunk.
    """

    aligned: bool
    every: int | None
    chunk: int | None


def state_cache(case: Case) -> StateCache | None:
    """What is known of an engine's recurrent states, None when it has none (or does not say so)."""
    info, log = case.info, case.log
    states = [group for group in info.groups if group.kind == "mamba"]
    mode = setting("mamba_cache_mode", info, log) or (log.mamba_mode if log is not None else None)
    block = log.attention_block if log is not None else None
    if not states and mode not in ("align", "all") and block is None:
        return None
    every = whole("mamba_block_size", info, log) or (log.mamba_block if log is not None else None)
    chunk = info.max_num_batched_tokens or whole("max_num_batched_tokens", info, log)
    return StateCache(
        # Releases print the mode only where they choose it; of those that print a raised block, most align.
        aligned=mode in ("align", None) and info.prefix_caching is not False,
        every=every or (states[0].block_size if states else None) or block or info.block_size or None,
        chunk=chunk,
    )

"""Settings of the scheduler policy, with their defaults and the environment variables that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcatch.errors import KVCatchError
from kvcatch.policy.eviction import EVICTIONS
from kvcatch.policy.protect import parse_floors

MODES = ("observe", "backfill", "backfill+peak")
ASSUMED_SAFE_UTILIZATION = 0.85

#: environment variable -> (field, what it means)
VARIABLES = {
    "KVCATCH_SCHEDULER_MODE": "observe | backfill | backfill+peak",
    "KVCATCH_SCHEDULER_BOUND": "max (strict: every request may reach max_tokens) or a quantile such as 0.9",
    "KVCATCH_SCHEDULER_MAX_BYPASS": "requests that may pass a blocked head before everything waits for it",
    "KVCATCH_SCHEDULER_MAX_WAIT": "seconds a blocked head waits before everything waits for it",
    "KVCATCH_SCHEDULER_AGING": "seconds after which a waiting request is tried before shorter ones",
    "KVCATCH_SCHEDULER_VICTIM": "recompute-loss | priority-position | newest",
    "KVCATCH_SAFE_UTILIZATION": "overrides the stored watermark, 0 to 1",
    "KVCATCH_PROTECT": "TENANT=SHARE,...: shared prefixes to evict last, as shares of the pool",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the scheduler decides.

    safe_utilization: fraction of usable blocks up to which the engine's own order is kept.
    quantile: None = strict (max_tokens). max_wait and aging in seconds of the scheduler's clock.
    """

    mode: str = "backfill+peak"
    quantile: float | None = None
    max_bypass: int = 64
    max_wait: float = 30.0
    aging: float = 5.0
    victim: str = "recompute-loss"
    safe_utilization: float = ASSUMED_SAFE_UTILIZATION
    safe_source: str = "assumed"
    protect: tuple[tuple[str, float], ...] = ()

    @property
    def peak(self) -> bool:
        """Whether a request starts only if the planned peak fits the pool."""
        return self.mode != "backfill"


def _number(env: Mapping[str, str], name: str, low: float, high: float, default: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise KVCatchError(
            f"{name}={text!r} is not a number from {low:g} to {high:g}.", "Correct or unset it."
        )
    return value


def _choice(env: Mapping[str, str], name: str, known: tuple[str, ...], default: str) -> str:
    text = env.get(name, "").strip() or default
    if text not in known:
        raise KVCatchError(f"{name}={text!r} is not known.", f"Choose one of: {', '.join(known)}.")
    return text


def settings_from(env: Mapping[str, str], stored: tuple[float, str] | None = None) -> Settings:
    """Settings from environment variables and a stored watermark (value, source). Raises KVCatchError."""
    bound = env.get("KVCATCH_SCHEDULER_BOUND", "").strip() or "max"
    quantile = None if bound == "max" else _number(env, "KVCATCH_SCHEDULER_BOUND", 0.01, 1.0, 0.9)
    safe, source = stored or (ASSUMED_SAFE_UTILIZATION, "assumed")
    if env.get("KVCATCH_SAFE_UTILIZATION", "").strip():
        safe, source = _number(env, "KVCATCH_SAFE_UTILIZATION", 0.0, 1.0, safe), "KVCATCH_SAFE_UTILIZATION"
    return Settings(
        mode=_choice(env, "KVCATCH_SCHEDULER_MODE", MODES, "backfill+peak"),
        quantile=quantile,
        max_bypass=int(_number(env, "KVCATCH_SCHEDULER_MAX_BYPASS", 0, 1e9, 64)),
        max_wait=_number(env, "KVCATCH_SCHEDULER_MAX_WAIT", 0, 1e9, 30.0),
        aging=_number(env, "KVCATCH_SCHEDULER_AGING", 0, 1e9, 5.0),
        victim=_choice(env, "KVCATCH_SCHEDULER_VICTIM", tuple(EVICTIONS), "recompute-loss"),
        safe_utilization=safe,
        safe_source=source,
        protect=tuple(parse_floors(env.get("KVCATCH_PROTECT", "")).items()),
    )


def can_fire(safe_utilization: float, usable_blocks: int, max_request_blocks: int, max_num_seqs: int) -> bool:
    """Whether the pool can ever pass the safe utilisation: ``max_num_seqs`` of the largest requests.

    False: the threshold is unreachable with this model, pool and limit, and the scheduler equals stock.
    """
    return max_num_seqs * max_request_blocks > safe_utilization * usable_blocks

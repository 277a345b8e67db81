"""The safe watermark: up to which demand for KV blocks latency stays near what an idle engine gives.

Demand is *committed*: blocks held plus blocks that everything waiting needs, over usable blocks. It passes 1 where a
queue stands, which utilisation cannot show. Slowdown is TTFT over what the same prompt takes on an idle engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcatch.analysis.knee import SLOW, Knee, find_knee, kneedle, slow_from
from kvcatch.errors import KVCatchError
from kvcatch.results import Result

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: beyond this demand the queue's own length sets the wait, whatever the pool does
MOST_DEMAND = 1.5
#: requests that found the engine idle from which the unloaded line is measured and not estimated
IDLE = 8
#: opinions further apart than this are worth a warning
APART = 0.1
#: the largest fraction of blocks that we would ever tell vLLM to keep free
_MOST_FREE = 0.5
_LEAST_SAFE = 0.05
#: a knee whose interval is wider than this is no line to run a service by
UNSURE = 0.3


class Unloaded(Result, frozen=True):
    """TTFT of an idle engine: fixed_seconds + seconds_per_token * uncached prompt tokens. measured: not estimated."""

    fixed_seconds: float
    seconds_per_token: float
    requests: int
    measured: bool

    def seconds(self, tokens: Floats) -> Floats:
        """TTFT without load of prompts of so many uncached tokens."""
        return self.fixed_seconds + self.seconds_per_token * tokens


class Interval(Result, frozen=True):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


class Level(Result, frozen=True):
    """One rung of a load ladder."""

    requests_per_second: float
    requests: int
    committed_ratio_mean: float
    committed_ratio_p95: float
    slowdown_p95: float | None
    preemptions_per_request: float | None


class WithFlag(Result, frozen=True):
    """What requests met while vLLM kept ``watermark_free_ratio`` of its blocks free: all, and those below the line."""

    watermark_free_ratio: float
    requests: int
    slowdown_p95: float
    slowdown_p95_below: float | None
    preemptions_per_request: float | None


class Watermark(Result, frozen=True):
    """What ``kvcatch watermark --json`` prints. Ratios are of usable blocks; committed ones may exceed 1.

    safe_utilization_ratio: used fraction up to which the next request is still served at once; None when nothing
    bends in the range seen. vllm_watermark_free_ratio: for ``--watermark``, 0 when admission by itself holds the line.
    """

    schema_version: int = 1
    kvcatch_version: str = ""
    target: str = ""
    source: str = "capture"  # capture | prometheus | drive
    safe_utilization_ratio: float | None = None
    knee_committed_ratio: Interval | None = None
    verdict: str = ""  # knee | no knee in range
    vllm_watermark_free_ratio: float | None = None
    vllm_flag: str | None = None
    p95_slowdown_with_flag: WithFlag | None = None
    opinions: dict[str, float | None] = msgspec.field(default_factory=dict)
    observations: int = 0
    committed_range: tuple[float, float] = (0.0, 0.0)
    slowdown_p95_below: float | None = None
    largest_request_ratio: float = 0.0
    unloaded: Unloaded | None = None
    levels: tuple[Level, ...] = ()
    rate_at_line_per_second: float | None = None
    warnings: tuple[str, ...] = ()
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    config_hash: str = ""
    measured_unix_seconds: float = 0.0


@dataclass(eq=False)
class Observations:
    """One row per request, in order of arrival.

    committed: demand when it arrived, its own blocks included. ttft, tokens: seconds, and prompt tokens that had to be
    computed. idle: it found nothing else in the engine. largest_ratio: blocks of the largest prompt over usable ones.
    preempted_at: demand at each preemption.
    """

    committed: Floats
    ttft: Floats
    tokens: Floats
    idle: npt.NDArray[np.bool_]
    largest_ratio: float
    preempted_at: Floats = field(default_factory=lambda: np.zeros(0))
    preemptions: int | None = None
    free_ratio: float | None = None
    notes: list[str] = field(default_factory=list)


def measure(seen: Observations, *, unloaded: Unloaded | None = None, seed: int = 0) -> Watermark:
    """The line that these requests show.

    Args:
        seen: the requests.
        unloaded: what an idle engine takes, when it was calibrated; otherwise found among the requests.
        seed: of the bootstrap.

    Raises:
        KVCatchError: too few requests to say anything.
    """
    known = np.isfinite(seen.committed) & np.isfinite(seen.ttft) & (seen.ttft > 0)
    if known.sum() < 40:
        raise KVCatchError(
            f"{int(known.sum())} requests with a first token are too few to find a watermark.",
            "Record for longer, or measure with: kvcatch watermark --drive URL",
        )
    committed, ttft, tokens = seen.committed[known], seen.ttft[known], seen.tokens[known]
    line = unloaded or unloaded_line(committed, ttft, tokens, seen.idle[known])
    slowdown = ttft / line.seconds(tokens)
    below = committed <= MOST_DEMAND
    knee = find_knee(committed[below], np.log(slowdown[below]), seed=seed)
    slow = slow_from(committed, slowdown)
    first = float(np.min(seen.preempted_at)) if len(seen.preempted_at) else None
    opinions = {
        "kneedle": kneedle(committed[below], slowdown[below]),
        "p95_slowdown_2": slow,
        "first_preemption": first,
    }
    threshold = _threshold(knee, slow)
    safe = None if threshold is None else min(1.0, threshold - seen.largest_ratio)
    free = None if threshold is None else float(np.clip(round(1 - threshold, 3), 0.0, _MOST_FREE))
    notes = [*seen.notes, *_warnings(knee, opinions, line, safe, seen.largest_ratio, committed)]
    if safe is not None and (safe < _LEAST_SAFE or _width(knee) > UNSURE):
        safe = None
    under = slowdown[committed <= (threshold if threshold is not None else np.inf)]
    p95 = float(np.percentile(under, 95)) if len(under) else None
    return Watermark(
        safe_utilization_ratio=safe,
        knee_committed_ratio=None
        if knee.value is None or knee.low is None or knee.high is None
        else Interval(value=knee.value, low=knee.low, high=knee.high),
        verdict="no knee in range" if threshold is None else "knee",
        vllm_watermark_free_ratio=free,
        vllm_flag=f"--watermark {free:g}" if free else None,
        p95_slowdown_with_flag=_with_flag(seen, slowdown, p95),
        opinions=opinions,
        observations=len(committed),
        committed_range=(float(committed.min()), float(committed.max())),
        slowdown_p95_below=p95,
        largest_request_ratio=seen.largest_ratio,
        unloaded=line,
        warnings=tuple(notes),
    )


def _width(knee: Knee) -> float:
    return 0.0 if knee.low is None or knee.high is None else knee.high - knee.low


def _threshold(knee: Knee, slow: float | None) -> float | None:
    """The lower end of the knee, or where the slowdown passes 2 if that comes first through the pool.

    A slowdown that is there at half of the knee's demand already comes from the prompts of others, not from blocks.
    """
    if knee.value is None or knee.low is None:
        return None
    return knee.low if slow is None or slow < knee.value / 2 else min(knee.low, slow)


def _with_flag(seen: Observations, slowdown: Floats, below: float | None) -> WithFlag | None:
    if not seen.free_ratio:
        return None
    return WithFlag(
        watermark_free_ratio=seen.free_ratio,
        requests=len(slowdown),
        slowdown_p95=float(np.percentile(slowdown, 95)),
        slowdown_p95_below=below,
        preemptions_per_request=None if seen.preemptions is None else seen.preemptions / len(slowdown),
    )


def _warnings(
    knee: Knee,
    opinions: dict[str, float | None],
    line: Unloaded,
    safe: float | None,
    largest: float,
    committed: Floats,
) -> list[str]:
    said = []
    if not line.measured:
        said.append(
            f"the idle engine's latency is estimated from the {line.requests} least loaded requests: fewer than {IDLE} "
            "found it idle"
        )
    if knee.value is not None:
        far = [
            f"{name} {value:.2f}"
            for name, value in opinions.items()
            if value is not None and abs(value - knee.value) > APART
        ]
        slow = opinions["p95_slowdown_2"]
        if slow is not None and slow < knee.value / 2:
            said.append(
                f"p95 slowdown passes {SLOW:g} at a demand of {slow:.0%} already: that is the prefill of other prompts, "
                "which no watermark shortens"
            )
        if far:
            said.append(
                f"opinions differ from the knee at {knee.value:.2f} by more than {APART}: {', '.join(far)}"
            )
        if knee.high is not None and knee.low is not None and knee.high - knee.low > 0.2:
            said.append(
                f"the knee lies anywhere from {knee.low:.2f} to {knee.high:.2f}: more load would tell"
            )
    if safe is not None and safe < _LEAST_SAFE:
        said.append(f"one prompt takes up to {largest:.0%} of the pool: no used fraction is safe for it")
    elif largest > 0.25:
        said.append(
            f"one prompt takes up to {largest:.0%} of the pool; limit its length to gain that much room"
        )
    if float(committed.max()) < 0.5:
        said.append(f"demand never passed {float(committed.max()):.0%} of the pool")
    return said


def unloaded_line(committed: Floats, ttft: Floats, tokens: Floats, idle: npt.NDArray[np.bool_]) -> Unloaded:
    """TTFT over uncached tokens of the requests that found the engine idle, or else of the least loaded ones."""
    measured = int(idle.sum()) >= IDLE
    if measured:
        chosen = np.flatnonzero(idle)
    else:
        chosen = np.argsort(committed, kind="stable")[: max(12, len(committed) // 10)]
    x, y = tokens[chosen], ttft[chosen]
    slope, fixed = 0.0, float(np.median(y))
    if np.ptp(x) > 0:
        slope = _slope(x, y)
        fixed = float(np.median(y - slope * x))
        if fixed <= 0:
            # Through the origin: no engine answers before it is asked.
            fixed, slope = 0.0, float((x * y).sum() / (x * x).sum())
    line = Unloaded(fixed_seconds=fixed, seconds_per_token=slope, requests=len(chosen), measured=measured)
    # The median of idle requests is what "not slowed down" means; of loaded ones their faster quarter is nearer.
    scale = float(np.percentile(y / line.seconds(x), 50 if measured else 25))
    return Unloaded(
        fixed_seconds=fixed * scale, seconds_per_token=slope * scale, requests=len(chosen), measured=measured
    )


def _slope(x: Floats, y: Floats) -> float:
    """Median of the slopes between all pairs (Theil and Sen): a request that met the end of a step does not tilt it."""
    take = np.linspace(0, len(x) - 1, min(len(x), 300)).astype(np.int64)
    first, second = np.triu_indices(len(take), 1)
    across, up = (part[take][second] - part[take][first] for part in (x, y))
    known = np.abs(across) > 0
    return max(0.0, float(np.median(up[known] / across[known]))) if known.any() else 0.0


def rate_at(levels: tuple[Level, ...], committed: float) -> float | None:
    """Requests a second at which mean demand reaches ``committed``, between the rungs; None outside them."""
    rungs = sorted(levels, key=lambda level: level.requests_per_second)
    demand = np.maximum.accumulate(np.array([level.committed_ratio_mean for level in rungs]))
    rates = np.array([level.requests_per_second for level in rungs])
    if len(rungs) < 2 or not demand[0] <= committed <= demand[-1]:
        return None
    return float(np.interp(committed, demand, rates))


__all__ = ["SLOW", "Level", "Observations", "Unloaded", "Watermark", "measure", "rate_at", "unloaded_line"]

"""Two runs beside each other: what differs beyond noise, and why.

Runs are laid beside each other by requests served, never by wall time. When both served the same requests, each is
compared with itself; else the runs are compared as two samples of one load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcatch.analysis.compare_causes import explain
from kvcatch.analysis.compare_drift import Drift, drift, one_sided
from kvcatch.analysis.compare_replay import answered, fill_replay, paired_answers
from kvcatch.analysis.compare_sides import Ints, Side, arrival_order, fill
from kvcatch.analysis.compare_stats import FAMILY_ERROR, Difference, Noise, difference, noise_of, verdict
from kvcatch.errors import KVCatchError
from kvcatch.results import Finding, Result
from kvcatch.store.columns import Recording
from kvcatch.store.names import client_request_id


class Metric(Result, frozen=True):
    """One metric of both runs. low, high: interval of ``difference``; floor: the smallest difference that counts.

    verdict: better | worse | different | equal | inconclusive. floor_source: assumed | measured.
    """

    name: str
    unit: str
    better: str
    a: float
    b: float
    difference: float
    relative_difference: float | None
    low: float | None
    high: float | None
    floor: float
    floor_source: str
    verdict: str
    reason: str = ""


class Comparison(Result, frozen=True):
    """What ``compare --json`` prints. verdict: worse | better | mixed | equal | inconclusive."""

    a: str
    b: str
    verdict: str
    requests: int | None
    paired: bool
    same_load: bool | None
    drift: tuple[Drift, ...] = ()
    # settings that the second run does not have at all, and the reverse
    only_a: dict[str, Any] = msgspec.field(default_factory=dict)
    only_b: dict[str, Any] = msgspec.field(default_factory=dict)
    restore_flags: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    def metric(self, name: str) -> Metric | None:
        """One metric by name."""
        return next((row for row in self.metrics if row.name == name), None)


#: metric -> unit, good direction, absolute and relative floor, whether it depends on the load
METRICS: dict[str, tuple[str, str, float, float, bool]] = {
    "kv_capacity_tokens": ("tokens", "up", 0.0, 0.01, False),
    "ttft_seconds": ("seconds", "down", 0.001, 0.05, True),
    "ttft_p95_seconds": ("seconds", "down", 0.002, 0.10, True),
    "queue_seconds": ("seconds", "down", 0.005, 0.10, True),
    "tpot_seconds": ("seconds", "down", 0.0002, 0.05, True),
    "e2e_seconds": ("seconds", "down", 0.005, 0.05, True),
    "output_tokens_per_second": ("tokens/s", "up", 0.0, 0.05, True),
    "step_seconds": ("seconds", "", 0.0002, 0.05, True),
    "waiting_requests": ("requests", "down", 0.5, 0.10, True),
    "preemptions_per_request": ("", "down", 0.02, 0.10, True),
    "recomputed_share": ("ratio", "down", 0.01, 0.10, True),
    "hit_ratio": ("ratio", "up", 0.01, 0.0, True),
    "utilization_ratio": ("ratio", "", 0.02, 0.05, True),
    "block_utilization_ratio": ("ratio", "up", 0.02, 0.0, False),
    "evicted_blocks_per_request": ("blocks", "", 0.5, 0.10, True),
    "prompt_tokens": ("tokens", "", 1.0, 0.05, False),
    "output_tokens": ("tokens", "", 1.0, 0.05, False),
}
#: what describes the load and not the engine
LOAD = ("prompt_tokens", "output_tokens")
#: rates and concurrencies may differ by so much (in their logarithm) before two runs count as differently loaded
_LOAD_TOLERANCE = 0.15
#: requests of a warm-up that are left out at most
_WARM_UP = 8


def compare(
    a: Side,
    b: Side,
    *,
    repeats: Sequence[Side] = (),
    skip: int | None = None,
    noise: Mapping[str, Noise] | None = None,
) -> Comparison:
    """The second run against the first.

    Args:
        a: the first run, the baseline.
        b: the second run.
        repeats: more runs of the first configuration; what differs among them is noise.
        skip: requests left out at the start of recordings; None: 5 %, at most 8.
        noise: measured elsewhere, per metric; the larger one counts.

    Raises:
        KVCatchError: nothing in common to compare.
    """
    paired = align(a, b, skip)
    measured = spread(a, repeats, skip)
    for name, one in (noise or {}).items():
        measured[name] = one.or_wider(measured.get(name))
    if repeats:
        paired = align(a, b, skip)  # the repeats may have cut the first run shorter
    names = [name for name in METRICS if name in a.estimates and name in b.estimates]
    if not names:
        raise KVCatchError(
            f"{a.target} ({a.kind}) and {b.target} ({b.kind}) have no metric in common.",
            "Compare two captures, two metrics pages or two bench results.",
        )
    alike = same_load(a, b, paired)
    error = FAMILY_ERROR / len(names)
    metrics = []
    for name in names:
        change = difference(a.estimates[name], b.estimates[name], paired=paired)
        if change is not None:
            metrics.append(_metric(name, change, error, measured.get(name), alike))
    changed = drift(a.info, b.info)
    only_a, only_b = one_sided(a.info, b.info)
    metrics_known = {row.name: row for row in metrics}
    return Comparison(
        a=a.target,
        b=b.target,
        verdict=_overall(metrics, alike),
        requests=a.requests if a.kind == b.kind and a.kind in ("recording", "replay") else None,
        paired=paired,
        same_load=alike,
        drift=changed,
        only_a=only_a,
        only_b=only_b,
        restore_flags=tuple(row.restore for row in changed if row.restore),
        metrics=tuple(metrics),
        findings=explain(metrics_known, changed, (a.info, b.info)),
        notes=(*a.notes, *b.notes, *_notes(alike, measured, metrics)),
    )


def align(a: Side, b: Side, skip: int | None = None) -> bool:
    """Cut recordings to what both served; True when it was the same requests in the same order."""
    if a.replayed is not None and b.replayed is not None:
        same = paired_answers(a.replayed, b.replayed)
        parts = same or (answered(a.replayed), answered(b.replayed))
        for side, answers in zip((a, b), parts, strict=True):
            fill_replay(side, answers[_warm_up(len(answers), skip) :])
        return same is not None
    for side in (a, b):
        if side.replayed is not None:
            answers = answered(side.replayed)
            fill_replay(side, answers[_warm_up(len(answers), skip) :])
    if a.recording is None or b.recording is None:
        for side in (a, b):
            if side.recording is not None:
                order, ended = _in_order(side.recording)
                fill(side, _skipped(order[ended], skip))
        return False
    pairs = _pairs(a.recording, b.recording)
    if pairs is not None:
        rows_a, rows_b = pairs
        both = (a.recording.requests.finish[rows_a] > 0) & (b.recording.requests.finish[rows_b] > 0)
        rows_a, rows_b = rows_a[both], rows_b[both]
    else:
        (order_a, ended_a), (order_b, ended_b) = _in_order(a.recording), _in_order(b.recording)
        rows_a, rows_b = order_a[ended_a], order_b[ended_b]
        count = min(len(rows_a), len(rows_b))
        rows_a, rows_b = rows_a[:count], rows_b[:count]
    fill(a, _skipped(rows_a, skip))
    fill(b, _skipped(rows_b, skip))
    return pairs is not None


def _pairs(one: Recording, other: Recording) -> tuple[Ints, Ints] | None:
    """Rows of the same requests in both: of the same name, or else of the same place, and of the same prompt length.

    None when they were not the same requests.
    """
    left, right = arrival_order(one), arrival_order(other)
    count = min(len(left), len(right))
    if not count:
        return None
    names = [
        {client_request_id(side.requests.named(row)[0]): row for row in order.tolist()}
        for side, order in ((one, left), (other, right))
    ]
    shared = [(row, names[1][name]) for name, row in names[0].items() if name in names[1]]
    # A name that stands for several requests tells none of them apart.
    unique = len(names[0]) == len(left) and len(names[1]) == len(right)
    by_name = np.array(shared if unique else [], np.int64).reshape(-1, 2)
    by_place = np.column_stack([left[:count], right[:count]])
    for table in (by_name, by_place):
        alike = one.requests.prompt_tokens[table[:, 0]] == other.requests.prompt_tokens[table[:, 1]]
        if alike.sum() >= 0.95 * count:
            return table[alike, 0], table[alike, 1]
    return None


def _in_order(recording: Recording) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Rows of the requests in order of arrival, and which of them ended."""
    order = arrival_order(recording)
    return order, recording.requests.finish[order] > 0


def _skipped(rows: Ints, skip: int | None) -> Ints:
    return rows[_warm_up(len(rows), skip) :]


def _warm_up(count: int, skip: int | None) -> int:
    return min(_WARM_UP, count // 20) if skip is None else skip


def spread(a: Side, repeats: Sequence[Side], skip: int | None = None) -> dict[str, Noise]:
    """What differs between every two of these runs of one configuration, per metric. Leaves them aligned anew."""
    runs = (a, *repeats)
    seen: dict[str, list[float]] = {}
    for one, other in combinations(runs, 2):
        paired = align(one, other, skip)
        for name in METRICS:
            if name in one.estimates and name in other.estimates:
                change = difference(one.estimates[name], other.estimates[name], paired=paired)
                if change is not None:
                    seen.setdefault(name, []).append(change.value)
    pairs = len(runs) * (len(runs) - 1) // 2
    return {name: noise_of(found, len(runs)) for name, found in seen.items() if len(found) == pairs}


def same_load(a: Side, b: Side, paired: bool) -> bool | None:
    """Whether both runs were asked for the same; None when unknown.

    An open loop keeps its rate when the engine slows down, a closed loop its concurrency: one of them must agree.
    """
    for name in LOAD:
        left, right = a.estimates.get(name), b.estimates.get(name)
        if paired or left is None or right is None:
            continue
        change = difference(left, right)
        if change is None or not change.a:
            continue
        interval = change.interval(FAMILY_ERROR)
        clear = interval is None or interval[0] > 0 or interval[1] < 0
        if clear and abs(change.value) > 0.10 * change.a:
            return False
    if not a.load or not b.load:
        return None
    # Random arrivals scatter: a rate from n requests has a standard error of 1/sqrt(n) of itself.
    scatter = sum(1 / side.requests for side in (a, b) if side.requests)
    tolerance = max(_LOAD_TOLERANCE, 3.5 * math.sqrt(scatter))
    return any(
        _near(a.load[name], b.load[name], tolerance)
        for name in ("requests_per_second", "concurrency")
        if name in a.load and name in b.load
    )


def _near(one: float, other: float, tolerance: float) -> bool:
    if math.isinf(one) or math.isinf(other):
        return one == other
    return one == other or (min(one, other) > 0 and abs(math.log(one / other)) <= tolerance)


def _metric(
    name: str, change: Difference, error: float, measured: Noise | None, alike: bool | None
) -> Metric:
    unit, better, absolute, relative, loaded = METRICS[name]
    assumed = max(absolute, relative * abs(change.a))
    floor = assumed if measured is None else max(absolute, measured.floor(assumed))
    interval = change.interval(error)
    said = verdict(change, error, floor, better)
    reason = ""
    if interval is None:
        reason = "too few observations, or no spread in the source"
    elif said == "inconclusive":
        reason = "the interval holds both a difference and none"
    if loaded and alike is False and said != "equal":
        said, reason = "inconclusive", "the runs were not under the same load"
    return Metric(
        name=name, unit=unit, better=better, a=change.a, b=change.b, difference=change.value,
        relative_difference=change.value / abs(change.a) if change.a else None,
        low=None if interval is None else interval[0], high=None if interval is None else interval[1],
        floor=floor, floor_source="assumed" if floor == assumed else "measured", verdict=said, reason=reason,
    )  # fmt: skip


def _overall(metrics: Sequence[Metric], alike: bool | None) -> str:
    """Equal when nothing got better or worse and most could be told; the rest is named beside it."""
    judged = [row for row in metrics if row.better]
    said = [row.verdict for row in judged]
    if "worse" in said:
        return "mixed" if "better" in said else "worse"
    if "better" in said:
        return "better"
    return "equal" if alike is not False and 2 * said.count("equal") >= len(said) > 0 else "inconclusive"


def _notes(alike: bool | None, measured: Mapping[str, Noise], metrics: Sequence[Metric]) -> list[str]:
    notes = []
    if alike is False:
        notes.append("the runs were not under the same load: give both the same requests at the same rate")
    if not measured and any(row.verdict in ("worse", "better") for row in metrics):
        notes.append("one run of each: what changes from run to run is assumed, --repeat FILE measures it")
    return notes


def recording_side(target: str, recording: Recording) -> Side:
    """A side of a recording; its estimates follow from ``align``. Raises KVCatchError when no request ended."""
    side = Side(target, "recording", recording.info, recording=recording)
    if recording.loss["dropped_bytes"] or recording.loss["dropped_records"]:
        side.notes.append(f"{target}: records were lost; doctor says how many")
    if not np.any(recording.requests.finish > 0):
        raise KVCatchError(f"{target}: no request ended in it.", "Record for longer.")
    return side

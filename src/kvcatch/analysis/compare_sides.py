"""One run as estimates of its metrics: from a recording, from pages of counters, or from a bench result.

What ``kvcatch replay`` wrote is in ``compare_replay``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.analysis.compare_stats import Draws, Estimate, Known
from kvcatch.analysis.evidence import Case, increase
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.sources import frames
from kvcatch.sources.readings import Histogram
from kvcatch.sources.replayed import WARM_UP, Replayed
from kvcatch.store.columns import Recording

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: parts of a run by requests served, the unit in which runs of different length are laid beside each other
_CELLS = 128
_WORDS = {"True": True, "False": False, "None": None}


@dataclass(eq=False)
class Side:
    """One run. ``rows``: requests that count, in order of arrival, of a recording."""

    target: str
    kind: str  # recording | metrics | bench | replay
    info: EngineInfo = field(default_factory=EngineInfo)
    estimates: dict[str, Estimate] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    requests: int | None = None
    recording: Recording | None = None
    replayed: Replayed | None = None
    notes: list[str] = field(default_factory=list)


# -- recordings -------------------------------------------------------------------------------------------


def arrival_order(recording: Recording) -> Ints:
    """Rows of the requests in order of arrival, without those that a replay sent to warm the engine up."""
    requests, mark = recording.requests, WARM_UP.encode()
    order: Ints = np.lexsort((requests.rid, requests.arrival))
    meant = np.array([mark not in text for text in requests.description], bool)
    kept: Ints = order[meant[order]]
    return kept


def fill(side: Side, rows: Ints) -> None:
    """Estimate everything from these finished requests, and from the steps while they were served."""
    recording = side.recording
    assert recording is not None
    requests, info = recording.requests, recording.info
    arrival, first, finish = requests.arrival[rows], requests.first[rows], requests.finish[rows]
    side.requests = len(rows)
    side.estimates = capacity(info)
    if not len(rows):
        return
    ttft = np.where(first > 0, (first - arrival) / 1e9, np.nan)
    outputs = requests.output_tokens[rows].astype(np.float64)
    decode = np.where((first > 0) & (outputs > 1), (finish - first) / 1e9, 0.0)
    queued = np.where(requests.scheduled[rows] > 0, (requests.scheduled[rows] - arrival) / 1e9, np.nan)
    prompts = requests.prompt_tokens[rows].astype(np.float64)
    side.estimates |= {
        "ttft_seconds": Draws(_known(ttft)),
        "ttft_p95_seconds": Draws(_known(ttft), quantile=0.95),
        "queue_seconds": Draws(_known(queued)),
        "tpot_seconds": Draws(decode, np.where(decode > 0, outputs - 1, 0.0)),
        "e2e_seconds": Draws((finish - arrival) / 1e9),
        "hit_ratio": Draws(
            requests.cached_tokens[rows].astype(np.float64), requests.queried_tokens[rows].astype(np.float64)
        ),
        "preemptions_per_request": Draws(requests.preemptions[rows].astype(np.float64)),
        "recomputed_share": Draws(requests.recomputed_tokens[rows].astype(np.float64), prompts),
        "prompt_tokens": Draws(prompts),
        "output_tokens": Draws(outputs),
    }
    if info.prefix_caching is False:
        side.estimates["hit_ratio"] = Known(0.0, 0.0)
    side.estimates |= _steps(recording, int(arrival.min()), np.sort(finish))
    spread = (int(arrival.max()) - int(arrival.min())) / 1e9
    whole = (int(finish.max()) - int(arrival.min())) / 1e9
    # All at once is a load of its own: it has no rate.
    side.load = {
        "requests_per_second": (len(rows) - 1) / spread if spread > 0.02 * whole else math.inf,
        "concurrency": float((finish - arrival).sum()) / 1e9 / whole if whole else 0.0,
    }


def _known(values: Floats) -> Floats:
    """A missing value takes the mean, so that rows of both runs stay beside each other."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    return np.zeros(0) if missing.all() else np.where(missing, np.nanmean(values), values)


def capacity(info: EngineInfo) -> dict[str, Estimate]:
    """Tokens that fit into the pool, where the pool is known."""
    if not info.usable_blocks or not info.block_size:
        return {}
    return {"kv_capacity_tokens": Known(float(info.usable_blocks * info.block_size), 0.0)}


def _steps(recording: Recording, start: int, finishes: Ints) -> dict[str, Estimate]:
    """What the steps tell, summed into cells of equally many served requests."""
    samples, info = recording.samples, recording.info
    mono = samples["unix_ns"] - recording.wall_offset
    inside = (mono >= start) & (mono <= finishes[-1])
    count = len(finishes)
    cells = min(_CELLS, count)
    served = np.minimum(np.searchsorted(finishes, mono[inside]), count - 1)
    cell = served * cells // count

    def summed(values: Any) -> Floats:
        total: Floats = np.bincount(cell, np.asarray(values, np.float64), cells).astype(np.float64)
        return total

    part = {name: column[inside].astype(np.float64) for name, column in samples.items()}
    # An idle gap is not work: a row after one speaks of its own step.
    seconds = np.where(part["interval_ns"] > 0, part["interval_ns"], part["step_ns"]) / 1e9
    estimates: dict[str, Estimate] = {
        "waiting_requests": Draws(summed(part["waiting"] * seconds), summed(seconds)),
        "output_tokens_per_second": Draws(summed(part["decode_tokens"] + part["completed"]), summed(seconds)),
        "step_seconds": Draws(summed(part["step_ns"] / 1e9), summed(part["steps"])),
        "evicted_blocks_per_request": Draws(summed(part["evicted_blocks"]), np.full(cells, count / cells)),
    }
    if info.usable_blocks:
        usage = part["active_blocks"] / info.usable_blocks
        estimates["utilization_ratio"] = Draws(summed(usage * seconds), summed(seconds))
    held, slots = part["held_tokens"], part["active_blocks"] * info.block_size
    if info.block_size and (held >= 0).all():
        estimates["block_utilization_ratio"] = Draws(summed(held), summed(slots))
    return estimates


# -- pages ------------------------------------------------------------------------------------------------


def from_pages(case: Case) -> Side:
    """From the growth of an engine's counters between its first and last page; one page: since its start."""
    side = Side(case.target, "metrics", case.info, notes=list(case.notes))
    if case.pages is None:
        raise KVCatchError(f"{case.target}: no metrics of an engine.", "Give a /metrics page or URL.")
    first, last = case.pages
    config = {name: typed(value) for name, value in last.config.items()}
    side.info = EngineInfo(
        engine=case.info.engine, engine_version=case.info.engine_version, model=case.info.model,
        num_blocks=case.info.num_blocks, block_size=case.info.block_size, config={"cache": config},
    )  # fmt: skip
    if first is last:
        side.notes.append(f"{case.target}: one page, so the numbers are means since the engine's start")
    side.estimates = capacity(case.info)
    histograms = {
        name: getattr(last, name)
        if first is last
        else frames.grown(getattr(first, name), getattr(last, name))
        for name in ("ttft", "tpot", "queue", "e2e")
    }
    for name, histogram in histograms.items():
        if (mean := _mean(histogram)) is not None:
            side.estimates[f"{name}_seconds"] = mean
    for name in ("prompt", "generation"):
        whole, old = (getattr(page, f"request_{name}_tokens") for page in (last, first))
        size = _mean(whole if first is last else frames.grown(old, whole))
        if size is not None:
            side.estimates["prompt_tokens" if name == "prompt" else "output_tokens"] = size
    ended = histograms["e2e"] or histograms["ttft"]
    count = ended.observations if ended is not None else 0.0
    side.requests = int(count) or None
    preemptions = increase(case, "preemptions")
    if preemptions is not None and count:
        # Counts of rare events scatter like their root.
        side.estimates["preemptions_per_request"] = Known(
            preemptions / count, math.sqrt(max(preemptions, 1.0)) / count
        )
    queried, hits = increase(case, "queries"), increase(case, "hits")
    if queried and hits is not None:
        ratio = min(1.0, hits / queried)
        # At most one independent draw per request.
        error = math.sqrt(ratio * (1 - ratio) / count) if count else None
        side.estimates["hit_ratio"] = Known(ratio, error)
    return side


def typed(text: str) -> Any:
    """A label's value as the engine's own record has it: numbers and truth values, not their spelling."""
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _mean(histogram: Histogram | None) -> Known | None:
    """Mean with the spread that the buckets show: every observation at its bucket's upper bound or the mean."""
    if histogram is None or histogram.observations < 1:
        return None
    mean = histogram.total / histogram.observations
    heights = np.diff(np.array(histogram.heights, np.float64), prepend=0.0)
    bounds = np.array(histogram.bounds, np.float64)
    finite = np.isfinite(bounds)
    places = np.where(finite, bounds, max(2 * float(bounds[finite].max(initial=0.0)), mean))
    variance = float((heights * (places - mean) ** 2).sum() / histogram.observations)
    return Known(mean, math.sqrt(variance / histogram.observations))


# -- bench results ----------------------------------------------------------------------------------------

_BENCH = {"ttft_seconds": "ttft", "tpot_seconds": "tpot", "e2e_seconds": "e2el"}


def from_bench(target: str, result: Mapping[str, Any]) -> Side:
    """From what ``vllm bench serve --save-result`` wrote; ``--save-detailed`` adds the spread."""
    completed = _number(result.get("completed"))
    if completed is None or "mean_ttft_ms" not in result:
        raise KVCatchError(
            f"{target}: no result of vllm bench serve (completed and mean_ttft_ms are missing).",
            "Write one with: vllm bench serve --save-result --save-detailed",
        )
    model = result.get("model_id")
    side = Side(target, "bench", EngineInfo(model=model if isinstance(model, str) else None))
    side.requests = int(completed)
    for name, short in _BENCH.items():
        mean, deviation = _number(result.get(f"mean_{short}_ms")), _number(result.get(f"std_{short}_ms"))
        if mean is not None and completed >= 2:
            error = None if deviation is None else deviation / 1e3 / math.sqrt(completed)
            side.estimates[name] = Known(mean / 1e3, error)
    detailed = result.get("ttfts")
    if isinstance(detailed, list):
        values = np.array([value for row in detailed if (value := _number(row)) is not None and value > 0])
        if len(values):
            side.estimates["ttft_seconds"] = Draws(values)
            side.estimates["ttft_p95_seconds"] = Draws(values, quantile=0.95)
    else:
        side.notes.append(f"{target}: no single requests in it; vllm bench serve --save-detailed adds them")
    throughput = _number(result.get("output_throughput"))
    if throughput is not None:
        side.estimates["output_tokens_per_second"] = Known(throughput)
    for name, total in (("prompt_tokens", "total_input_tokens"), ("output_tokens", "total_output_tokens")):
        value = _number(result.get(total))
        if value is not None and completed:
            side.estimates[name] = Known(value / completed)
    rate, duration = _number(result.get("request_rate")), _number(result.get("duration"))
    side.load["requests_per_second"] = rate if rate is not None else math.inf
    spent = side.estimates.get("e2e_seconds")
    if duration and spent is not None and spent.value is not None:
        side.load["concurrency"] = completed * spent.value / duration
    return side


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)

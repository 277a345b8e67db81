"""One run as ``kvcatch replay`` saw it from outside: each request's times and tokens, and the engine's counters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvcatch.analysis.compare_sides import Side, capacity, typed
from kvcatch.analysis.compare_stats import Draws, Known
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.sources.replayed import Answer, Replayed, Tail


def replay_side(replayed: Replayed) -> Side:
    """A side of a results file; its estimates follow from ``fill_replay``. Raises KVCatchError without any answer."""
    head, tail = replayed.head, replayed.tail
    config = {name: typed(value) for name, value in head.config.items()}
    blocks, size = config.get("num_gpu_blocks"), config.get("block_size")
    info = EngineInfo(
        engine_version=head.engine_version or "unknown",
        model=head.model,
        num_blocks=blocks if isinstance(blocks, int) else 0,
        block_size=size if isinstance(size, int) else 0,
        config={"cache": config} if config else {},
    )
    side = Side(replayed.target, "replay", info, replayed=replayed)
    if not any(answer.status == "ok" for answer in replayed.answers):
        raise KVCatchError(f"{replayed.target}: no request was answered.", "Replay again.")
    failed = sum(answer.status != "ok" for answer in replayed.answers)
    if failed:
        side.notes.append(f"{replayed.target}: {failed} requests were not answered and are left out")
    if tail is None or tail.interrupted:
        side.notes.append(f"{replayed.target}: the run was cut short")
    return side


def paired_answers(a: Replayed, b: Replayed) -> tuple[list[Answer], list[Answer]] | None:
    """The requests that both answered, each beside itself; None when the runs asked for different things."""
    other = {answer.index: answer for answer in b.answers}
    both = [(one, other[one.index]) for one in a.answers if one.index in other]
    alike = [(one, two) for one, two in both if one.prompt_tokens == two.prompt_tokens]
    if not alike or len(alike) < 0.95 * max(len(a.answers), len(b.answers)):
        return None
    done = [(one, two) for one, two in alike if one.status == two.status == "ok"]
    return [one for one, _ in done], [two for _, two in done]


def merged(runs: Sequence[Replayed], target: str) -> Replayed:
    """Several runs of one workload against one engine, one after the other, as one. Raises KVCatchError for none."""
    if not runs:
        raise KVCatchError(f"{target}: no runs to put together.", "Replay first.")
    step = 1 + max((answer.index for run in runs for answer in run.answers), default=0)
    answers: list[Answer] = []
    start = 0.0
    counters: dict[str, float] = {}
    for number, run in enumerate(runs):
        answers += [
            msgspec.structs.replace(
                answer,
                index=answer.index + number * step,
                due_seconds=answer.due_seconds + start,
                sent_seconds=answer.sent_seconds + start,
                first_seconds=None if answer.first_seconds is None else answer.first_seconds + start,
                finished_seconds=None if answer.finished_seconds is None else answer.finished_seconds + start,
            )
            for answer in run.answers
        ]
        start += run.tail.duration_seconds if run.tail is not None else 0.0
        for name, value in run.tail.counters.items() if run.tail is not None else ():
            counters[name] = counters.get(name, 0.0) + value
    cut = any(run.tail is None or run.tail.interrupted for run in runs)
    # A counter that one run lacks is not known for all of them.
    known = [run.tail.counters if run.tail is not None else {} for run in runs]
    counters = {name: value for name, value in counters.items() if all(name in one for one in known)}
    return Replayed(
        target, runs[0].head, tuple(answers), Tail(interrupted=cut, duration_seconds=start, counters=counters)
    )


def answered(replayed: Replayed) -> list[Answer]:
    """The requests that were answered, in order of arrival."""
    return [answer for answer in replayed.answers if answer.status == "ok"]


def fill_replay(side: Side, answers: Sequence[Answer]) -> None:
    """Estimate everything from these requests."""
    assert side.replayed is not None
    side.requests = len(answers)
    side.estimates = capacity(side.info)
    if not answers:
        return
    sent = np.array([answer.sent_seconds for answer in answers])
    first = np.array([answer.first_seconds or np.nan for answer in answers])
    finished = np.array([answer.finished_seconds or np.nan for answer in answers])
    outputs = np.array([answer.output_tokens or 0 for answer in answers], np.float64)
    prompts = np.array([answer.prompt_tokens for answer in answers], np.float64)
    several = outputs > 1
    decode = np.where(several, finished - first, 0.0)
    side.estimates |= {
        "ttft_seconds": Draws(first - sent),
        "ttft_p95_seconds": Draws(first - sent, quantile=0.95),
        "tpot_seconds": Draws(decode, np.where(several, outputs - 1, 0.0)),
        "e2e_seconds": Draws(finished - sent),
        "prompt_tokens": Draws(prompts),
        "output_tokens": Draws(outputs),
    }
    cached = [answer.cached_tokens for answer in answers]
    tail = side.replayed.tail
    counters = tail.counters if tail is not None else {}
    if None not in cached:
        side.estimates["hit_ratio"] = Draws(np.array(cached, np.float64), prompts)
    elif counters.get("queries") and "hits" in counters:
        ratio = min(1.0, counters["hits"] / counters["queries"])
        side.estimates["hit_ratio"] = Known(ratio, math.sqrt(ratio * (1 - ratio) / len(answers)))
    if "preemptions" in counters:
        # Counts of rare events scatter like their root; the counters speak of the whole run.
        count, total = counters["preemptions"], max(1, len(answered(side.replayed)))
        side.estimates["preemptions_per_request"] = Known(count / total, math.sqrt(max(count, 1.0)) / total)
    spread, whole = float(np.ptp(sent)), float(np.nanmax(finished) - sent.min())
    side.load = {
        "requests_per_second": (len(answers) - 1) / spread if spread > 0.02 * whole else math.inf,
        "concurrency": float(np.nansum(finished - sent)) / whole if whole else 0.0,
    }

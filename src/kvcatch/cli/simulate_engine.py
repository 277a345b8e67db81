"""``kvcatch simulate --engine``: arrivals, scheduling, preemption and latency; validation against a record."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.results import Result
from kvcatch.units import human_count, human_ratio, human_seconds, parse_duration

if TYPE_CHECKING:
    from kvcatch.events import EngineInfo
    from kvcatch.simulator.cost import StepCost
    from kvcatch.simulator.engine import EngineSettings, EngineSimulation
    from kvcatch.sources.captured import Measured
    from kvcatch.workload import Workload

#: words of --step-cost -> field of StepCost
COSTS = {
    "fixed": "fixed",
    "prefill": "per_prefill_token",
    "decode": "per_decode",
    "context": "per_context_token",
    "attention": "per_attention",
}
#: how far the simulation may be from the record before --validate fails
HIT_TOLERANCE, PREEMPTION_TOLERANCE, PREEMPTIONS_APART = 0.01, 0.10, 2


class Check(Result, frozen=True):
    """One simulated number beside the recorded one."""

    what: str
    simulated: float
    recorded: float
    within: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the engine simulation."""
    group = parser.add_argument_group("engine simulation")
    group.add_argument("--engine", action="store_true", help="with scheduler, arrivals, preemption, latency")
    group.add_argument(
        "--max-num-seqs", metavar="N,N...", help="requests at once (default: recorded, or 256)"
    )
    group.add_argument(
        "--max-num-batched-tokens", metavar="N,N...", help="tokens a step (default: recorded, or 2048)"
    )
    group.add_argument(
        "--watermark", default=None, metavar="F,F...", help="fraction of blocks kept free at admission"
    )
    group.add_argument(
        "--priority",
        metavar="TENANT=N,...",
        help="priority scheduling: the smallest N first, tenants left out at 0",
    )
    group.add_argument(
        "--scheduler", metavar="NAME,...", default="stock",
        help="stock, or kvcatch's own in a mode: observe, backfill, backfill+peak; several are compared",
    )  # fmt: skip
    group.add_argument(
        "--async-scheduling", metavar="on|off,...",
        help="whether the next step is decided while one is computed (default: recorded, or off)",
    )  # fmt: skip
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast")
    group.add_argument(
        "--step-cost", metavar="PART=TIME,...",
        help="seconds of a step: fixed, prefill (a token), decode (a request), context and attention (a token); "
        "for example fixed=17ms,prefill=0.1ms",
    )  # fmt: skip
    group.add_argument(
        "--fit", action="store_true", help="find the step cost from the times of a recorded TRACE"
    )
    group.add_argument(
        "--validate", action="store_true",
        help="simulate a recorded TRACE with its own settings and compare; exit 1 when hits or preemptions differ",
    )  # fmt: skip


def settings_grid(
    args: argparse.Namespace, rooms: Sequence[int | None], sizes: Sequence[int], info: EngineInfo | None,
    numbers: Callable[[str, str | None], list[int]], append_all: bool,
) -> list[EngineSettings]:  # fmt: skip
    """Every combination of the lists. ``append_all`` asks for the rules of vLLM 0.12. Raises KVCatchError where a pool size is missing or a number is bad."""
    from kvcatch.simulator.engine import EngineSettings

    if None in rooms:
        raise KVCatchError("--engine needs the size of the pool.", "Give --num-blocks N.")
    seqs = numbers("--max-num-seqs", args.max_num_seqs) or [(info and info.max_num_seqs) or 256]
    tokens = numbers("--max-num-batched-tokens", args.max_num_batched_tokens) or [
        (info and info.max_num_batched_tokens) or 2048
    ]
    marks = [_fraction(word) for word in args.watermark.split(",")] if args.watermark else [
        (info and info.watermark_free_ratio) or 0.0
    ]  # fmt: skip
    cost = step_cost(args.step_cost)
    priorities = _priorities(args.priority)
    append_all = append_all or bool(info and info.engine_version.startswith("0.12."))
    # A recorded engine's own way, where both ways are known: unlike an option it is no wish to be refused.
    recorded = bool(info and info.async_scheduling) and priorities is None and not append_all
    words = args.async_scheduling
    overlaps = [_switch(word) for word in words.split(",")] if words else [recorded]
    return [
        EngineSettings(
            num_blocks=room or 0,
            block_size=size,
            max_num_seqs=most,
            max_num_batched_tokens=budget,
            max_model_len=info.max_model_len if info else None,
            watermark=mark,
            enable_prefix_caching=not info or info.prefix_caching is not False,
            append_all=append_all,
            reserve_full_prompt=not append_all,
            priorities=priorities,
            scheduler=scheduler,
            async_scheduling=overlap,
            cost=cost,
        )
        for size, room, most, budget, mark, scheduler, overlap in product(
            sizes, rooms, seqs, tokens, marks, args.scheduler.split(","), overlaps
        )
    ]


def _switch(word: str) -> bool:
    """``on`` or ``off``. Raises KVCatchError."""
    if word.strip() not in ("on", "off"):
        raise KVCatchError(
            f"--async-scheduling: {word!r} is neither on nor off.", "Write for example off,on."
        )
    return word.strip() == "on"


def _priorities(text: str | None) -> dict[str, int] | None:
    """``gold=-1,batch=5`` as numbers; None where nothing is asked. Raises KVCatchError."""
    if text is None:
        return None
    found = {}
    for word in text.split(","):
        name, equals, number = word.strip().rpartition("=")
        if not equals or not number.lstrip("-").isdigit():
            raise KVCatchError(f"--priority: {word!r} is not TENANT=N.", "Write for example chat=-1,batch=5.")
        found[name] = int(number)
    return found


def fitted(
    workload: Workload, measured: Measured, grid: list[EngineSettings], info: EngineInfo
) -> tuple[list[EngineSettings], dict[str, Any]]:
    """The grid with the cost that explains the recorded times on the recorded engine."""
    from kvcatch.simulator.engine import EngineSettings
    from kvcatch.simulator.fit import fit_step_cost

    was = EngineSettings(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs or 256,
        max_num_batched_tokens=info.max_num_batched_tokens or 2048,
        watermark=info.watermark_free_ratio or 0.0,
        async_scheduling=bool(info.async_scheduling),
    )
    fit = fit_step_cost(workload, was, measured.first_token, measured.finished)
    return [msgspec.structs.replace(settings, cost=fit.cost) for settings in grid], fit.to_dict()


def faster(workload: Workload, speed: float) -> Workload:
    """Arrivals ``speed`` times as fast. Raises KVCatchError when it is not positive."""
    if not speed > 0:
        raise KVCatchError(f"--speed {speed} is not positive.", "1 is the trace's own.")
    return dataclasses.replace(workload, arrival_seconds=workload.arrival_seconds / speed)


def step_cost(text: str | None) -> StepCost:
    """``fixed=17ms,prefill=0.1ms`` as a cost; parts left out are zero. Raises KVCatchError."""
    from kvcatch.simulator.cost import StepCost

    if text is None:
        return StepCost()
    parts = dict.fromkeys(COSTS.values(), 0.0)
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name not in COSTS:
            raise KVCatchError(f"--step-cost: no part {name!r}.", f"Parts: {', '.join(COSTS)}.")
        parts[COSTS[name]] = _time(value)
    return StepCost(**parts)


def _time(text: str) -> float:
    for unit, factor in (("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6)):
        if text.endswith(unit):
            return parse_duration(text.removesuffix(unit)) * factor
    return parse_duration(text)


def _fraction(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise KVCatchError(f"--watermark: {word!r} is not a number.", "Write for example 0.05.") from None


def validate(result: EngineSimulation, measured: Measured) -> list[Check]:
    """Hits within 1 %, preemptions within 10 % or two."""
    hits = int(measured.cached_tokens.sum())
    apart = abs(result.preemptions - measured.preemptions)
    return [
        Check(
            what="hit_tokens",
            simulated=result.hit_tokens,
            recorded=hits,
            within=abs(result.hit_tokens - hits) <= HIT_TOLERANCE * max(hits, 1),
        ),
        Check(
            what="preemptions",
            simulated=result.preemptions,
            recorded=measured.preemptions,
            within=apart <= max(PREEMPTIONS_APART, PREEMPTION_TOLERANCE * measured.preemptions),
        ),
    ]


def print_engine(workload: Workload, results: Sequence[EngineSimulation]) -> None:
    """A row for each setting."""
    names = [one.scheduler + (", async" if one.async_scheduling else "") for one in results]
    several = any(name != "stock" for name in names)
    borders = sorted({one.long_prompt_tokens for one in results})
    words = human_count(borders[0]) + (f" to {human_count(borders[-1])}" if len(borders) > 1 else "")
    print(
        f"{workload.name}: {human_count(len(workload))} requests over {human_seconds(workload.arrival_seconds[-1])}; "
        f"short and long p95 of TTFT: prompts up to and above {words} tokens"
    )
    print(
        f"{'blocks':>9} {'size':>5} {'seqs':>5} {'budget':>7} {'free':>5} {'hit':>7} {'preempt':>8} {'recomputed':>11} "
        f"{'peak':>7} {'TTFT mean':>10} {'p99':>9} {'short p95':>9} {'long p95':>9} {'TPOT':>9} {'out tok/s':>9}"
        f"{'  scheduler' if several else ''}"
    )
    for one, name in zip(results, names, strict=True):
        print(
            f"{human_count(one.num_blocks):>9} {one.block_size:>5} {one.max_num_seqs:>5} "
            f"{one.max_num_batched_tokens:>7} {one.watermark:>5.2f} {human_ratio(one.token_hit_ratio):>7} "
            f"{human_count(one.preemptions):>8} {human_count(one.recomputed_tokens):>11} "
            f"{human_ratio(one.peak_active_ratio):>7} {human_seconds(one.ttft_seconds.get('mean')):>10} "
            f"{human_seconds(one.ttft_seconds.get('p99')):>9} "
            f"{human_seconds(one.ttft_short_seconds.get('p95')):>9} "
            f"{human_seconds(one.ttft_long_seconds.get('p95')):>9} {human_seconds(one.tpot_seconds.get('mean')):>9} "
            f"{human_count(one.output_tokens_per_second):>9}{'  ' + name if several else ''}"
        )
        if one.rejected_requests:
            print(f"          {human_count(one.rejected_requests)} requests need more blocks than there are")


def print_checks(checks: Sequence[Check]) -> None:
    """Simulated beside recorded."""
    print(f"\n{'':<14} {'simulated':>12} {'recorded':>12}")
    for check in checks:
        mark = "within tolerance" if check.within else "DIFFERS"
        print(
            f"{check.what:<14} {human_count(check.simulated):>12} {human_count(check.recorded):>12}  {mark}"
        )

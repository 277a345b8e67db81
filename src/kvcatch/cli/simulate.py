"""``kvcatch simulate``: what a trace would hit with other sizes, block sizes and policies."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcatch.errors import KVCatchError
from kvcatch.units import GIB, human_count, human_ratio, parse_duration, parse_size

if TYPE_CHECKING:
    from kvcatch.events import EngineInfo
    from kvcatch.simulator.bounds import Bound
    from kvcatch.simulator.curve import Curve, HostTier
    from kvcatch.simulator.whatif import Simulation
    from kvcatch.sources.captured import Measured
    from kvcatch.views.hitcurve import Today
    from kvcatch.workload import Workload

SCHEMA_VERSION = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``simulate``."""
    from kvcatch.cli import simulate_engine, simulate_grid

    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="Mooncake, Bailian, Azure, LMBench, ShareGPT, request log, or a folder of ServeGen parameters",
    )
    parser.add_argument(
        "--num-blocks",
        metavar="N,N...",
        help="blocks as vLLM counts them, or 'unlimited'",
    )
    parser.add_argument("--block-size", metavar="N,N...", help="tokens a block (default: the trace's own)")
    parser.add_argument(
        "--policy", default="lru", metavar="NAME,...", help="eviction order; --policy help lists them"
    )
    parser.add_argument(
        "--engine-rules",
        choices=("on", "off"),
        default="on",
        help="off: plain prefix LRU over the listed ids",
    )
    parser.add_argument("--curve", action="store_true", help="the hit ratio of every capacity, in one pass")
    parser.add_argument(
        "--sample", type=float, metavar="RATE",
        help="with --curve: estimate it from this share of the blocks, up to 0.5, with an error bar",
    )  # fmt: skip
    parser.add_argument(
        "--bounds", action="store_true", help="what any policy, order or content match could reach"
    )
    parser.add_argument(
        "--kv-bytes-per-token", metavar="SIZE", help="of your model, to speak in GiB (kvcatch plan prints it)"
    )
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="a second tier of this size behind the pool (with --curve)"
    )
    parser.add_argument("--host-bandwidth", metavar="SIZE", help="bytes a second to read it back, e.g. 25GB")
    parser.add_argument(
        "--pinned", default="", metavar="TENANT,...", help="tenants kept longest under --policy priority"
    )
    parser.add_argument(
        "--protect-tokens",
        type=int,
        default=0,
        metavar="N",
        help="leading tokens kept longest under --policy protect",
    )
    parser.add_argument(
        "--floors",
        default="",
        metavar="TENANT=SHARE,...",
        help="of the pool, for proven prefixes kept longest under --policy floors; * = every other tenant",
    )
    parser.add_argument(
        "--tenant-key",
        default="",
        metavar="FIELD",
        help="field that names the tenant (default: tenant, user or type)",
    )
    parser.add_argument(
        "--trace-block-size", type=int, metavar="N", help="tokens behind one id, where the trace does not say"
    )
    parser.add_argument(
        "--span", default="10m", metavar="DURATION", help="of ServeGen parameters (default 10m)"
    )
    parser.add_argument("--pool", default="", metavar="NAME", help="of ServeGen parameters that hold several")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    simulate_grid.add_arguments(parser)
    simulate_engine.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate and print. Raises KVCatchError for bad options and traces that cannot be read."""
    from kvcatch.cli import simulate_grid
    from kvcatch.simulator.policies import POLICIES, RUNNABLE

    if args.policy == "help":
        width = max(map(len, POLICIES))
        for name, what in POLICIES.items():
            print(f"{name:<{width}}  evicts first {what}  [{RUNNABLE.get(name, 'bound only')}]")
        return 0
    documents = [_one(trace, args) for trace in args.traces]
    simulate_grid.write(args, documents)
    if args.json:
        merged: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "kvcatch_version": _version(),
            "results": [],
        }
        for document in documents:
            merged["results"] += document.pop("results")
        merged["traces"] = documents
        print(json.dumps(merged, separators=(",", ":")))
    return 0 if all(check["within"] for document in documents for check in document.get("checks", ())) else 1


def _one(trace: str, args: argparse.Namespace) -> dict[str, Any]:
    from kvcatch.cli.simulate_grid import workers_of
    from kvcatch.policy.protect import parse_floors
    from kvcatch.simulator.bounds import ladder
    from kvcatch.simulator.curve import hit_curve
    from kvcatch.simulator.sampling import sampled_curve
    from kvcatch.simulator.whatif import default_block_size, sweep
    from kvcatch.views.hitcurve import Today, next_gib

    if args.sample is not None and (not args.curve or args.engine or args.engine_rules == "off"):
        raise KVCatchError(
            "--sample estimates the curve under the engine's rules.", "Use it with --curve only."
        )
    workload, measured, info = _read(trace, args)
    for note in workload.notes:
        print(f"kvcatch: {workload.name}: {note}", file=sys.stderr)
    rules = args.engine_rules == "on"
    own = info.num_blocks if info is not None and args.num_blocks is None else None
    rooms: list[int | None] = (
        [own] if own else [_room(word) for word in (args.num_blocks or "unlimited").split(",")]
    )
    sizes = _numbers("--block-size", args.block_size) or [default_block_size(workload)]
    policies = [word.strip() for word in args.policy.split(",")]
    document: dict[str, Any] = {
        "trace": workload.name,
        "requests": len(workload),
        "notes": list(workload.notes),
    }
    if args.engine or args.validate:
        _engine(args, document, workload, measured, info, rooms, sizes, policies)
        return document
    # Who samples does not want the whole trace run through a pool that nobody named.
    runs = [] if args.sample is not None and args.num_blocks is None else rooms
    results = sweep(
        workload, runs, sizes, policies, workers=workers_of(args), progress=_progress, engine_rules=rules,
        pinned=[word for word in args.pinned.split(",") if word], protect_tokens=args.protect_tokens,
        floors=parse_floors(args.floors, "--floors"),
    )  # fmt: skip
    document["results"] = [result.to_dict() for result in results]
    per_token = parse_size(args.kv_bytes_per_token) if args.kv_bytes_per_token else None
    if per_token is None and info is not None and info.block_bytes and info.block_size:
        per_token = info.block_bytes // info.block_size
    finite = next((room for room in rooms if room is not None), None)
    today = Today(finite - rules if finite is not None else None, per_token)
    if not args.json and results:
        _print_results(workload, results)
    if args.curve:
        document["curves"] = []
        for size in sizes:
            if args.sample is None:
                curve = hit_curve(workload, size, engine_rules=rules)
            else:
                curve = sampled_curve(workload, size, rate=args.sample)
            document["curves"].append(_curve_document(curve, next_gib(curve, today)))
            if not args.json:
                _print_curve(curve, today, args)
            if args.host_memory:
                document["curves"][-1]["host_tier"] = _host(curve, today, args).to_dict()
    if args.bounds:
        bounds = [
            (size, room, ladder(workload, num_blocks=room, block_size=size, engine_rules=rules))
            for size in sizes
            for room in rooms
        ]
        document["bounds"] = [
            {"block_size": size, "num_blocks": room, "ladder": [bound.to_dict() for bound in rungs]}
            for size, room, rungs in bounds
        ]
        if not args.json:
            for size, room, rungs in bounds:
                _print_bounds(size, room, rungs)
    return document


def _read(trace: str, args: argparse.Namespace) -> tuple[Workload, Measured | None, EngineInfo | None]:
    """A trace, or a recording with what was measured."""
    from kvcatch.sources.servegen import is_servegen, read_servegen
    from kvcatch.sources.traces import read_workload

    measured, info = None, None
    if trace == "live" or trace.isdigit() or trace.endswith((".kvcap", ".kvring")):
        from kvcatch import api
        from kvcatch.sources.captured import workload_of

        capture = api.open(trace)
        workload, measured = workload_of(capture)
        info = capture.info
        capture.close()
    elif is_servegen(trace):
        workload = read_servegen(trace, pool=args.pool, span=parse_duration(args.span))
    else:
        workload = read_workload(trace, trace_block_size=args.trace_block_size, tenant_key=args.tenant_key)
    if args.limit is not None:
        if measured is not None:
            raise KVCatchError(
                "--limit works on traces, not on recordings.", "Cut the recording with --last."
            )
        workload = workload.head(_positive("--limit", args.limit))
    return workload, measured, info


def _engine(
    args: argparse.Namespace, document: dict[str, Any], workload: Workload, measured: Measured | None,
    info: EngineInfo | None, rooms: list[int | None], sizes: list[int], policies: list[str],
) -> None:  # fmt: skip
    from kvcatch.cli import simulate_engine as engine
    from kvcatch.cli.simulate_grid import workers_of
    from kvcatch.control.rehearsal import serve_governed
    from kvcatch.simulator.engine import sweep_engine

    if (args.fit or args.validate) and (measured is None or info is None):
        raise KVCatchError(
            f"{workload.name} holds no measured times.", "--fit and --validate need a recording."
        )
    if policies not in (["lru"], ["lru-append"]):
        raise KVCatchError("--engine evicts as vLLM does.", "Use --policy lru or lru-append with it.")
    grid = engine.settings_grid(args, rooms, sizes, info, _numbers, policies == ["lru-append"])
    if (args.fit or (args.validate and not args.step_cost)) and measured is not None and info is not None:
        grid, document["fit"] = engine.fitted(workload, measured, grid, info)
    results = sweep_engine(
        engine.faster(workload, args.speed), grid, workers=workers_of(args), progress=_progress,
        server=serve_governed,
    )  # fmt: skip
    document["results"] = [result.to_dict() for result in results]
    if not args.json:
        engine.print_engine(workload, results)
    if args.validate and measured is not None:
        checks = engine.validate(results[0], measured)
        document["checks"] = [check.to_dict() for check in checks]
        if not args.json:
            engine.print_checks(checks)


def _curve_document(curve: Curve, gain: float | None) -> dict[str, Any]:
    points = []
    for room in curve.capacities(64):
        blocks, tokens = curve.at(room)
        points.append(
            {
                "usable_blocks": room,
                "hit_blocks": blocks,
                "hit_tokens": tokens,
                "token_hit_ratio": curve.ratio(room),
                "token_hit_ratio_error": None if curve.errors is None else curve.error(room),
                "block_hit_ratio": blocks / curve.queried_blocks if curve.queried_blocks else None,
            }
        )
    return {
        "block_size": curve.block_size,
        "exact": curve.exact,
        "sampled_references": curve.sampled,
        "valid_from_usable_blocks": curve.first,
        "saturated_at_usable_blocks": curve.saturated_at,
        "next_gib_token_hit_ratio": gain,
        "points": points,
    }


def _print_results(workload: Workload, results: Sequence[Simulation]) -> None:
    print(f"{workload.name}: {human_count(len(workload))} requests, one after the other")
    print(
        f"{'blocks':>11} {'size':>6} {'policy':<10} {'hit tokens':>14} {'ratio':>15} {'block ratio':>11} {'evicted':>11} {'peak':>8}"
    )
    for one in results:
        room = "unlimited" if one.num_blocks is None else human_count(one.num_blocks)
        ratio = human_ratio(one.token_hit_ratio, 2)
        if one.hit_tokens_ceiling > one.hit_tokens:
            ratio = f"{ratio}-{human_ratio(one.token_hit_ratio_ceiling, 2)}"
        print(
            f"{room:>11} {one.block_size:>6} {one.policy:<10} {human_count(one.hit_tokens):>14} {ratio:>15} "
            f"{human_ratio(one.block_hit_ratio, 2):>11} {human_count(one.evicted_blocks):>11} {human_count(one.peak_active_blocks):>8}"
        )
        if one.rejected_requests:
            print(
                f"            {human_count(one.rejected_requests)} requests need more blocks than there are"
            )
        for tenant in one.tenants:
            print(
                f"            {tenant.tenant or '(none)':<17} {human_count(tenant.hit_tokens):>14} "
                f"{human_ratio(tenant.token_hit_ratio, 2):>15}  of {human_count(tenant.queried_tokens)} tokens"
            )
    if bounds := sorted({one.policy for one in results if one.runs_on is None}):
        print(f"Bound only, no engine evicts so: {', '.join(bounds)}.")
    if any(one.hit_tokens_ceiling > one.hit_tokens for one in results):
        print("A range: the trace's ids do not tell how far sharing goes within a block.")


def _print_curve(curve: Curve, today: Today, args: argparse.Namespace) -> None:
    from kvcatch.cli.demo import use_color
    from kvcatch.views.hitcurve import curve_lines
    from kvcatch.views.palette import Look, ansi

    look = Look(width=max(60, shutil.get_terminal_size((100, 24)).columns), ascii=args.ascii)
    print(f"\nBlocks of {curve.block_size} tokens:")
    sys.stdout.write(
        ansi(curve_lines(curve, look, today), color=use_color(args.color), ascii_only=args.ascii)
    )


def _host(curve: Curve, today: Today, args: argparse.Namespace) -> HostTier:
    from kvcatch.simulator.curve import host_tier
    from kvcatch.units import human_bytes, human_seconds

    if today.blocks is None or not today.bytes_per_token:
        raise KVCatchError(
            "--host-memory needs the pool's size and the bytes of a token.",
            "Give --num-blocks N and --kv-bytes-per-token SIZE.",
        )
    size = parse_size(args.host_memory)
    tier = host_tier(
        curve, today.blocks, size // (today.bytes_per_token * curve.block_size),
        bytes_per_token=today.bytes_per_token,
        bytes_per_second=parse_size(args.host_bandwidth) if args.host_bandwidth else None,
    )  # fmt: skip
    if not args.json:
        cost = (
            "" if tier.transfer_seconds is None else f", {human_seconds(tier.transfer_seconds)} to read back"
        )
        print(
            f"with {human_bytes(size)} of host memory behind it: {human_ratio(tier.token_hit_ratio)}, "
            f"{human_count(tier.host_hit_tokens)} tokens from there{cost}"
        )
    return tier


def _print_bounds(size: int, room: int | None, rungs: Sequence[Bound]) -> None:
    shown = "no limit" if room is None else f"{human_count(room)} blocks"
    print(f"\nWhat could be hit at most ({shown} of {size} tokens):")
    for rung in rungs:
        print(f"  {human_ratio(rung.block_hit_ratio, 2):>8}  {rung.meaning}")


def _room(word: str) -> int | None:
    word = word.strip()
    if word in ("unlimited", "inf"):
        return None
    return _number("--num-blocks", word)


def _numbers(option: str, text: str | None) -> list[int]:
    return [_number(option, word) for word in text.split(",")] if text else []


def _number(option: str, word: str) -> int:
    try:
        value = int(word)
    except ValueError:
        raise KVCatchError(
            f"{option}: {word!r} is not a number.", f"Write for example {option} 1000,2000."
        ) from None
    return _positive(option, value)


def _positive(option: str, value: int) -> int:
    if not 0 < value < GIB:
        raise KVCatchError(f"{option}: {value} is out of range.", "Give a positive number.")
    return value


def _progress(done: int, total: int) -> None:
    if total > 1 and sys.stderr.isatty():
        sys.stderr.write(f"\r  {done}/{total} runs" + ("\r\x1b[K" if done == total else ""))
        sys.stderr.flush()


def _version() -> str:
    from kvcatch import __version__

    return __version__

"""``kvcatch watermark``: the utilisation beyond which latency bends, measured and stored."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from kvcatch.cli.replay import add_sending_arguments, options, read_target
from kvcatch.cli.spans import add_span_arguments, resolve_span
from kvcatch.errors import KVCatchError
from kvcatch.units import human_count, human_ratio, human_seconds

if TYPE_CHECKING:
    from kvcatch.analysis.watermark import Watermark
    from kvcatch.events import EngineInfo
    from kvcatch.workload import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``watermark``."""
    parser.add_argument(
        "target",
        nargs="?",
        help="a recording, a recorder or prometheus:URL to measure from; with --drive the mix to send: a recording or a trace",
    )
    parser.add_argument(
        "--drive", metavar="URL", help="climb a load ladder against this engine (it gets slow meanwhile)"
    )
    group = parser.add_argument_group("load ladder (with --drive)")
    group.add_argument(
        "--prompt-tokens", type=int, default=512, metavar="N", help="mean prompt without TARGET (default 512)"
    )
    group.add_argument(
        "--output-tokens", type=int, default=128, metavar="N", help="mean output without TARGET (default 128)"
    )
    group.add_argument(
        "--per-level",
        type=int,
        metavar="N",
        help="requests of each of the 8 rungs (default: what arrives while ten of them are served, at least 120)",
    )
    group.add_argument(
        "--rates", metavar="R,R...", help="requests a second of the rungs instead of shares of the maximum"
    )
    group.add_argument("--num-blocks", type=int, metavar="N", help="of the pool, where /metrics does not say")
    group.add_argument("--block-size", type=int, metavar="N", help="likewise")
    group.add_argument(
        "--with-flag", type=float, metavar="F", help="the --watermark that the driven engine runs with, to measure what it gives"
    )  # fmt: skip
    add_sending_arguments(group)
    add_span_arguments(parser)
    parser.add_argument(
        "--no-store", action="store_true", help="print only; views keep the watermark they have"
    )
    parser.add_argument("--exit-zero", action="store_true", help="exit 0 also when there are warnings")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Measure, store, print; 1 when the answer comes with a warning. Raises KVCatchError."""
    from kvcatch import __version__
    from kvcatch.store.watermark import config_hash, configuration, write_watermark

    found, info = _driven(args) if args.drive else _observed(args)
    config = configuration(info)
    found = msgspec.structs.replace(
        found, kvcatch_version=__version__, config=config, config_hash=config_hash(config),
        measured_unix_seconds=time.time(),
    )  # fmt: skip
    path = None
    if found.safe_utilization_ratio is not None and not args.no_store:
        path = write_watermark(found.to_dict())
    if args.json:
        print(json.dumps(found.to_dict(), separators=(",", ":")))
    else:
        sys.stdout.write(text(found))
    for warning in found.warnings:
        print(f"kvcatch: {warning}", file=sys.stderr)
    if path is not None:
        print(f"Wrote {path}: top, report, serve and the scheduler draw it from now on", file=sys.stderr)
    return 1 if found.warnings and not args.exit_zero else 0


def _observed(args: argparse.Namespace) -> tuple[Watermark, EngineInfo]:
    """From what an engine did by itself."""
    from kvcatch.analysis.watermark import measure
    from kvcatch.diagnosis import recording_path

    path = recording_path(args.target)
    if path is not None:
        from kvcatch.analysis.watermark_sources import from_recording
        from kvcatch.store.columns import read_recording

        recording = read_recording(path)
        samples = recording.samples["unix_ns"]
        span = resolve_span(args, float(samples[-1]) / 1e9 if len(samples) else None)
        seen = from_recording(recording, *span)
        found = measure(seen)
        return msgspec.structs.replace(found, target=path, source="capture"), recording.info
    if not str(args.target).startswith("prometheus:"):
        raise KVCatchError(
            f"{args.target}: neither a recording nor prometheus:URL.",
            "Measure a running engine with --drive URL.",
        )
    from kvcatch.analysis.watermark_sources import from_pages
    from kvcatch.sources.prometheus import open_prometheus

    start, stop = resolve_span(args)
    capture = open_prometheus(
        args.target, None if start is None else start / 1e9, None if stop is None else stop / 1e9
    )
    engines = capture.engines()
    if len(engines) != 1:
        raise KVCatchError(
            f"{args.target}: {len(engines)} engines.", 'Select one with prometheus:URL?engine="0".'
        )
    found = measure(from_pages(args.target, capture.info, capture.readings()))
    return msgspec.structs.replace(found, target=args.target, source="prometheus"), capture.info


def _driven(args: argparse.Namespace) -> tuple[Watermark, EngineInfo]:
    """From a load ladder."""
    from kvcatch.analysis.watermark import measure, rate_at
    from kvcatch.events import EngineInfo

    chosen = options(args, args.drive)
    from kvcatch.replay.ladder import climb
    from kvcatch.sources.scrape import info_of

    rates = _rates(args.rates)
    workload = read_target(args) if args.target else made_up(args.prompt_tokens, args.output_tokens)
    climbed = climb(
        workload, chosen, per_level=args.per_level, rates=rates, num_blocks=args.num_blocks,
        block_size=args.block_size, note=lambda said: print(f"kvcatch: {said}", file=sys.stderr),
    )  # fmt: skip
    seen = climbed.observations
    seen.free_ratio = args.with_flag
    found = measure(seen, unloaded=climbed.unloaded)
    line = found.safe_utilization_ratio
    found = msgspec.structs.replace(
        found, target=climbed.endpoint.url, source="drive", levels=climbed.levels,
        rate_at_line_per_second=None if line is None else rate_at(climbed.levels, line),
    )  # fmt: skip
    reading = climbed.endpoint.reading
    info = info_of(reading) if reading is not None else EngineInfo()
    if args.num_blocks and args.block_size:
        info = msgspec.structs.replace(info, num_blocks=args.num_blocks, block_size=args.block_size)
    return found, info


def _rates(words: str | None) -> list[float]:
    try:
        rates = [float(word) for word in words.split(",")] if words else []
    except ValueError:
        raise KVCatchError(f"--rates {words!r}: not numbers.", "Write for example --rates 1,2,4.") from None
    if any(not rate > 0 for rate in rates):
        raise KVCatchError(f"--rates {words!r}: not all positive.", "Write for example --rates 1,2,4.")
    return rates


def made_up(prompt: int, output: int, count: int = 400, seed: int = 0) -> Workload:
    """Requests that share nothing, of lengths within a half of their mean. Raises KVCatchError for a length below 2."""
    import numpy as np

    from kvcatch.workload import build

    if prompt < 2 or output < 2:
        raise KVCatchError(f"{prompt} prompt and {output} output tokens.", "Give at least 2 of each.")
    rng = np.random.default_rng(seed)
    prompts = rng.integers(prompt // 2, prompt + prompt // 2 + 1, count)
    outputs = rng.integers(output // 2, output + output // 2 + 1, count)
    rows = [
        {"arrival": float(n), "prompt": int(p), "output": int(o), "segments": [(n, int(p))]}
        for n, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return build(f"{prompt}+{output} tokens", rows, grain=1)


def text(found: Watermark) -> str:
    """The answer for people."""
    low, high = found.committed_range
    demand = f"demand {low:.2f} to {high:.2f} of the pool"
    lines = [f"{found.target}: {human_count(found.observations)} requests, {demand}", ""]
    knee = found.knee_committed_ratio
    if knee is None:
        lines.append("no knee in range: latency does not bend with demand, up to the highest seen")
    else:
        lines.append(
            f"safe utilisation    {human_ratio(found.safe_utilization_ratio)} of the usable blocks in use"
        )
        lines.append(
            f"latency bends at    {knee.value:.2f} of the pool committed (95 % interval {knee.low:.2f} to {knee.high:.2f})"
        )
        flag = found.vllm_flag or "none needed: admission by itself holds the line"
        lines.append(f"vLLM's free share   {found.vllm_watermark_free_ratio:.3f}   {flag}")
    if found.slowdown_p95_below is not None:
        where = "below the line" if knee is not None else "over all demand seen"
        lines.append(f"p95 slowdown        {found.slowdown_p95_below:.2f} {where}")
    with_flag = found.p95_slowdown_with_flag
    if with_flag is not None:
        below = with_flag.slowdown_p95_below
        lines.append(
            f"with --watermark {with_flag.watermark_free_ratio:g}  p95 slowdown {with_flag.slowdown_p95:.2f} of all requests"
            + ("" if below is None or knee is None else f", {below:.2f} below the line")
            + f"; {human_ratio(with_flag.preemptions_per_request)} preempted"
        )
    elif found.vllm_flag:
        lines.append(
            "                    not yet measured with that flag on: restart with it and measure again"
        )
    if found.rate_at_line_per_second is not None:
        lines.append(f"rate at the line    {found.rate_at_line_per_second:.2f} requests a second of this mix")
    lines.append(f"largest prompt      {human_ratio(found.largest_request_ratio)} of the pool")
    idle = found.unloaded
    if idle is not None:
        lines.append(
            f"idle engine         TTFT {human_seconds(idle.fixed_seconds)} + {human_seconds(idle.seconds_per_token)} a token"
        )
    said = ", ".join(
        f"{name} {'none' if value is None else f'{value:.2f}'}" for name, value in found.opinions.items()
    )
    lines.append(f"second opinions     {said}")
    if found.levels:
        lines += ["", f"{'requests/s':>10} {'demand':>7} {'p95':>6} {'p95 slowdown':>13} {'preempted':>10}"]
        for level in found.levels:
            slow = "n/a" if level.slowdown_p95 is None else f"{level.slowdown_p95:.2f}"
            lines.append(
                f"{level.requests_per_second:>10.2f} {level.committed_ratio_mean:>7.2f} {level.committed_ratio_p95:>6.2f} "
                f"{slow:>13} {human_ratio(level.preemptions_per_request):>10}"
            )
    return "\n".join(lines) + "\n"

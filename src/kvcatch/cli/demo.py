"""``kvcatch demo``: a real trace through the embedded engine, with the real recorder on it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcatch.results import Finding, Result

if TYPE_CHECKING:
    from kvcatch.results import Snapshot
    from kvcatch.simulator.drive import Served
    from kvcatch.workload import Workload

BLOCK_SIZE = 16
#: Llama-3.1-8B in bf16: 2 x 32 layers x 8 heads x 128 x 2 bytes
KV_BYTES_PER_TOKEN = 131_072
POOL_GIB = 40
REQUESTS = 700
SPEED = 0.6  # one engine serves what Mooncake's cluster shared
LONG_TOKENS = 50_000


class Demo(Result, frozen=True):
    """What ``demo --json`` prints. Times are the embedded engine's own."""

    kvcatch_version: str
    requests: int
    steps: int
    engine_seconds: float
    wall_seconds: float
    queried_tokens: int
    hit_tokens: int
    hit_ratio: float | None
    preemptions: int | None
    recomputed_tokens: int | None
    ttft_seconds: float
    ttft_p95_seconds: float
    curve: tuple[dict[str, float | int], ...]
    next_gib_hit_ratio: float
    moment: dict[str, Any]
    findings: tuple[Finding, ...]
    report: str | None
    schema_version: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``demo``."""
    parser.add_argument(
        "--requests", type=int, default=REQUESTS, metavar="N", help="of the trace, at most 2000"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="keep the recording, for top and parse")
    parser.add_argument(
        "--report",
        metavar="HTML",
        help="where the report goes (default: kvcatch/demo.html in the cache folder)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE and HTML")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def run(args: argparse.Namespace) -> int:
    """Replay, record, show. Raises KVCatchError when the recording cannot be kept where asked."""
    from kvcatch import __version__
    from kvcatch.errors import KVCatchError
    from kvcatch.simulator.curve import hit_curve

    if not 50 <= args.requests <= 2000:
        raise KVCatchError(f"--requests {args.requests} is out of range.", "Give 50 to 2000.")
    target = Path(args.output) if args.output else None
    for named in (target, Path(args.report) if args.report else None):
        if named is not None and named.exists() and not args.force:
            raise KVCatchError(f"{named} exists.", "Overwrite it with --force.")
    start = time.perf_counter()
    workload = named_tenants(read_slice())
    _say(f"replaying {args.requests} requests of a real trace (Mooncake, FAST'25; tenants are made up) ...")
    with tempfile.TemporaryDirectory(prefix="kvcatch-demo-") as folder:
        path, served, seconds = record(workload.head(args.requests), Path(folder))
        moment, last = moments(path)
        findings, report = explain(path, args.report)
        if target is not None:
            shutil.copyfile(path, target)
    curve = hit_curve(workload, BLOCK_SIZE)
    usable = POOL_GIB * _blocks_per_gib()
    waits = sorted(served.first_token[name] - served.arrived[name] for name in served.first_token)
    demo = Demo(
        kvcatch_version=__version__,
        requests=len(served.finished),
        steps=served.steps,
        engine_seconds=seconds,
        wall_seconds=time.perf_counter() - start,
        queried_tokens=last.prefix.queried_tokens or 0,
        hit_tokens=last.prefix.hit_tokens or 0,
        hit_ratio=last.prefix.hit_ratio,
        preemptions=last.preemption.preemptions,
        recomputed_tokens=last.preemption.recomputed_tokens,
        ttft_seconds=sum(waits) / len(waits),
        ttft_p95_seconds=waits[int(0.95 * (len(waits) - 1))],
        curve=tuple(
            {"num_blocks": room, "gib": room / _blocks_per_gib(), "token_hit_ratio": curve.ratio(room)}
            for room in curve.capacities(24)
        ),
        next_gib_hit_ratio=curve.ratio(usable + _blocks_per_gib()) - curve.ratio(usable),
        moment=moment.to_dict(),
        findings=findings,
        report=report,
    )
    if args.json:
        print(json.dumps(demo.to_dict(), separators=(",", ":")))
    else:
        _print(args, demo, moment, workload)
        if target is not None:
            print(f"Wrote {target}; look into it with: kvcatch top --once {target}")
    return 0


def read_slice() -> Workload:
    """The packaged slice of the trace."""
    from kvcatch.data import CONVERSATION
    from kvcatch.sources.traces import read_workload

    return read_workload(CONVERSATION)


def named_tenants(workload: Workload) -> Workload:
    """Made-up owners: whole conversations go to one of three tenants, over-long prompts to a fourth."""
    from dataclasses import replace

    import numpy as np

    # All prompts share their first block; the second one tells conversations apart.
    second = np.minimum(workload.offsets[:-1] + 1, workload.offsets[1:] - 1)
    owner = workload.segment_ids[second] % 3
    owner = np.where(workload.prompt_tokens >= LONG_TOKENS, 3, owner)
    return replace(
        workload, tenants=("assistant", "search", "coding", "contracts"), tenant=owner.astype(np.int32)
    )


def record(workload: Workload, folder: Path) -> tuple[Path, Served, float]:
    """Serve the workload with the recorder on. Returns the recording, what was served, engine seconds."""
    from kvcatch import __version__
    from kvcatch.capture.options import Options
    from kvcatch.capture.recorder import Recorder
    from kvcatch.capture.ring import RingWriter
    from kvcatch.simulator.drive import VirtualClock, drive
    from kvcatch.simulator.embedded import Scheduler

    blocks = POOL_GIB * _blocks_per_gib() + 1
    scheduler = Scheduler(blocks, BLOCK_SIZE, max_num_seqs=64, max_num_batched_tokens=8192)
    clock = VirtualClock(time.monotonic_ns(), time.time_ns())
    path = folder / "demo.kvring"
    ring = RingWriter(str(path), 256 << 20, _info(clock, blocks, __version__))
    recorder = Recorder(
        scheduler, ring, [("full", BLOCK_SIZE)], Options({"KVCATCH_DIR": str(folder)}),
        mono=clock.monotonic_ns, wall=clock.time_ns,
    )  # fmt: skip
    recorder.attach()
    try:
        served = drive(workload, scheduler, clock, speed=SPEED, on_step=_progress())
    finally:
        recorder.detach()
        ring.close()
    return path, served, clock.seconds


def moments(path: Path) -> tuple[Snapshot, Snapshot]:
    """The moment when one request held most while others waited, and the end."""
    from kvcatch.store.capture import ReplayCapture
    from kvcatch.store.feeds import open_feed

    finder = ReplayCapture("demo", open_feed(str(path)))
    held = [
        max((len(request.blocks[0]) for request in state.requests.values() if request.blocks), default=0)
        for state in finder.steps()
    ]
    waiting = finder.samples()["waiting"]
    at = max(range(len(held)), key=lambda row: (bool(waiting[row]), held[row]))
    last = finder.snapshot()
    finder.close()
    again = ReplayCapture("demo", open_feed(str(path)))
    for row, _ in enumerate(again.steps()):
        if row == at:
            break
    moment = again.snapshot()
    again.close()
    return moment, last


def explain(path: Path, report: str | None) -> tuple[tuple[Finding, ...], str | None]:
    """What doctor finds, and the HTML report's path; None when the default place cannot be written."""
    from kvcatch.diagnosis import find
    from kvcatch.errors import KVCatchError
    from kvcatch.views.html.content import gather
    from kvcatch.views.html.page import render

    _say("looking for causes and writing the report ...")
    page = render(gather(str(path)))
    place = Path(report) if report else default_report()
    try:
        if not report:
            place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(page, encoding="utf-8")
    except OSError as error:
        if report:
            raise KVCatchError(f"cannot write {report}: {error.strerror}.", "Name another file.") from None
        _say(f"no report: {place} cannot be written ({error.strerror}); name a place with --report")
        return find(str(path)).findings, None
    return find(str(path)).findings, str(place)


def default_report() -> Path:
    """Where the report goes unless somebody says otherwise: the user's cache, so that no folder is littered."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home, "kvcatch", "demo.html")


def _info(clock: Any, blocks: int, version: str) -> dict[str, Any]:
    return {
        "engine": "embedded",
        "engine_version": "vLLM 0.32 rules",
        "kvcatch_version": version,
        "adapter": "embedded",
        "model": "demo, the size of an 8B model",
        "num_blocks": blocks,
        "block_size": BLOCK_SIZE,
        "block_bytes": BLOCK_SIZE * KV_BYTES_PER_TOKEN,
        "groups": [{"kind": "full", "layers": 32, "block_size": BLOCK_SIZE, "page_bytes": 4096 * BLOCK_SIZE}],
        "prefix_caching": True,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "start_unix_ns": clock.start_unix_ns,
        "start_monotonic_ns": clock.start_monotonic_ns,
    }


def _blocks_per_gib() -> int:
    return (1 << 30) // (BLOCK_SIZE * KV_BYTES_PER_TOKEN)


def _progress() -> Any:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if done % 10 == 0:
            sys.stderr.write(f"\r  {done}/{total} requests" + ("\r\x1b[K" if done == total else ""))
            sys.stderr.flush()

    return show


def _print(args: argparse.Namespace, demo: Demo, moment: Snapshot, workload: Workload) -> None:
    from kvcatch.simulator.curve import hit_curve
    from kvcatch.units import human_count, human_ratio, human_seconds
    from kvcatch.views.hitcurve import Today, curve_lines
    from kvcatch.views.palette import Look, ansi
    from kvcatch.views.text import finding_lines, snapshot_lines

    look = Look(width=max(60, shutil.get_terminal_size((110, 24)).columns), ascii=args.ascii)
    color = use_color(args.color)
    write = sys.stdout.write
    write(f"{demo.requests} requests, {human_count(demo.steps)} engine steps, ")
    write(f"{human_seconds(demo.engine_seconds)} of engine time in {human_seconds(demo.wall_seconds)}.\n\n")
    write("Who held the cache at the worst moment (this is kvcatch top):\n\n")
    write(ansi(snapshot_lines(moment, look, rows=6), color=color, ascii_only=args.ascii))
    write("\nOver the whole run: ")
    write(f"prefix hits {human_ratio(demo.hit_ratio)} of {human_count(demo.queried_tokens)} prompt tokens, ")
    write(f"{human_count(demo.preemptions)} preemptions, ")
    write(f"{human_count(demo.recomputed_tokens)} tokens computed again, ")
    write(f"TTFT mean {human_seconds(demo.ttft_seconds)}, p95 {human_seconds(demo.ttft_p95_seconds)}.\n\n")
    write("What kvcatch doctor makes of it:\n\n")
    found = [line for finding in demo.findings for line in finding_lines(finding, look)]
    write(ansi(found, color=color, ascii_only=args.ascii) + "\n")
    today = Today(POOL_GIB * _blocks_per_gib(), KV_BYTES_PER_TOKEN)
    write(
        "What more memory would win (2,000 requests, one after the other; this is kvcatch simulate --curve):\n\n"
    )
    write(ansi(curve_lines(hit_curve(workload, BLOCK_SIZE), look, today), color=color, ascii_only=args.ascii))
    if demo.report:
        write(f"\nWrote {demo.report}: the same as a page, it opens in any browser and loads nothing.\n")
    write("\nNow on your own engine:\n\n  kvcatch run -- vllm serve MODEL\n  kvcatch top\n\n")


def use_color(choice: str) -> bool:
    """NO_COLOR wins over FORCE_COLOR, an explicit option over both."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"


def _say(text: str) -> None:
    print(f"kvcatch: {text}", file=sys.stderr)

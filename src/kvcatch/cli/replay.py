"""``kvcatch replay``: the same arrivals, lengths, prefixes and tags against another engine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from kvcatch.errors import KVCatchError, missing_extra
from kvcatch.units import human_count, human_ratio, human_seconds

if TYPE_CHECKING:
    from kvcatch.replay.run import Options, Progress
    from kvcatch.sources.replayed import Replayed
    from kvcatch.workload import Workload

SCHEMA_VERSION = 1
#: a request counts as held back by an answer that it quotes from so long a wait on
HELD_SECONDS = 0.001


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``replay``."""
    parser.add_argument("target", metavar="CAPTURE|TRACE", help="a recording, a recorder, a pid, or a trace")
    parser.add_argument("--url", required=True, help="an OpenAI-compatible server, e.g. http://host:8000")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="results, JSON lines (default kvcatch-replay-<name>.jsonl)"
    )
    parser.add_argument("--force", action="store_true", help="replace the results file")
    parser.add_argument(
        "--compare", metavar="BASE", help="compare BASE (earlier results, a capture) with this run afterwards"
    )
    add_sending_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_sending_arguments(parser: argparse._ActionsContainer) -> None:
    """What every verb that sends requests takes."""
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="arrivals X times as fast (default 1)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--model", metavar="NAME", help="as the server calls it (default: its first)")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of the token ids; by default another each time, so that nothing is "
        "hit that an earlier replay left",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=int, default=4, metavar="N", help="requests sent and forgotten first (default 4)"
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="of the model, where the server has no /tokenize"
    )
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="variable that holds the key"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for one answer (default 600)"
    )
    parser.add_argument(
        "--tenant-key", default="", metavar="FIELD", help="field of a trace that names the tenant"
    )
    parser.add_argument("--trace-block-size", type=int, metavar="N", help="tokens behind one id of a trace")


def run(args: argparse.Namespace) -> int:
    """Replay, write, print; 130 after Ctrl-C. Raises KVCatchError."""
    workload = read_target(args)
    path = args.output or f"kvcatch-replay-{_stem(args.target)}.jsonl"
    replayed = send_workload(workload, options(args, args.url), path, overwrite=args.force)
    document = summary(replayed)
    if args.json:
        print(json.dumps(document, separators=(",", ":")))
    else:
        sys.stdout.write(text(document))
    interrupted = replayed.tail is not None and replayed.tail.interrupted
    print(f"Wrote {path}{': interrupted' if interrupted else ''}", file=sys.stderr)
    if interrupted:
        return 130
    if args.compare:
        return _compare(args.compare, path, quiet=args.json)
    print(f"Next: kvcatch compare {path} ANOTHER.jsonl{_recorded(replayed)}", file=sys.stderr)
    return 0


def options(args: argparse.Namespace, url: str) -> Options:
    """Sending options from the command line. Raises KVCatchError when aiohttp is missing."""
    try:
        from kvcatch.replay.run import Options
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise missing_extra("aiohttp", "replay") from None
    return Options(
        url=url, model=args.model, api_key=os.environ.get(args.api_key_env) or None, speed=args.speed, seed=args.seed,
        warm_up=args.warm_up, vocab_size=args.vocab_size, timeout_seconds=args.timeout,
    )  # fmt: skip


def read_target(args: argparse.Namespace) -> Workload:
    """The workload of a recording or a trace, as much of it as asked for. Raises KVCatchError."""
    from kvcatch.diagnosis import recording_path
    from kvcatch.sources.traces import USERS, read_workload

    path = recording_path(args.target)
    if path is not None:
        from kvcatch.sources.captured import workload_of
        from kvcatch.store.capture import ReplayCapture

        capture = ReplayCapture.open(path)
        workload, _ = workload_of(capture, client_times=True)
        capture.close()
    else:
        workload = read_workload(
            args.target, trace_block_size=args.trace_block_size, tenant_key=args.tenant_key
        )
        if USERS in workload.notes:
            workload = _without_names(workload)
    for note in workload.notes:
        print(f"kvcatch: {workload.name}: {note}", file=sys.stderr)
    if args.limit is not None:
        if args.limit < 1:
            raise KVCatchError(f"--limit {args.limit} is not positive.", "Give the number of requests.")
        workload = workload.head(args.limit)
    return workload


def _without_names(workload: Workload) -> Workload:
    """People become hashes with a key that nobody keeps: told apart in this run, and linked to nothing."""
    import dataclasses
    from hashlib import blake2b

    key = os.urandom(32)
    names = [
        "u:" + blake2b(name.encode(), digest_size=8, key=key).hexdigest() if name else ""
        for name in workload.tenants
    ]
    return dataclasses.replace(workload, tenants=tuple(names))


def send_workload(workload: Workload, options: Options, path: str, *, overwrite: bool) -> Replayed:
    """Replay with a progress line on a terminal. Raises KVCatchError."""
    from kvcatch.replay.run import replay

    shown = show_progress if sys.stderr.isatty() else None
    replayed = replay(
        workload, options, path, overwrite=overwrite, progress=shown,
        note=lambda said: print(f"kvcatch: {said}", file=sys.stderr),
    )  # fmt: skip
    if shown is not None:
        sys.stderr.write("\r\x1b[K")
    return replayed


def show_progress(state: Progress) -> None:
    """One line that is written over."""
    width = 24
    done = int(width * state.ended / state.total) if state.total else width
    sys.stderr.write(
        f"\r[{'#' * done}{'.' * (width - done)}] {state.ended}/{state.total} answered, "
        f"{state.sent - state.ended} in flight, {state.failed} failed, "
        f"{state.seconds:.0f} s of {state.span_seconds:.0f} s\x1b[K"
    )
    sys.stderr.flush()


def summary(replayed: Replayed) -> dict[str, Any]:
    """What ``--json`` prints."""
    import numpy as np

    from kvcatch import __version__
    from kvcatch.simulator.engine import summary as spread

    answers = replayed.answers
    ok = [answer for answer in answers if answer.status == "ok"]

    def total(name: str) -> int | None:
        values = [getattr(answer, name) for answer in ok]
        return None if None in values else sum(values)

    tail = replayed.tail
    late = np.array([answer.lateness_seconds for answer in answers])
    first = np.array([answer.ttft_seconds for answer in ok if answer.ttft_seconds is not None])
    whole = np.array([(answer.finished_seconds or 0.0) - answer.sent_seconds for answer in ok])
    counted = {status: sum(answer.status == status for answer in answers) for status in ("refused", "failed")}
    return {
        "schema_version": SCHEMA_VERSION,
        "kvcatch_version": __version__,
        "results": replayed.target,
        **{name: getattr(replayed.head, name) for name in ("trace", "url", "model", "engine_version", "seed", "speed")},
        "requests": replayed.head.requests,
        "completed": len(ok),
        **counted,
        "interrupted": tail is None or tail.interrupted,
        "duration_seconds": tail.duration_seconds if tail else None,
        "prompt_tokens": sum(answer.prompt_tokens for answer in ok),
        "output_tokens": total("output_tokens"),
        "cached_tokens": total("cached_tokens") if ok else None,
        "lateness_seconds": spread(late),
        "ttft_seconds": spread(first),
        "e2e_seconds": spread(whole),
        "held_requests": sum((answer.held_seconds or 0.0) > HELD_SECONDS for answer in answers),
        "unanswered_quotes": tail.unanswered_quotes if tail else None,
        "engine_counters": tail.counters if tail else {},
        "first_errors": list(dict.fromkeys(answer.error for answer in answers if answer.error))[:3],
    }  # fmt: skip


def text(document: dict[str, Any]) -> str:
    """The summary for people."""
    counters = document["engine_counters"]
    version = document["engine_version"] or "n/a"
    failed = f"{document['refused']} refused, {document['failed']} failed"
    answered = f"{human_count(document['completed'])} of {human_count(document['requests'])} answered"
    lines = [
        f"{document['trace']} to {document['model']} on {document['url']} (engine {version}), seed {document['seed']}",
        f"{answered} in {human_seconds(document['duration_seconds'])}; {failed}",
        "",
        f"{'seconds':<12} {'mean':>10} {'p50':>10} {'p90':>10} {'p99':>10} {'max':>10}",
    ]
    for label, key in (("lateness", "lateness"), ("TTFT", "ttft"), ("end to end", "e2e")):
        row = document[f"{key}_seconds"]
        # The clock may fire a moment early.
        shown = [
            human_seconds(max(0.0, row[name]) if name in row else None)
            for name in ("mean", "p50", "p90", "p99", "max")
        ]
        lines.append(f"{label:<12} " + " ".join(f"{value:>10}" for value in shown))
    cached = document["cached_tokens"]
    source = "per request"
    if cached is None and "hits" in counters:
        cached, source = counters["hits"], "the engine's counters"
    share = cached / document["prompt_tokens"] if cached is not None and document["prompt_tokens"] else None
    told = f"{human_ratio(share)}, {source}" if cached is not None else "n/a"
    sums = [
        f"prompt tokens {human_count(document['prompt_tokens'])}, of them cached {human_count(cached)} ({told})",
        f"output tokens {human_count(document['output_tokens'])}",
        f"preemptions {human_count(counters.get('preemptions'))}",
    ]
    lines += ["", "; ".join(sums)]
    if document["held_requests"]:
        lines.append(f"{document['held_requests']} requests waited for an answer that they quote")
    if document["unanswered_quotes"]:
        lines.append(
            f"{document['unanswered_quotes']} prompts quote an answer that never came: its reuse is lost"
        )
    lines += [f"error: {error}" for error in document["first_errors"]]
    return "\n".join(lines) + "\n"


def _stem(target: str) -> str:
    name = os.path.basename(target)
    for end in (".gz", ".jsonl", ".json", ".csv", ".kvcap", ".kvring"):
        name = name.removesuffix(end)
    return name or "live"


def _recorded(replayed: Replayed) -> str:
    """The way to the target's own record, where this machine holds one."""
    from urllib.parse import urlsplit

    from kvcatch import api

    if urlsplit(replayed.head.url).hostname not in ("localhost", "127.0.0.1", "::1"):
        return ""
    live = [info for info in api.recorders() if info.state != "ended"]
    return f", or the engine's own record: kvcatch compare BASE {live[0].name}" if len(live) == 1 else ""


def _compare(base: str, path: str, *, quiet: bool) -> int:
    from kvcatch.analysis.compare import compare
    from kvcatch.cli.compare import open_side
    from kvcatch.cli.compare import text as compared

    comparison = compare(open_side(base), open_side(path))
    sys.stderr.write(compared(comparison)) if quiet else sys.stdout.write("\n" + compared(comparison))
    return 1 if any(row.verdict == "worse" for row in comparison.metrics) else 0

"""``kvcatch ls``: every recorder on this machine, alive and dead."""

from __future__ import annotations

import argparse
import json
import sys
import time

from kvcatch.units import human_count, human_seconds
from kvcatch.views.palette import clean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``ls``."""
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--live", action="store_true", help="leave out engines that have ended")


def run(args: argparse.Namespace) -> int:
    """List them, newest first."""
    from kvcatch import __version__, api

    found = [info for info in api.recorders() if not args.live or info.state != "ended"]
    if args.json:
        document = {
            "schema_version": 1,
            "kvcatch_version": __version__,
            "recorders": [info.to_dict() for info in found],
        }
        print(json.dumps(document))
        return 0
    if not found:
        print(
            "no recorder on this machine; start an engine with: kvcatch run -- vllm serve MODEL",
            file=sys.stderr,
        )
        return 0
    rows = [("NAME", "STATE", "PID", "MODEL", "STARTED", "SPAN", "LAST SEEN", "LAST STEP")]
    for info in found:
        rows.append(
            (
                clean(info.name),
                info.state,
                str(info.pid) if info.pid else "n/a",
                clean(info.model or "n/a"),
                _moment(info.start_unix_seconds),
                human_seconds(_span(info.start_unix_seconds, info.last_unix_seconds)),
                _ago(info.last_unix_seconds),
                human_count(info.last_step),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("\nkvcatch top NAME shows one of them; without a name, the first.", file=sys.stderr)
    return 0


def _moment(unix_seconds: float | None) -> str:
    if not unix_seconds:
        return "n/a"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def _span(start: float | None, last: float | None) -> float | None:
    return None if not start or not last else max(0.0, last - start)


def _ago(unix_seconds: float | None) -> str:
    return f"{human_seconds(max(0.0, time.time() - unix_seconds))} ago" if unix_seconds else "n/a"

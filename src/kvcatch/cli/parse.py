"""``kvcatch parse``: every record of a capture as JSON lines, the door for debugging and tests."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter

from kvcatch.cli.spans import add_span_arguments, resolve_span
from kvcatch.errors import KVCatchError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``parse``."""
    parser.add_argument(
        "target", nargs="?", metavar="TARGET",
        help="a .kvcap file, 'live' or a pid; without one: the newest recorder on this machine",
    )  # fmt: skip
    parser.add_argument(
        "--kind", action="append", metavar="KIND[,KIND]", default=[],
        help="only these kinds of record, for example preempt,finish",
    )  # fmt: skip
    parser.add_argument(
        "--header", action="store_true", help="the engine's configuration first, as kind 'info'"
    )
    add_span_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the records. 2 when the record is damaged: what could be read was printed first."""
    from kvcatch import api

    capture = api.open(args.target)
    if args.target is None:
        print(f"kvcatch: reading {capture.target}, the newest recorder.", file=sys.stderr)
    wanted = {word.strip() for text in args.kind for word in text.split(",") if word.strip()}
    seen: Counter[str] = Counter()
    damage: KVCatchError | None = None
    try:
        capture.refresh()
        start, stop = resolve_span(args, capture.snapshot().unix_seconds)
        if args.header:
            import msgspec

            _write({"kind": "info", "target": capture.target, **msgspec.to_builtins(capture.info)})
        try:
            for record in capture.events(start, stop):
                seen[record["kind"]] += 1
                if not wanted or record["kind"] in wanted:
                    _write(record)
        except KVCatchError as error:
            damage = error
        sys.stdout.flush()
        for warning in capture.loss.warnings:
            print(f"kvcatch: warning: {warning}", file=sys.stderr)
        _say_lost(capture.loss.dropped_records)
    finally:
        capture.close()
    if damage is not None:
        raise damage
    unknown = wanted - set(seen)
    if unknown:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in sorted(seen.items())) or "no record at all"
        print(
            f"kvcatch: no record of kind {', '.join(sorted(unknown))}; the span has: {kinds}.",
            file=sys.stderr,
        )
    return 0


def _write(record: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(record, separators=(",", ":"), ensure_ascii=False) + "\n")


def _say_lost(dropped: int) -> None:
    if dropped:
        print(f"kvcatch: warning: {dropped:,} records were lost before this read.", file=sys.stderr)

"""``kvcatch top``: who holds the KV cache now, as a live screen, as text or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.results import Snapshot
from kvcatch.units import parse_duration
from kvcatch.views.live import Watch
from kvcatch.views.palette import Look, ansi
from kvcatch.views.tables import VIEWS

_PIPE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``top``."""
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET",
        help="a .kvcap file, 'live', a pid, or a metrics URL; several are switched with tab. "
        "Without one: the newest recorder on this machine, alive or dead",
    )  # fmt: skip
    parser.add_argument("--all", action="store_true", help="every live recorder on this machine")
    parser.add_argument("--once", action="store_true", help="print the state once and leave")
    parser.add_argument("--json", action="store_true", help="JSON; without --once one document per interval")
    parser.add_argument(
        "--at", metavar="TIME",
        help="a recording as it was: 18:00, 2026-11-29T18:00:00Z, 15m (before its end), or 'peak', "
        "the step with the most active blocks",
    )  # fmt: skip
    parser.add_argument("--interval", default="1s", metavar="TIME", help="between two looks (default 1s)")
    parser.add_argument("--view", choices=VIEWS, default="capacity", help="numbers and columns to show first")
    parser.add_argument(
        "--headroom", metavar="PROMPT+OUTPUT",
        help="size in tokens that headroom counts, for example 2000+300 (default: the median seen)",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="rows per table in text, 0 = all")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument(
        "--readonly", action="store_true", help="the screen writes nothing and changes nothing: no w, a, h"
    )


def run(args: argparse.Namespace) -> int:
    """Show the targets until the user leaves. Raises KVCatchError when a target cannot be opened."""
    interval = parse_duration(args.interval)
    if interval < 0.05:
        raise KVCatchError(f"--interval {args.interval} is too short.", "Use 0.05 s or more.")
    watches = _watches(args)
    try:
        if args.json:
            return _print_json(watches, None if args.once else interval)
        if not args.once and not _screen():
            print("kvcatch: no terminal, so this is one print as with --once.", file=sys.stderr)
            args.once = True
        if args.once:
            return _print_text(watches, args)
        return _run_screen(watches, args, interval)
    finally:
        for watch in watches:
            watch.close()


def _watches(args: argparse.Namespace) -> list[Watch]:
    from kvcatch import api

    targets: list[str | None] = list(args.targets)
    if args.all:
        targets += [str(found.path) for found in api.recorders() if found.state != "ended"]
        if not targets:
            raise KVCatchError("no live recorder on this machine.", "See them all with: kvcatch ls")
    size = _size(args.headroom)

    def newest() -> str | None:
        return next((str(found.path) for found in api.recorders()), None)

    watches = [Watch(target, api.open, size) for target in targets]
    if not targets:
        watches = [Watch(None, api.open, size, newest if args.at is None else None)]
    for watch in watches:
        _open(watch, args)
    if not targets:
        print(f"kvcatch: watching {watches[0].name}, the newest recorder.", file=sys.stderr)
    return watches


def _open(watch: Watch, args: argparse.Namespace) -> None:
    """Open a target now, so that a mistake ends the verb; only the screen waits for an engine's URL."""
    try:
        capture = watch.open()
    except KVCatchError:
        if args.once or args.json or not str(watch.target).startswith(("http://", "https://")):
            raise
        return
    if args.at is not None:
        from kvcatch.cli.moment import capture_at

        watch.capture = capture_at(capture, args.at)


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", text)
    if match is None or int(match.group(1)) == 0:
        raise KVCatchError(f"not a request size: {text!r}.", "Write for example --headroom 2000+300.")
    return int(match.group(1)), max(1, int(match.group(2) or 1))


def _screen() -> bool:
    # The screen is drawn on stderr, so that a redirected stdout does not hide it half.
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(stream.isatty() for stream in streams) and os.environ.get("TERM", "dumb") != "dumb"


def _color(choice: str) -> bool:
    """NO_COLOR wins over FORCE_COLOR, an explicit option over both."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"


def _print_json(watches: list[Watch], interval: float | None) -> int:
    """One document per look: the target's own, or ``targets[]`` when there are several."""
    while True:
        snapshots = [watch.poll() for watch in watches]
        sys.stdout.write(json.dumps(_document(snapshots), separators=(",", ":")) + "\n")
        sys.stdout.flush()
        if interval is None:
            return _reached(watches)
        if all(snapshot.state in {"ended", "past"} for snapshot in snapshots):
            print("kvcatch: nothing more will come, the record has ended.", file=sys.stderr)
            return 0
        time.sleep(interval)


def _document(snapshots: list[Snapshot]) -> dict[str, Any]:
    if len(snapshots) == 1:
        return snapshots[0].to_dict()
    return {
        "schema_version": snapshots[0].schema_version,
        "targets": [snapshot.to_dict() for snapshot in snapshots],
    }


def _print_text(watches: list[Watch], args: argparse.Namespace) -> int:
    from kvcatch.views.panels import curve_width
    from kvcatch.views.text import snapshot_lines

    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        args.ascii = True
    columns = shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
    look = Look(width=max(40, columns), ascii=args.ascii)
    for number, watch in enumerate(watches):
        snapshot = watch.poll()
        lines = snapshot_lines(
            snapshot, look, view=args.view, curves=watch.curves(curve_width(look)), rows=args.rows or None
        )
        if number:
            sys.stdout.write("\n")
        sys.stdout.write(ansi(lines, color=_color(args.color), ascii_only=args.ascii))
    return _reached(watches)


def _reached(watches: list[Watch]) -> int:
    """0, or an error when a target that could be opened could not be read."""
    for watch in watches:
        if watch.problem:
            raise KVCatchError(watch.problem)
    return 0


class _Gateways:
    """What the screen may ask for, through the code of ``kvcatch abort`` and ``kvcatch hold``."""

    def abort(self, request_id: str) -> list[str]:
        """End a request; sentences. Raises KVCatchError."""
        from kvcatch.gateway import operate

        return operate.aborted_lines(request_id, operate.abort(request_id))

    def hold(self, tenant: str, seconds: float) -> list[str]:
        """Hold a tenant, 0 ends it; sentences. Raises KVCatchError."""
        from kvcatch.gateway import operate

        return [operate.held_line(tenant, seconds, operate.hold(tenant, seconds))]


def _run_screen(watches: list[Watch], args: argparse.Namespace, interval: float) -> int:
    if args.color == "never" or (args.color == "auto" and os.environ.get("NO_COLOR")):
        # The screen's own switch; it must be set before the library is loaded.
        os.environ["NO_COLOR"] = "1"
    from kvcatch.views.tui.app import TopApp

    app = TopApp(
        watches,
        interval=interval,
        view=args.view,
        ascii_only=args.ascii,
        readonly=args.readonly,
        operator=None if args.readonly else _Gateways(),
    )
    app.run()
    return app.return_code or 0

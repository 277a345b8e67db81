"""Time spans on the command line, the same for every verb: --from, --to, --last, --around."""

from __future__ import annotations

import argparse
import re
import time
from datetime import datetime, timedelta

from kvcatch.errors import KVCatchError
from kvcatch.units import parse_duration

#: half of the span that --around means when no width is given
AROUND_SECONDS = 300.0
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_HINT = "Write for example 2026-11-29T18:00:00Z, 18:00 (local time), a Unix time in seconds, or 15m (ago)."


def add_span_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the four options to a verb's parser."""
    group = parser.add_argument_group(
        "time span",
        "TIME is ISO 8601 (2026-11-29T18:00:00Z; without a zone: local time), HH:MM[:SS] (the last such "
        "moment before the record ends), Unix seconds, or a duration before the record's end (15m).",
    )
    group.add_argument("--from", dest="span_from", metavar="TIME", help="start, included")
    group.add_argument("--to", dest="span_to", metavar="TIME", help="end, excluded")
    group.add_argument(
        "--last", dest="span_last", metavar="DURATION", help="the last part of the record: 15m"
    )
    group.add_argument(
        "--around",
        dest="span_around",
        metavar="TIME[,WIDTH]",
        help="WIDTH (default 5m) before and after TIME",
    )


def resolve_span(args: argparse.Namespace, end_seconds: float | None = None) -> tuple[int | None, int | None]:
    """The span asked for as wall-clock nanoseconds [start, stop); None where it is open.

    Args:
        args: parsed arguments of a parser with ``add_span_arguments``.
        end_seconds: Unix time where the record ends, to which durations and bare clock times refer; None: now.

    Raises:
        KVCatchError: not a time, options that contradict each other, or an empty span.
    """
    end = time.time() if end_seconds is None else end_seconds
    if args.span_around is not None:
        if args.span_from or args.span_to or args.span_last:
            raise KVCatchError("--around cannot be combined with --from, --to or --last.", "Choose one.")
        moment, _, width = args.span_around.partition(",")
        half = parse_duration(width) if width else AROUND_SECONDS
        middle = parse_time(moment, end)
        return _ns(middle - half), _ns(middle + half)
    start = parse_time(args.span_from, end) if args.span_from else None
    stop = parse_time(args.span_to, end) if args.span_to else None
    if args.span_last:
        if start is not None:
            raise KVCatchError("--last cannot be combined with --from.", "Choose one.")
        start = (end if stop is None else stop) - parse_duration(args.span_last)
    if start is not None and stop is not None and start >= stop:
        raise KVCatchError(f"the span is empty: it ends {start - stop:.0f} s before it starts.", _HINT)
    return (None if start is None else _ns(start)), (None if stop is None else _ns(stop))


def parse_time(text: str, end_seconds: float) -> float:
    """Unix seconds from what a person types; see ``add_span_arguments``. Raises KVCatchError."""
    text = text.strip()
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        return _clock(clock, text, end_seconds)
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):
        return float(text)
    if re.fullmatch(r"-?[\d.]+(ms|s|m|h|d)", text):
        return end_seconds - parse_duration(text.lstrip("-"))
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise KVCatchError(f"not a time: {text!r}.", _HINT) from None


def _clock(match: re.Match[str], text: str, end_seconds: float) -> float:
    """The last such time of day, local, that is not after the record's end."""
    hour, minute, second = (int(part or 0) for part in match.groups())
    last = datetime.fromtimestamp(end_seconds)
    try:
        moment = last.replace(hour=hour, minute=minute, second=second, microsecond=0)
    except ValueError:
        raise KVCatchError(f"not a time of day: {text!r}.", _HINT) from None
    if moment > last:
        moment -= timedelta(days=1)
    return moment.timestamp()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

"""Time spans as people type them, against the standard library's calendar."""

from __future__ import annotations

import argparse
from datetime import datetime

import pytest

from kvcatch.cli.spans import add_span_arguments, parse_time, resolve_span
from kvcatch.errors import KVCatchError

END = datetime.fromisoformat("2026-11-29T18:00:00+00:00").timestamp()


def span(*words: str) -> tuple[int | None, int | None]:
    parser = argparse.ArgumentParser()
    add_span_arguments(parser)
    start, stop = resolve_span(parser.parse_args(words), END)
    return (
        None if start is None else round(start / 1e9 - END),
        None if stop is None else round(stop / 1e9 - END),
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (None, None)),
        (["--last", "15m"], (-900, None)),
        (["--last", "90"], (-90, None)),
        (["--from", "2026-11-29T17:00:00Z"], (-3600, None)),
        (["--from", "2026-11-29T19:00:00+02:00", "--to", "10m"], (-3600, -600)),
        (["--to", "10m", "--last", "5m"], (-900, -600)),
        (["--around", "2026-11-29T17:30:00Z"], (-2100, -1500)),
        (["--around", "30m,1m"], (-1860, -1740)),
        (["--from", str(END - 50)], (-50, None)),
    ],
)
def test_spans(words, expected):
    assert span(*words) == expected


def test_a_bare_clock_time_is_the_last_such_moment_before_the_end():
    end = datetime(2026, 11, 29, 18, 0).timestamp()  # local time
    assert parse_time("17:59", end) == end - 60
    assert parse_time("18:00:00", end) == end
    assert parse_time("18:01", end) == end - 86400 + 60


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "yesterday"], "not a time: 'yesterday'"),
        (["--from", "25:00"], "not a time of day"),
        (["--last", "soon"], "not a duration"),
        (["--around", "10m", "--last", "5m"], "--around cannot be combined"),
        (["--last", "5m", "--from", "10m"], "--last cannot be combined"),
        (["--from", "5m", "--to", "10m"], "the span is empty"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(KVCatchError, match=message):
        span(*words)

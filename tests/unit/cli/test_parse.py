"""``kvcatch parse``."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from typing import Any

from fakes import api
from fakes.capture import FakeCapture, snapshot
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.results import LossView


@functools.cache
def records() -> list[dict[str, Any]]:
    kinds = ["arrive", "new", "sample", "preempt", "sample", "finish"]
    now = time.time()  # not at import: the suite may take longer than the spans below
    return [
        {"kind": kind, "unix_ns": int((now - 600 + 60 * index) * 1e9), "rid": index}
        for index, kind in enumerate(kinds)
    ]


def parse(monkeypatch, capsys, *words: str, capture: FakeCapture | None = None) -> tuple[int, list[Any], str]:
    found = capture or FakeCapture(events=records())
    api.install(monkeypatch, {None: found, "f": found})
    code = main(["parse", *words])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


def test_every_record_is_a_json_line_in_order(monkeypatch, capsys):
    code, lines, err = parse(monkeypatch, capsys, "f")
    assert (code, err) == (0, "")
    assert lines == records()


def test_kinds_are_filtered_and_a_kind_that_is_not_there_is_named(monkeypatch, capsys):
    code, lines, err = parse(monkeypatch, capsys, "f", "--kind", "preempt,finish", "--kind", "preemption")
    assert [line["kind"] for line in lines] == ["preempt", "finish"]
    assert code == 0
    assert "no record of kind preemption; the span has: arrive (1)" in err
    assert "sample (2)" in err


def test_spans_refer_to_the_end_of_the_record(monkeypatch, capsys):
    # The fake's newest state is of now; its records are 10, 9, 8, 7, 6 and 5 minutes old.
    _, lines, _ = parse(monkeypatch, capsys, "f", "--last", "450s")
    assert [line["rid"] for line in lines] == [3, 4, 5]
    _, lines, _ = parse(monkeypatch, capsys, "f", "--around", "9m,30s")
    assert [line["rid"] for line in lines] == [1]


def test_the_newest_recorder_is_named_when_none_was(monkeypatch, capsys):
    _, lines, err = parse(monkeypatch, capsys, "--header", "--kind", "finish")
    assert "reading live:4242, the newest recorder" in err
    assert [line["kind"] for line in lines] == ["info", "finish"]
    assert lines[0]["num_blocks"] == 101


def test_a_torn_file_gives_what_it_has_and_a_warning_with_the_offset(monkeypatch, capsys):
    loss = LossView(warnings=("f: torn at byte 4711; what follows was not read",), dropped_records=3)
    capture = FakeCapture(snapshot(loss=loss), events=records())
    code, lines, err = parse(monkeypatch, capsys, "f", capture=capture)
    assert code == 0
    assert len(lines) == 6
    assert "torn at byte 4711" in err
    assert "3 records were lost" in err


class Torn(FakeCapture):
    """Fails in the middle of its records."""

    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        yield records()[0]
        raise KVCatchError("f: not a chunk at byte 99.", "The rest cannot be read.")


def test_a_failure_in_the_middle_keeps_what_came_before_and_exits_2(monkeypatch, capsys):
    code, lines, err = parse(monkeypatch, capsys, "f", capture=Torn())
    assert code == 2
    assert len(lines) == 1
    assert "byte 99" in err


def test_a_bad_time_exits_2(monkeypatch, capsys):
    code, lines, err = parse(monkeypatch, capsys, "f", "--last", "whenever")
    assert (code, lines) == (2, [])
    assert "not a duration" in err

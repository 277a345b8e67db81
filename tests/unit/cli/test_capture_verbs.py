"""``top`` and ``parse`` on the record of a real engine that was killed under load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvcatch.cli.main import main

CAPTURE = Path(__file__).parents[2] / "data" / "top" / "crash.kvcap"


@cache
def records() -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvcatch", "parse", str(CAPTURE)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def held_by_hand(events: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
    """Blocks per live request, and the last sample row, by a plain walk over the records."""
    names: dict[int, str] = {}
    blocks: dict[int, list[int]] = defaultdict(list)
    last: dict[str, int] = {}
    for event in events:
        kind, rid = event["kind"], event.get("rid", 0)
        if kind in {"arrive", "refresh"}:
            names[rid], blocks[rid] = event["engine_request_id"], []
        elif kind == "blocks":
            blocks[rid] += event["block_ids"]
        elif kind in {"preempt", "resume"}:
            blocks[rid] = []
        elif kind == "finish":
            del names[rid], blocks[rid]
        elif kind == "sample":
            last = event
    return {name: len(blocks[rid]) for rid, name in names.items()}, last


def top(capsys, *words: str) -> dict[str, Any]:
    assert main(["top", str(CAPTURE), "--once", "--json", *words]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_who_held_the_cache_when_the_engine_was_killed(capsys):
    held, last = held_by_hand(records())
    state = top(capsys)
    assert state["state"] == "ended"
    assert {view["engine_request_id"]: view["num_blocks"] for view in state["requests"]} == held
    assert state["pool"]["active_blocks"] == last["active_blocks"]
    assert state["step"] == last["step"]
    # The big document that was found by hand: two thousand tokens of tenant umbrella.
    biggest = max(state["requests"], key=lambda view: view["num_blocks"])
    assert biggest["tags"]["tenant"] == "umbrella"
    assert biggest["prompt_tokens"] == 2000
    hogs = [found["request_id"] for found in state["findings"] if found["code"] == "KVC003"]
    assert hogs == [biggest["request_id"]]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_moment_of_the_past_equals_the_record_up_to_it(capsys, share):
    events = records()
    steps = [index for index, event in enumerate(events) if event["kind"] == "sample"]
    cut = steps[int(share * len(steps))]
    held, last = held_by_hand(events[: cut + 1])
    state = top(capsys, "--at", str(events[cut]["unix_ns"] / 1e9 - 1e-6))
    assert state["state"] == "past"
    assert state["step"] == last["step"]
    assert {view["engine_request_id"]: view["num_blocks"] for view in state["requests"]} == held


def test_the_peak_is_the_step_with_the_most_active_blocks(capsys):
    most = max(event["active_blocks"] for event in records() if event["kind"] == "sample")
    assert top(capsys, "--at", "peak")["pool"]["active_blocks"] == most


def test_a_time_outside_the_record_exits_2(capsys):
    assert main(["top", str(CAPTURE), "--once", "--at", "3h"]) == 2
    assert "outside the record" in capsys.readouterr().err


def test_a_torn_file_gives_what_is_whole_and_names_the_byte(tmp_path, capsys):
    torn = tmp_path / "torn.kvcap"
    torn.write_bytes(CAPTURE.read_bytes()[:60_000])
    assert main(["parse", str(torn)]) == 0
    out, err = capsys.readouterr()
    kept = [json.loads(line) for line in out.splitlines()]
    assert kept == records()[: len(kept)]
    assert len(kept) > 1000
    assert "at byte" in err
    assert main(["top", str(torn), "--once"]) == 0
    assert "warnings 1" in capsys.readouterr().out


def test_head_may_close_the_pipe():
    line = f"{sys.executable} -m kvcatch parse {CAPTURE} | head -n 1; echo ${{PIPESTATUS[@]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    first, statuses = done.stdout.splitlines()
    assert json.loads(first)["kind"]
    assert statuses == "0 0"
    assert done.stderr == ""


def test_a_span_and_a_kind_select_records(capsys):
    assert main(["parse", str(CAPTURE), "--kind", "preempt", "--last", "10s"]) == 0
    chosen = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    events = records()
    end = max(event["unix_ns"] for event in events if event["kind"] == "sample")
    expected = [e for e in events if e["kind"] == "preempt" and e["unix_ns"] >= end - 10_000_000_000]
    assert chosen == expected
    assert len(chosen) > 5

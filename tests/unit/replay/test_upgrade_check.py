"""Runs in ABBA order against two stand-ins, and what they are put together to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcatch.analysis.compare_replay import merged
from kvcatch.cli.main import main
from kvcatch.cli.upgrade_check import judge
from kvcatch.sources.replayed import Answer, Head, Replayed, Tail
from unit.replay.replay_servers import fake_server


def made(name: str, ttft: float, version: str, count: int = 200) -> Replayed:
    """A run in which every request took about the same time to its first token."""
    answers = tuple(
        Answer(
            index=n, request_id=f"r{n}", tenant="", due_seconds=0.1 * n, sent_seconds=0.1 * n, prompt_tokens=50 + n % 7,
            status="ok", first_seconds=0.1 * n + ttft * (1 + 0.01 * (n % 5)), finished_seconds=0.1 * n + ttft + 0.5,
            cached_tokens=16, output_tokens=10,
        )
        for n in range(count)
    )  # fmt: skip
    head = Head(url="http://x", engine_version=version, requests=count)
    return Replayed(name, head, answers, Tail(duration_seconds=30.0, counters={"preemptions": 1.0}))


def test_a_slower_engine_is_worse_and_an_equal_one_is_not() -> None:
    old = [made("a", 0.100, "1"), made("b", 0.101, "1")]
    slower = judge(old, [made("c", 0.130, "2"), made("d", 0.131, "2")])
    assert slower.metric("ttft_seconds").verdict == "worse"
    assert slower.drift[0].name == "engine_version"
    equal = judge(old, [made("c", 0.1005, "2"), made("d", 0.1008, "2")])
    assert equal.verdict == "equal"
    assert equal.paired


def test_a_difference_within_the_noise_of_one_engine_is_no_verdict() -> None:
    old = [made("a", 0.100, "1"), made("b", 0.160, "1")]
    noisy = judge(old, [made("c", 0.150, "1"), made("d", 0.150, "1")])
    row = noisy.metric("ttft_seconds")
    assert row is not None
    assert row.floor_source == "measured"
    assert row.floor == pytest.approx(0.06, rel=0.05)
    assert row.verdict == "equal"


def test_runs_put_together_follow_each_other() -> None:
    both = merged([made("a", 0.1, "1", 10), made("b", 0.1, "1", 10)], "both")
    assert len({answer.index for answer in both.answers}) == 20
    assert both.answers[10].sent_seconds == pytest.approx(30.0)
    assert both.answers[10].ttft_seconds == pytest.approx(0.1)
    assert both.tail is not None
    assert both.tail.counters == {"preemptions": 2.0}


def test_the_verb_runs_old_new_new_old(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1]}
    trace.write_text("\n".join(json.dumps(row | {"timestamp": 5 * n}) for n in range(40)))
    out = tmp_path / "out"
    words = ["upgrade-check", str(trace), "--json", "--exit-zero", "-o", str(out)]
    with fake_server() as old, fake_server() as new:
        assert main([*words, "--old", old.url, "--new", new.url]) == 0
        asked = [len(one.asked) for one in (old, new)]
    assert asked == [80, 80]
    said = json.loads(capsys.readouterr().out)
    assert said["paired"]
    assert {name: len(paths) for name, paths in said["results"].items()} == {"old": 2, "new": 2}
    starts = {
        path.stem: json.loads(path.read_text().splitlines()[0])["start_unix_seconds"]
        for path in out.iterdir()
    }
    assert sorted(starts, key=lambda name: starts[name]) == ["old-1", "new-1", "new-2", "old-2"]

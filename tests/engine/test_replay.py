"""``replay`` of a capture made on a real engine, against a second engine and against one with half the blocks."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.support.loads import tenants_load
from engine.support.server import Server, ask_all, server
from kvcatch.analysis.compare import Comparison, compare
from kvcatch.cli.compare import open_side
from kvcatch.sources.captured import workload_of
from kvcatch.sources.replayed import Replayed, read_replayed
from kvcatch.store.capture import ReplayCapture

BLOCKS, SIZE = 160, 32
FLAGS = ["--block-size", str(SIZE), "--max-model-len", "1024", "--max-num-seqs", "16"]
FLAGS += ["--max-num-batched-tokens", "512", "--enable-prompt-tokens-details"]
TALKS = 12


def pool(blocks: int) -> list[str]:
    return ["--num-gpu-blocks-override", str(blocks), *FLAGS]


def converse(running: Server, seed: int) -> None:
    """Conversations of three turns: each prompt quotes all answers before it, token by token."""
    rng = random.Random(seed)
    for number in range(TALKS):
        prompt = [rng.randrange(5, 90) for _ in range(rng.randrange(40, 120))]
        for _turn in range(3):
            answer = running.complete(
                prompt, 48, return_token_ids=True, headers={"X-Request-Id": f"kvc~talk~~t{number}"}
            )
            prompt = prompt + answer["choices"][0]["token_ids"] + [rng.randrange(5, 90) for _ in range(20)]


def replay(ring: Path, url: str, to: Path, *more: str) -> Replayed:
    done = subprocess.run(
        [sys.executable, "-m", "kvcatch", "replay", str(ring), "--url", url, "-o", str(to), "--json", *more],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["unanswered_quotes"] == 0
    found = read_replayed(to)
    assert found is not None
    return found


@dataclass(frozen=True)
class Runs:
    """The first engine's record, the second's, and what replays against the second and a half-sized one gave."""

    first: Path
    second: Path
    results: list[Replayed]
    half: Replayed


def ring_of(folder: Path) -> Path:
    (found,) = folder.glob("*.core0.kvring")
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Runs:
    folder = tmp_path_factory.mktemp("replay")
    rng, now, asks = random.Random(1), 0.0, []
    for ask in tenants_load(120, output=(5, 40)):
        now += rng.expovariate(16)
        asks.append(dataclasses.replace(ask, at=now))
    with server(
        folder / "a", tiny_model, *pool(BLOCKS), KVCATCH="1", KVCATCH_DIR=str(folder / "first")
    ) as running:
        ask_all(running.url, asks)
        converse(running, 2)
    first = ring_of(folder / "first")
    with server(
        folder / "b", tiny_model, *pool(BLOCKS), KVCATCH="1", KVCATCH_DIR=str(folder / "second")
    ) as running:
        results = [replay(first, running.url, folder / f"{number}.jsonl") for number in range(2)]
    with server(folder / "c", tiny_model, *pool(BLOCKS // 2)) as running:
        half = replay(first, running.url, folder / "half.jsonl")
    return Runs(first, ring_of(folder / "second"), results, half)


def recorded(ring: Path) -> list[Any]:
    """Requests of a recording in order of arrival, warm-up left out."""
    capture = ReplayCapture.open(str(ring))
    views = [view for view in capture.requests() if "warm-up" not in view.request_id]
    capture.close()
    return sorted(views, key=lambda view: view.arrival_unix_seconds or 0.0)


def test_the_second_engine_gets_the_same_requests(runs: Runs) -> None:
    asked = recorded(runs.first)
    got = recorded(runs.second)[: len(asked)]
    assert len(asked) == 120 + 3 * TALKS
    assert Counter(view.prompt_tokens for view in got) == Counter(view.prompt_tokens for view in asked)
    assert Counter(view.output_tokens for view in got) == Counter(view.output_tokens for view in asked)
    assert Counter(view.tags.get("tenant") for view in got) == Counter(
        view.tags.get("tenant") for view in asked
    )


def test_each_is_due_when_the_capture_says(runs: Runs) -> None:
    asked = recorded(runs.first)
    start = asked[0].arrival_unix_seconds
    for answer, view in zip(runs.results[0].answers, asked, strict=True):
        assert answer.due_seconds == pytest.approx(view.arrival_unix_seconds - start, abs=1e-5)
        assert answer.prompt_tokens == view.prompt_tokens
        assert answer.sent_seconds >= answer.due_seconds - 0.002


def test_the_same_tokens_are_hit(runs: Runs) -> None:
    capture = ReplayCapture.open(str(runs.first))
    _, measured = workload_of(capture)
    capture.close()
    hits = int(measured.cached_tokens.sum())
    assert hits > 10_000
    for result in runs.results:
        assert sum(answer.cached_tokens or 0 for answer in result.answers) == pytest.approx(hits, rel=0.01)
        assert result.tail is not None
        assert result.tail.counters["hits"] == pytest.approx(hits, rel=0.01)


def test_answers_that_are_quoted_are_hit_again(runs: Runs) -> None:
    talks = [view for view in recorded(runs.first) if view.tags.get("tenant") == "talk"]
    again = [answer for answer in runs.results[0].answers if answer.tenant == "talk"]
    assert [answer.cached_tokens for answer in again] == [view.cached_tokens for view in talks]
    # The second and third turns hit more than their own first prompt: what was generated is in it.
    assert sum(view.cached_tokens or 0 for view in talks) > TALKS * 2 * 64


def against(one: Replayed, other: Replayed) -> Comparison:
    return compare(open_side(one.target), open_side(other.target))


def test_replayed_twice_nothing_differs_that_the_engine_decides(runs: Runs) -> None:
    comparison = against(*runs.results)
    assert comparison.paired
    assert comparison.drift == ()
    said = {row.name: row.verdict for row in comparison.metrics}
    decided = ("kv_capacity_tokens", "hit_ratio", "prompt_tokens", "output_tokens")
    assert {said[name] for name in decided} == {"equal"}
    assert comparison.metric("preemptions_per_request").a == 0
    assert comparison.metric("preemptions_per_request").b == 0


@pytest.mark.soak  # latencies of one engine need a machine that does nothing else
def test_replayed_again_compare_says_equal(runs: Runs, tmp_path: Path, tiny_model: Path) -> None:
    with server(tmp_path / "again", tiny_model, *pool(BLOCKS)) as running:
        replays = [replay(runs.first, running.url, tmp_path / f"{number}.jsonl") for number in range(5)]
    sides = [open_side(one.target) for one in replays]
    comparison = compare(sides[0], sides[-1], repeats=sides[1:-1])
    assert comparison.paired
    assert comparison.verdict == "equal", comparison.metrics


def test_half_the_blocks_are_named_as_the_cause(runs: Runs) -> None:
    comparison = against(runs.results[0], runs.half)
    assert comparison.paired
    assert comparison.verdict in ("worse", "mixed")
    assert "--num-gpu-blocks-override 160" in comparison.restore_flags
    lost = next(one for one in comparison.findings if one.code == "KVC402")
    assert "num_gpu_blocks" in lost.cause
    assert "160 to 80" in lost.cause


def test_nothing_that_was_sent_is_in_the_results(runs: Runs) -> None:
    for result in (*runs.results, runs.half):
        for line in Path(result.target).read_text().splitlines()[1:]:
            row = json.loads(line)
            assert not any(isinstance(value, list) for value in row.values())

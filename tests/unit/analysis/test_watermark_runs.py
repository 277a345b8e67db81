"""The watermark of recorded load ladders: the embedded engine decides as vLLM's scheduler does, on a clock of its own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from kvcatch.analysis.watermark import Level, Observations, Unloaded, measure, rate_at
from kvcatch.analysis.watermark_sources import from_pages, from_recording
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.sources.readings import EngineKey, Histogram, Reading
from kvcatch.store.columns import read_recording
from kvcatch.workload import Workload, build
from unit.compare.paired_runs import record

BLOCKS, SIZE = 401, 16
#: requests a second that fill the pool: 6,400 tokens, 700 a request, about 2.4 s each
FULL = 6400 / 700 / 2.4


def ladder(seed: int, shares: tuple[float, ...], count: int = 150) -> Workload:
    """Rungs of Poisson arrivals in random order with a pause after each; 600 + 200 tokens on average."""
    rng, now, rows = random.Random(seed), 0.0, []
    rungs = list(shares)
    rng.shuffle(rungs)
    for share in rungs:
        for _ in range(count):
            now += rng.expovariate(share * FULL)
            prompt = int(600 * rng.uniform(0.5, 1.5))
            output = int(200 * rng.uniform(0.5, 1.5))
            rows.append(
                {"arrival": now, "prompt": prompt, "output": output, "segments": [(len(rows), prompt)]}
            )
        now += 60
    return build("ladder", rows, grain=1)


SHARES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("ladder"), ladder(0, SHARES), blocks=BLOCKS)


def seen(path: str) -> Observations:
    return from_recording(read_recording(path))


@pytest.mark.soak
def test_five_ladders_agree_and_below_the_line_nobody_is_slow(tmp_path: Path) -> None:
    knees = []
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found = measure(seen(record(folder, ladder(seed, SHARES), blocks=BLOCKS)))
        assert found.knee_committed_ratio is not None
        knees.append(found.knee_committed_ratio.value)
        assert found.slowdown_p95_below is not None
        assert found.slowdown_p95_below <= 2
        # Nothing was preempted while demand was below the line.
        assert (found.opinions["first_preemption"] or 9) > found.knee_committed_ratio.low
    assert np.std(knees, ddof=1) <= 0.03
    # Admission takes a prompt whole: waiting begins when the pool is nearly promised away.
    assert 0.8 < np.mean(knees) < 1.0


def test_one_ladder_bends_where_the_pool_is_promised_away(recorded: str) -> None:
    found = measure(seen(recorded))
    assert found.verdict == "knee"
    assert found.knee_committed_ratio is not None
    assert 0.8 < found.knee_committed_ratio.low <= found.knee_committed_ratio.high < 1.0
    assert (found.slowdown_p95_below or 9) <= 2
    assert (found.opinions["first_preemption"] or 9) > found.knee_committed_ratio.low


def test_light_load_has_no_knee(tmp_path: Path) -> None:
    found = measure(seen(record(tmp_path, ladder(1, (0.1, 0.2, 0.3)), blocks=BLOCKS)))
    assert found.verdict == "no knee in range"
    assert found.safe_utilization_ratio is None
    assert found.vllm_flag is None


def test_the_flag_ends_preemption_and_costs_waiting(recorded: str, tmp_path: Path) -> None:
    """At the rate that fills the pool, vLLM's own watermark of the printed size: what it buys, and for what."""
    line = measure(seen(recorded))
    full = ladder(10, (1.0,), 300)
    found = {}
    for free in (0.0, line.vllm_watermark_free_ratio or 0.0):
        rows = seen(record(tmp_path, full, blocks=BLOCKS, watermark=free))
        found[free > 0] = rows, measure(rows, unloaded=line.unloaded).p95_slowdown_with_flag
    plain, (rows, told) = found[False][0], found[True]
    assert found[False][1] is None
    assert told is not None
    assert (plain.preemptions or 0) / len(plain.ttft) > 0.03
    assert told.preemptions_per_request == 0
    assert line.knee_committed_ratio is not None
    below = rows.committed <= line.knee_committed_ratio.low
    assert line.unloaded is not None
    slowdown = rows.ttft / line.unloaded.seconds(rows.tokens)
    assert np.percentile(slowdown[below], 95) <= 2
    # Who arrives above the line waits longer than without the flag: that is its price, and it is printed.
    assert told.slowdown_p95 > np.percentile(plain.ttft / line.unloaded.seconds(plain.tokens), 95)


def test_units_of_time_do_not_matter(recorded: str) -> None:
    one, other = seen(recorded), seen(recorded)
    other.ttft = other.ttft * 1000
    first, second = measure(one), measure(other)
    assert first.safe_utilization_ratio == pytest.approx(second.safe_utilization_ratio, abs=1e-9)
    assert first.opinions["p95_slowdown_2"] == second.opinions["p95_slowdown_2"]


def test_the_idle_engine_by_hand(tmp_path: Path) -> None:
    """7 ms a step and 25 µs a prompt token are what the engine's clock does, and a prompt is one step."""
    line = measure(seen(record(tmp_path, ladder(0, (0.1,), 60), blocks=BLOCKS))).unloaded
    assert line is not None
    assert line.measured
    assert line.fixed_seconds == pytest.approx(0.007, abs=0.0005)
    assert line.seconds_per_token == pytest.approx(25e-6, rel=0.05)


def test_demand_by_hand(recorded: str) -> None:
    rows = seen(recorded)
    # The first request meets an empty engine: its own prompt is the demand.
    recording = read_recording(recorded)
    first = int(np.argmin(recording.requests.arrival))
    blocks = -(-int(recording.requests.prompt_tokens[first]) // SIZE)
    assert rows.committed[0] == pytest.approx(blocks / (BLOCKS - 1))
    assert rows.idle[0]
    assert rows.committed.max() > 1
    line = measure(rows).unloaded
    assert line is not None
    assert line.fixed_seconds == pytest.approx(0.007, abs=0.0005)


def test_the_line_leaves_room_for_the_largest_prompt(recorded: str) -> None:
    found = measure(seen(recorded))
    assert found.knee_committed_ratio is not None
    assert found.safe_utilization_ratio is not None
    room = found.safe_utilization_ratio + found.largest_request_ratio
    assert room == pytest.approx(min(found.knee_committed_ratio.low, found.opinions["p95_slowdown_2"] or 9))
    assert found.vllm_watermark_free_ratio == pytest.approx(1 - room, abs=0.001)
    assert found.vllm_flag == f"--watermark {found.vllm_watermark_free_ratio:g}"
    assert found.p95_slowdown_with_flag is None


def test_the_verb_stores_it_and_a_view_draws_it(
    recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCATCH_DIR", str(tmp_path))
    main(["top", recorded, "--once", "--json"])
    pool = json.loads(capsys.readouterr().out)["pool"]
    assert (pool["watermark_utilization_ratio"], pool["watermark_source"]) == (0.85, "assumed")
    main(["watermark", recorded, "--json"])
    said = json.loads(capsys.readouterr().out)
    stored = json.loads((tmp_path / "watermark.json").read_text())
    assert stored["config_hash"] == said["config_hash"]
    main(["top", recorded, "--once", "--json"])
    pool = json.loads(capsys.readouterr().out)["pool"]
    assert pool["watermark_source"] == "measured"
    assert pool["watermark_utilization_ratio"] == said["safe_utilization_ratio"]


def test_too_few_requests_are_refused() -> None:
    few = Observations(np.zeros(5), np.ones(5), np.ones(5), np.ones(5, bool), 0.1)
    with pytest.raises(KVCatchError, match="5 requests"):
        measure(few)


def test_an_engine_that_runs_with_the_flag_gives_its_numbers() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0.05, 1.2, 500)
    rows = Observations(
        x, 0.1 * np.exp(5 * np.maximum(0, x - 0.9)), np.full(500, 100.0), np.zeros(500, bool), 0.05,
        preemptions=3, free_ratio=0.1,
    )  # fmt: skip
    found = measure(
        rows, unloaded=Unloaded(fixed_seconds=0.1, seconds_per_token=0.0, requests=9, measured=True)
    )
    told = found.p95_slowdown_with_flag
    assert told is not None
    assert told.watermark_free_ratio == 0.1
    assert told.slowdown_p95 == pytest.approx(np.percentile(np.exp(5 * np.maximum(0, x - 0.9)), 95))
    assert told.slowdown_p95_below == pytest.approx(1.0, abs=0.05)
    assert told.preemptions_per_request == pytest.approx(3 / 500)


def test_the_rate_at_the_line_lies_between_two_rungs() -> None:
    levels = tuple(
        Level(requests_per_second=rate, requests=60, committed_ratio_mean=demand, committed_ratio_p95=1.0,
              slowdown_p95=1.0, preemptions_per_request=0.0)
        for rate, demand in ((4.0, 0.9), (1.0, 0.2), (2.0, 0.4))
    )  # fmt: skip
    assert rate_at(levels, 0.65) == pytest.approx(3.0)
    assert rate_at(levels, 0.95) is None


def pages(count: int = 120) -> list[Reading]:
    """A page every 15 s of an engine whose TTFT doubles every 0.1 of demand above 0.8."""
    total, observed, tokens, result = 0.0, 0.0, 0.0, []
    for n in range(count):
        usage = 0.2 + 0.8 * min(1.0, n / 90)
        waiting = max(0, n - 90) // 3
        demand = usage + waiting * 0.05
        latency = 0.2 * 2 ** (max(0.0, demand - 0.8) / 0.1)
        observed, total, tokens = observed + 10, total + 10 * latency, tokens + 10 * 320
        result.append(
            Reading(
                key=EngineKey("", "m", "0"), usage_ratio=usage, waiting=waiting, running=4, usable_blocks=400,
                block_size=16, preemptions=0, ttft=Histogram(observed, total, (float("inf"),), (observed,)),
                request_prompt_tokens=Histogram(observed, tokens, (float("inf"),), (observed,)),
            )
        )  # fmt: skip
    return result


def test_pages_of_counters_show_the_bend_too() -> None:
    info = EngineInfo(num_blocks=401, block_size=16)
    rows = from_pages("prometheus:x", info, pages())
    assert rows.largest_ratio == pytest.approx(20 / 400)
    found = measure(rows)
    assert found.knee_committed_ratio is not None
    # The bend is at 0.8 of used and waiting; the typical prompt of 20 blocks comes on top.
    assert found.knee_committed_ratio.value == pytest.approx(0.85, abs=0.03)
    assert any("one observation per scrape" in said for said in found.warnings)
    with pytest.raises(KVCatchError, match="no interval"):
        from_pages("prometheus:x", info, [])

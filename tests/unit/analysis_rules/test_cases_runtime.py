"""Runtime cases of public threads that are no log and no page: traces, request logs, engine states, two runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rule_pages as pages
from recordings import record

from kvcatch.analysis.compare_drift import drift
from kvcatch.analysis.doctor import diagnose
from kvcatch.analysis.evidence import from_scrape
from kvcatch.analysis.evidence_log import from_log
from kvcatch.cli.main import main
from kvcatch.diagnosis import find
from kvcatch.events import EngineInfo
from kvcatch.planner import plan
from kvcatch.simulator.whatif import simulate
from kvcatch.sources.failures import parse_failures
from kvcatch.sources.logs import LogCapture
from kvcatch.store.capture import ReplayCapture
from kvcatch.workload import build


def prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict], *more: str) -> dict:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["prefix", str(log), "--json", *more]) == 0
    (report,) = json.loads(capsys.readouterr().out)["targets"]
    return report


def turns(rounds: int, conversations: int) -> list[dict]:
    """Multi-turn conversations of one block a message: round n asks with n blocks, the first n - 1 known."""
    rows = []
    for turn in range(1, rounds + 1):
        for talk in range(conversations):
            segments = [((talk, part), 16) for part in range(turn)]
            row = {
                "arrival": float(turn),
                "prompt": 16 * turn,
                "output": 1,
                "segments": segments,
                "tenant": "t",
            }
            rows.append(row)
    return rows


def test_b12_consecutive_turns_on_other_engines_are_scattered(tmp_path: Path, capsys) -> None:
    """Round-robin over four engines: each turn finds its conversation on another one."""
    rows = [
        {
            "prompt_token_ids": [talk * 1000 + token for token in range(64 * (turn + 1))],
            "engine": str((turn + talk) % 4), "arrival_s": turn * 10.0 + talk,
        }
        for turn in range(4)
        for talk in range(20)
    ]  # fmt: skip
    report = prefix(tmp_path, capsys, rows, "--block-size", "16")
    causes = {row["cause"]: row["tokens"] for row in report["causes"]}
    # Turns 2, 3 and 4 could have hit 64, 128 and 192 tokens of each of 20 conversations.
    assert causes["other_engine"] == 20 * (64 + 128 + 192)
    assert report["hit_tokens"] == 0
    together = prefix(tmp_path, capsys, [{**row, "engine": "0"} for row in rows], "--block-size", "16")
    assert together["hit_tokens"] == 20 * (64 + 128 + 192)


def test_b14_the_deepest_block_of_a_chain_goes_first() -> None:
    """Three blocks hold a chain, one is needed: the next request with that chain still hits two."""
    chain = [(("c", part), 16) for part in range(3)]
    rows = [
        {"arrival": 0.0, "prompt": 48, "output": 1, "segments": chain, "tenant": "t"},
        {"arrival": 1.0, "prompt": 16, "output": 1, "segments": [("other", 16)], "tenant": "t"},
        {"arrival": 2.0, "prompt": 49, "output": 1, "segments": [*chain, ("end", 1)], "tenant": "t"},
    ]
    work = build("b14", rows, grain=1)
    # Four usable blocks: the third request needs them all, the second one takes the free fourth block.
    four = simulate(work, num_blocks=5, block_size=16)
    assert four.hit_tokens == 48
    # Three usable blocks are too few for the last request: a shorter one, to see what stayed.
    rows[2] = {"arrival": 2.0, "prompt": 33, "output": 1, "segments": [*chain[:2], ("end", 1)], "tenant": "t"}
    assert simulate(build("b14", rows, grain=1), num_blocks=4, block_size=16).hit_tokens == 32


def test_b13_partial_blocks_are_taken_before_cached_ones() -> None:
    """Many short prompts, each in a block of its own that is never full, must not flush a cached prefix."""
    head = [(("h", part), 16) for part in range(4)]
    rows = [{"arrival": 0.0, "prompt": 65, "output": 1, "segments": [*head, ("a", 1)], "tenant": "t"}]
    rows += [
        {"arrival": 1.0 + n, "prompt": 9, "output": 2, "segments": [(("s", n), 9)], "tenant": "t"}
        for n in range(200)
    ]
    rows.append({"arrival": 999.0, "prompt": 65, "output": 1, "segments": [*head, ("b", 1)], "tenant": "t"})
    assert simulate(build("b13", rows, grain=1), num_blocks=8, block_size=16).hit_tokens == 64


def test_b16_a_multi_turn_run_follows_n_over_n_plus_one() -> None:
    """Round n asks for n blocks of which n - 1 are known; the last token is always computed."""
    rounds = 5
    for last in range(1, rounds + 1):
        before = (
            simulate(build("b16", turns(last - 1, 50), grain=1), num_blocks=2000, block_size=16)
            if last > 1
            else None
        )
        now = simulate(build("b16", turns(last, 50), grain=1), num_blocks=2000, block_size=16)
        queried = now.queried_tokens - (before.queried_tokens if before else 0)
        hit = now.hit_tokens - (before.hit_tokens if before else 0)
        assert hit / queried == pytest.approx((last - 1) / last)


def test_b25_the_gauge_counts_blocks_not_tokens(tmp_path: Path) -> None:
    """Prompts of 17 tokens in blocks of 16 hold two blocks: 17 / 32 of the slots are filled at first."""
    path = record(tmp_path, [(0.05 * n, "t", 17, 4) for n in range(100)], blocks=401)
    rows = ReplayCapture.open(path).samples()
    busy = rows["active_blocks"] > 0
    filled = rows["held_tokens"][busy] / (16 * rows["active_blocks"][busy])
    assert float(filled.min()) == pytest.approx(17 / 32)


def test_b29_more_cached_than_asked_is_not_believed(tmp_path: Path, capsys) -> None:
    """A prompt of 59,946 tokens cannot have 122,884 of them cached."""
    ids = list(range(5994))
    report = prefix(
        tmp_path, capsys, [{"prompt_token_ids": ids, "cached_tokens": 12288}, {"prompt_token_ids": ids}]
    )
    assert report["hit_tokens"] <= report["queried_tokens"]
    assert sum(row["tokens"] for row in report["causes"]) == report["missed_tokens"]
    assert report["missed_tokens"] >= 0


def idle_line(at: str, usage: float, waiting: int = 0) -> str:
    return (
        f"(APIServer pid=1) INFO 11-29 {at} [loggers.py:335] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg "
        f"generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: {waiting} reqs, GPU KV cache usage: {usage}%, "
        "Prefix cache hit rate: 0.0%"
    )


def test_b46_blocks_of_aborted_transfers_are_a_leak() -> None:
    """Nothing runs or waits, and 62 % of the pool stay held for minutes."""
    figures = {
        "num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.62, "prompt_tokens_total": 9e5,
        "generation_tokens_total": 1e5, "num_preemptions_total": 0,
    }  # fmt: skip
    found = diagnose(from_scrape(pages.capture([figures] * 12, every=20.0))).findings
    assert [one.code for one in found if one.severity != "info"] == ["KVC008"]
    assert any("62" in row.text or row.value == pytest.approx(0.62) for row in found[0].evidence)


def test_b47_unrecognised_notifications_do_not_hide_the_leak() -> None:
    """The log names unknown transfer ids while an idle prefill engine keeps its blocks."""
    lines = []
    for number in range(8):
        lines.append(idle_line(f"16:{10 + number}:00", 71.5))
        lines.append(
            "(Worker_TP1 pid=2) ERROR 11-29 16:10:01 [nixl.py:900] Potentially invalid KV blocks for unrecognized request"
        )
    found = diagnose(
        from_log(LogCapture("log", lines, 1_764_439_200.0), parse_failures(lines, year=2025))
    ).findings
    assert [one.code for one in found if one.severity != "info"] == ["KVC008"]


def test_b34_a_full_pool_in_which_nothing_runs_any_more() -> None:
    """Requests parked for a transfer hold what the head of the queue needs: a standstill, not mere pressure."""
    lines = [idle_line(f"16:{10 + number}:00", 99.1, waiting=14) for number in range(8)]
    found = diagnose(
        from_log(LogCapture("log", lines, 1_764_439_200.0), parse_failures(lines, year=2025))
    ).findings
    codes = {one.code for one in found if one.severity != "info"}
    assert codes & {"KVC005", "KVC008"}
    assert not codes & {"KVC001", "KVC007", "KVC010"}


def test_b69_the_activation_peak_grows_with_the_batched_tokens() -> None:
    """Less KV cache after raising --max-num-batched-tokens: the profile run uses that many."""
    sizes = [
        plan(
            "meta-llama/Llama-3.1-8B",
            gpu="H100",
            max_model_len=8192,
            max_num_batched_tokens=tokens,
            advise=False,
        )
        for tokens in (2048, 8192, 32768)
    ]
    peaks = [found.memory.activation_peak.bytes for found in sizes]
    room = [found.memory.available_kv.bytes for found in sizes]
    assert peaks == sorted(peaks)
    assert peaks[2] > peaks[0]
    assert room[0] - room[2] == pytest.approx(peaks[2] - peaks[0], rel=0.01)


def test_b73_a_variable_that_only_one_run_had_is_named_first_of_all_suspects() -> None:
    """The "regression" was an environment variable set in the new run only."""
    before = EngineInfo(engine_version="0.26.0", env={"OMP_NUM_THREADS": "1"})
    after = EngineInfo(
        engine_version="0.28.0", env={"OMP_NUM_THREADS": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
    )
    rows = {row.name: row for row in drift(before, after)}
    assert set(rows) == {"engine_version", "env.VLLM_USE_BREAKABLE_CUDAGRAPH"}
    row = rows["env.VLLM_USE_BREAKABLE_CUDAGRAPH"]
    assert (row.a, row.b, row.restore) == (None, "0", "unset VLLM_USE_BREAKABLE_CUDAGRAPH")
    back = {row.name: row for row in drift(after, before)}
    assert back["env.VLLM_USE_BREAKABLE_CUDAGRAPH"].restore == "export VLLM_USE_BREAKABLE_CUDAGRAPH=0"


def test_a_healthy_idle_engine_is_none_of_these(tmp_path: Path) -> None:
    path = record(tmp_path, [(0.1 * n, "t", 100, 20) for n in range(50)])
    assert [one for one in find(path).findings if one.severity != "info"] == []

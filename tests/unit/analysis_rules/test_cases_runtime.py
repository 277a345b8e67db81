"""Runtime cases of public threads that are no log and no page: traces, request logs, engine states, two runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import rule_pages as pages
from recordings import record

from kvcatch.analysis.compare import Metric, compare
from kvcatch.analysis.compare_causes import explain as explain_runs
from kvcatch.analysis.compare_drift import Drift, drift
from kvcatch.analysis.compare_sides import from_bench
from kvcatch.analysis.doctor import diagnose
from kvcatch.analysis.evidence import Case, Holder, from_recording, from_scrape
from kvcatch.analysis.evidence_log import from_log
from kvcatch.analysis.layout_facts import given_back, reuse_unit
from kvcatch.analysis.prefix import Lookups, explain
from kvcatch.analysis.prefix_findings import findings
from kvcatch.analysis.rules_hybrid import state_pages
from kvcatch.analysis.thresholds import LIMITS
from kvcatch.cli.main import main
from kvcatch.diagnosis import find
from kvcatch.events import EngineInfo, KVGroup
from kvcatch.planner import plan
from kvcatch.results import Finding, Pool, Preemption, Queues, RequestView, Snapshot
from kvcatch.simulator.whatif import simulate
from kvcatch.sources.failures import parse_failures
from kvcatch.sources.logs import LogCapture
from kvcatch.store.capture import ReplayCapture
from kvcatch.store.columns import read_recording
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


HYBRID = {"cache": {"mamba_cache_mode": "align", "mamba_block_size": 1616}}


def warned(cases: list[Case]) -> dict[str, Finding]:
    """The findings that are more than a note."""
    return {one.code: one for one in diagnose(cases).findings if one.severity != "info"}


def test_b6_two_runs_of_one_hybrid_alone_and_in_company(tmp_path: Path) -> None:
    """Alone 0 %, in company a little: where prefill chunks end, not where requests are routed."""
    cases = []
    for name, running, hits in (("alone", 1, 0), ("eight", 8, 26_000)):
        page = {
            "num_requests_running": running, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.1,
            "prompt_tokens_total": 800_000, "generation_tokens_total": 50_000, "prefix_cache_queries_total": 800_000,
            "prefix_cache_hits_total": hits, "num_preemptions_total": 0, "block_size": 64,
            "config": {"mamba_cache_mode": "align"},
        }  # fmt: skip
        (case,) = from_scrape(pages.capture([page]))
        case.target = name
        cases.append(case)
    found = warned(cases)
    assert set(found) == {"KVC201"}
    # 26,000 of 800,000
    assert [row.value for row in found["KVC201"].evidence[:2]] == [800_000, pytest.approx(0.0325)]
    assert [row.source for row in found["KVC201"].evidence[:2]] == ["alone", "eight"]
    # A state at every block leaves a lone prompt nothing to lose by, and an engine without states has none.
    for mode in ("all", "none"):
        for case in cases:
            case.info = msgspec.structs.replace(case.info, config={"mamba_cache_mode": mode})
        assert warned(cases) == {}


def test_b6_the_first_requests_after_a_start_prove_nothing() -> None:
    """Twenty thousand tokens alone without a hit, then company that hits: a note at most."""
    base = {"kv_cache_usage_perc": 0.1, "num_preemptions_total": 0, "num_requests_waiting": 0,
            "config": {"mamba_cache_mode": "align"}, "block_size": 64}  # fmt: skip
    rows = [(1, 0, 0), (1, 10_000, 0), (1, 20_000, 0), (8, 60_000, 20_000), (8, 120_000, 60_000)]
    sequence = [
        base | {"num_requests_running": running, "prompt_tokens_total": tokens, "prefix_cache_queries_total": tokens,
                "generation_tokens_total": tokens // 10, "prefix_cache_hits_total": hits}
        for running, tokens, hits in rows
    ]  # fmt: skip
    assert warned(from_scrape(pages.capture(sequence))) == {}


def test_b8_expected_hits_with_drafts_in_a_log(tmp_path: Path, capsys) -> None:
    """The published case at a 64th: floor((512 - 2) / 256) x 256 = 256 instead of 512 tokens."""
    rows = [{"prompt_token_ids": list(range(513))} for _ in range(5)]
    without = prefix(tmp_path, capsys, rows, "--block-size", "2", "--hit-unit", "256")
    drafted = prefix(tmp_path, capsys, rows, "--block-size", "2", "--hit-unit", "256", "--drafts")
    assert (without["hit_tokens"], drafted["hit_tokens"]) == (4 * 512, 4 * 256)
    causes = {row["cause"]: row["tokens"] for row in drafted["causes"]}
    # All of it is shared; the first request saw it first.
    assert causes == {"first_seen": 513, "misaligned": 4 * 257}
    # Two tokens more of shared text and the step is reached.
    rows = [{"prompt_token_ids": list(range(515))} for _ in range(5)]
    longer = prefix(tmp_path, capsys, rows, "--block-size", "2", "--hit-unit", "256", "--drafts")
    assert longer["hit_tokens"] == 4 * 512


@pytest.mark.parametrize(("method", "expected"), [("mtp", "KVC201"), ("eagle3", "KVC201"), ("ngram", None)])
def test_b8_recorded_hits_one_unit_short_of_what_is_shared(method: str, expected: str | None) -> None:
    """32,800 tokens asked again and again, 16,384 of them hit: the drafts' unit, no eviction and no routing."""
    info = EngineInfo(
        num_blocks=20_001, block_size=128, speculative=True,
        groups=(KVGroup(kind="mla", layers=20, block_size=128), KVGroup(kind="sliding", layers=20, block_size=16_384)),
        config={"speculative": {"method": method}},
    )  # fmt: skip
    count = 20
    rows = [
        {"arrival": float(n), "prompt": 32_800, "output": 1, "segments": [("all", 32_800)], "tenant": "t"}
        for n in range(count)
    ]
    look = Lookups(
        workload=build("b8", rows, grain=1), names=[str(n) for n in range(count)], block_size=128, usable=20_000,
        hit=np.array([0] + [16_384] * (count - 1)), unit=reuse_unit(info), given_back=given_back(info, method),
    )  # fmt: skip
    report, _ = explain(look, "b8", "capture")
    found = {one.code: one for one in findings(report)}
    if expected is None:
        # Without a block given back the same hits are a loss that the unit does not explain.
        assert look.given_back == 0
        assert "KVC201" not in found
        return
    assert set(found) == {"KVC201"}
    # 19 requests lack 32,800 - 16,384 tokens each.
    assert found["KVC201"].evidence[0].value == 19 * (32_800 - 16_384)
    assert "floor((n - 16,384) / 16,384) x 16,384" in found["KVC201"].evidence[2].text


def test_b8_two_runs_the_second_with_drafts() -> None:
    """Half the hits after switching MTP on: the drafts are blamed, not the pool."""
    before = EngineInfo(num_blocks=2001, block_size=128, config={"speculative": {}})
    after = EngineInfo(num_blocks=2001, block_size=128, speculative=True)
    hits = Metric(
        name="hit_ratio", unit="ratio", better="up", a=0.999, b=0.4995, difference=-0.4995, relative_difference=-0.5,
        low=-0.51, high=-0.49, floor=0.01, floor_source="assumed", verdict="worse",
    )  # fmt: skip
    changed = (Drift(name="speculative", a=False, b=True),)
    found = {one.code: one for one in explain_runs({"hit_ratio": hits}, changed, (before, after))}
    assert set(found) == {"KVC404", "KVC405"}
    assert "speculative changed from False to True" in found["KVC404"].cause


@pytest.mark.parametrize(
    ("budgets", "steps"), [((4096, 2048), [1, 2]), ((2048, 2048), [2, 2]), ((None, None), [])]
)
def test_b75_later_first_tokens_name_the_steps_of_a_prompt(budgets, steps) -> None:
    """0.13 s became 0.39 s with prompts of 4,096 tokens: chunks first, then the version."""
    rng = np.random.default_rng(4)
    sides = []
    for version, budget, mean in (("0.6.1.post2", budgets[0], 0.13), ("0.7.0", budgets[1], 0.39)):
        result = {
            "completed": 400, "duration": 333.0, "request_rate": 1.2, "mean_ttft_ms": 1e3 * mean, "std_ttft_ms": 50.0,
            "total_input_tokens": 400 * 4096, "ttfts": (mean * rng.uniform(0.8, 1.2, 400)).tolist(),
        }  # fmt: skip
        side = from_bench(version, result)
        side.info = EngineInfo(engine_version=version, max_num_batched_tokens=budget)
        sides.append(side)
    comparison = compare(*sides)
    found = {one.code: one for one in comparison.findings}
    assert {code for code, one in found.items() if one.severity == "warning"} == {"KVC405", "KVC407"}
    assert comparison.metric("ttft_seconds").b == pytest.approx(0.39, rel=0.02)
    said = [row for row in found["KVC407"].evidence if row.unit == "steps"]
    assert [row.value for row in said] == steps
    assert any("0.6.1.post2, is 0.7.0" in row.text for row in found["KVC407"].evidence)
    if budgets[0] != budgets[1]:
        assert "max_num_batched_tokens changed from 4096 to 2048" in found["KVC407"].cause
        assert "--max-num-batched-tokens 4096" in found["KVC407"].remedy
    if steps == [2, 2]:
        # A prompt of 4,096 tokens beside one running request: 2,047 + 2,047 + 2.
        assert "3 beside running requests" in said[0].text


@pytest.mark.parametrize(
    ("command", "grows"),
    [
        ("vllm serve m --kv-cache-metrics --disable-log-stats", True),
        ("vllm serve m --kv-cache-metrics", False),
        ("vllm serve m --disable-log-stats", False),
    ],
)
def test_b28_a_command_line_whose_lifetimes_nobody_takes(command: str, grows: bool) -> None:
    lines = [f"INFO 07-06 10:00:00 [api_server.py:1] {command}"]
    cases = from_log(LogCapture("log", lines, 1_764_439_200.0), parse_failures(lines, year=2025))
    assert set(warned(cases)) == ({"KVC504"} if grows else set())


def test_groups_hit_together_at_the_least_common_multiple_of_their_blocks() -> None:
    """Blocks of 48 and 32 tokens have every 96th token in common."""
    groups = tuple(KVGroup(kind="full", layers=1, block_size=size) for size in (48, 32))
    assert reuse_unit(EngineInfo(block_size=16, groups=groups)) == 96
    # Where the engine says it, that counts.
    said = EngineInfo(block_size=16, groups=groups, config={"cache": {"cache_hit_alignment_tokens": 32}})
    assert reuse_unit(said) == 32
    assert reuse_unit(EngineInfo(block_size=16, config={"cache_hit_alignment_tokens": "None"})) == 16


def test_b70_blocks_of_recorded_requests_that_hold_states() -> None:
    """200,000 tokens need 124 attention blocks of 1,616; the 161 held are 37 states more, 23 % of them."""
    groups = (
        KVGroup(kind="full", layers=12, block_size=1616),
        KVGroup(kind="mamba", layers=36, block_size=1616),
    )
    info = EngineInfo(
        num_blocks=330, block_size=1616, groups=groups, config=HYBRID, max_num_batched_tokens=8192
    )
    holders = tuple(
        Holder(request_id=name, tenant="t", blocks=161, share=161 / 329, start=0.0, stop=9.0, prompt_tokens=200_000,
               output_tokens=1, arrival=0.0, live=False)
        for name in ("a", "b")
    )  # fmt: skip
    moment = Snapshot(
        pool=Pool(num_blocks=329, active_blocks=322, utilization_ratio=322 / 329),
        queues=Queues(running=1, waiting=1), preemption=Preemption(preemptions=1),
    )  # fmt: skip
    case = Case(target="b70", kind="recording", info=info, moment=moment, holders=holders)
    found = {one.code: one for one in state_pages(case, LIMITS)}
    assert found["KVC302"].severity == "warning"
    assert "74 of 322 blocks" in found["KVC302"].evidence[0].text
    assert "--mamba-block-size 8192 (now 1616)" in found["KVC302"].remedy
    # The same blocks in an engine whose every layer keeps all tokens are no states.
    case.info = msgspec.structs.replace(info, groups=(groups[0],) * 2, config={})
    assert list(state_pages(case, LIMITS)) == []
    # A pool with room left is worth a note.
    case.info = info
    case.moment = msgspec.structs.replace(
        moment, pool=Pool(num_blocks=600, active_blocks=322, utilization_ratio=0.54)
    )
    assert [one.severity for one in state_pages(case, LIMITS)] == ["info"]


def test_b72_a_waiting_prompt_needs_more_block_numbers_than_the_pool_has() -> None:
    """69,000 tokens: 4 x 108 blocks of 640, one of 4, and a window of 64-token blocks that is full at 970."""
    groups = (
        *(KVGroup(kind="full", layers=4, block_size=640),) * 4,
        KVGroup(kind="mamba", layers=30, block_size=4),
        KVGroup(kind="sliding", layers=8, block_size=64, window=53_825),
    )
    info = EngineInfo(num_blocks=1403, block_size=640, groups=groups, max_num_batched_tokens=8192)
    # By tokens the pool looks large: 1,402 x 640 = 897,280.
    for tokens, need in ((69_000, 432 + 1 + 970), (68_000, 428 + 1 + 970)):
        waiting = RequestView(
            engine_request_id="long-0", request_id="long", status="waiting", prompt_tokens=tokens
        )
        moment = Snapshot(pool=Pool(num_blocks=1402, active_blocks=0, block_size=640), queues=Queues(running=1, waiting=1),
                          requests=[waiting])  # fmt: skip
        found = warned([Case(target="b72", kind="moment", info=info, moment=moment)])
        if need <= 1402:
            assert found == {}
            continue
        assert set(found) == {"KVC005"}
        assert found["KVC005"].request_id == "long"
        assert found["KVC005"].evidence[0].value == need
        # 107 x 4 + 1 + 970 = 1,399 fit, 108 x 4 + 971 do not: 107 x 640 = 68,480 tokens with one of output.
        assert "--max-input-tokens 68479" in found["KVC005"].remedy
        assert (
            "4 x 108 of 640 tokens (full), 1 of 4 tokens (mamba), 970 of 64 tokens (sliding)"
            in found["KVC005"].evidence[2].text
        )


def test_b72_a_recorded_request_that_never_started(tmp_path: Path) -> None:
    """400 blocks of 16 in four groups: 100 blocks each are 1,600 tokens, so 1,700 can never run."""
    recording = read_recording(record(tmp_path, [(0.1 * n, "t", 100, 20) for n in range(20)]))
    recording.requests.prompt_tokens[-1], recording.requests.scheduled[-1] = 1700, 0
    (one_group, four_groups) = (from_recording(recording) for _ in range(2))
    assert "KVC005" not in warned([one_group])
    group = KVGroup(kind="full", layers=1, block_size=16)
    four_groups.info = msgspec.structs.replace(four_groups.info, groups=(group,) * 4)
    found = warned([four_groups])["KVC005"]
    # 4 x ceil(1,700 / 16)
    assert found.evidence[0].value == 428
    assert "--max-input-tokens 1599 " in found.remedy


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

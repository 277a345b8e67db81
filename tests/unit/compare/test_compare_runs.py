"""Comparisons of recordings made by the embedded engine in known configurations."""

from __future__ import annotations

import json

import pytest
from paired_runs import load, record

from kvcatch.analysis.compare import align, compare
from kvcatch.cli.compare import open_side
from kvcatch.cli.main import main


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Requests that share their first 100 tokens, in a pool with room to spare."""
    return record(tmp_path_factory.mktemp("base"), load(1, shared=100))


def against(base, other):
    return compare(open_side(base), open_side(other))


def codes(comparison):
    return [finding.code for finding in comparison.findings if finding.severity != "info"]


def test_a_run_against_itself_is_equal_in_every_metric(base):
    comparison = against(base, base)
    assert comparison.paired
    assert comparison.verdict == "equal"
    assert {metric.verdict for metric in comparison.metrics} == {"equal"}
    assert comparison.drift == ()
    assert comparison.findings == ()


def test_larger_blocks_cost_reuse_and_room_and_the_flag_is_named(base, tmp_path):
    # Of 100 shared tokens, blocks of 16 reuse 6 x 16 = 96 and blocks of 64 reuse 64: a third of the hits is lost.
    comparison = against(base, record(tmp_path, load(1, shared=100), block_size=64, blocks=101))
    assert {"KVC404", "KVC406"} <= set(codes(comparison))
    assert comparison.metric("hit_ratio").relative_difference == pytest.approx(64 / 96 - 1, abs=0.001)
    assert comparison.metric("kv_capacity_tokens").verdict == "equal"  # 400 x 16 = 100 x 64
    assert "--block-size 16" in comparison.restore_flags
    lost = next(one for one in comparison.findings if one.code == "KVC404")
    assert "block_size changed from 16 to 64" in lost.cause
    assert "--block-size 16" in lost.remedy


def test_caching_switched_off_is_lost_reuse_blamed_on_the_flag(base, tmp_path):
    comparison = against(base, record(tmp_path, load(1, shared=100), caching=False))
    assert codes(comparison) == ["KVC404", "KVC405"]
    assert comparison.metric("hit_ratio").b == 0
    assert comparison.metric("ttft_seconds").verdict == "worse"
    assert comparison.restore_flags == ("--enable-prefix-caching",)
    back = against(record(tmp_path, load(1, shared=100), caching=False), base)
    assert back.verdict == "better"
    assert codes(back) == []


def test_a_lower_limit_of_requests_makes_them_queue_and_is_blamed(tmp_path):
    requests = load(2, per_second=12)
    comparison = against(record(tmp_path, requests), record(tmp_path, requests, max_num_seqs=4))
    assert "KVC403" in codes(comparison)
    queue = next(one for one in comparison.findings if one.code == "KVC403")
    assert "max_num_seqs changed from 64 to 4" in queue.cause
    assert "--max-num-seqs 64" in queue.remedy


def test_a_smaller_pool_is_less_capacity_and_more_preemption(tmp_path):
    requests = load(3, per_second=12, output=120)
    comparison = against(record(tmp_path, requests), record(tmp_path, requests, blocks=61))
    assert {"KVC401", "KVC402"} <= set(codes(comparison))
    assert comparison.metric("kv_capacity_tokens").difference == (60 - 400) * 16


def test_runs_with_other_seeds_show_no_difference(tmp_path):
    # 10 pairs with room and 10 under pressure: no metric may be called better or worse, in 20 of 20.
    for seed in range(20):
        rate = 12.0 if seed % 2 else 60.0  # 60 a second is more than the engine serves
        one, other = (
            record(tmp_path, load(1000 + 2 * seed + side, count=100, per_second=rate, output=12), blocks=201)
            for side in (0, 1)
        )
        comparison = against(one, other)
        assert not comparison.paired
        assert not [row.name for row in comparison.metrics if row.verdict in ("better", "worse")]
        assert comparison.verdict == "equal" or rate == 60.0


def test_the_same_requests_are_found_by_name_in_another_order(base):
    one, other = open_side(base), open_side(base)
    requests = other.recording.requests
    requests.arrival[:] = requests.arrival[::-1].copy()
    assert align(one, other)
    assert one.estimates["prompt_tokens"].top.tolist() == other.estimates["prompt_tokens"].top.tolist()
    # Without names only the order is left, and in it the prompts are others.
    requests.description[:] = [b""] * len(requests)
    assert not align(one, other)


def test_another_rate_is_another_load_and_no_regression(tmp_path):
    requests = load(5, per_second=12)
    comparison = against(record(tmp_path, requests), record(tmp_path, requests, speed=2.0))
    assert comparison.same_load is False
    assert not [row for row in comparison.metrics if row.verdict in ("better", "worse")]
    assert any("same load" in note for note in comparison.notes)


def test_another_version_is_the_first_drift(base, tmp_path):
    comparison = against(base, record(tmp_path, load(1, shared=100), version="0.33.0"))
    assert [(row.name, row.a, row.b) for row in comparison.drift] == [("engine_version", "0.32.0", "0.33.0")]
    assert comparison.verdict == "equal"


def test_the_verb_exits_1_on_a_regression_and_0_without(base, tmp_path, capsys):
    off = record(tmp_path, load(1, shared=100), caching=False)
    assert main(["compare", base, off, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert document["verdict"] == "worse"
    assert document["restore_flags"] == ["--enable-prefix-caching"]
    assert main(["compare", base, off, "--exit-zero"]) == 0
    assert "KVC404" in capsys.readouterr().out
    assert main(["compare", base, base]) == 0
    assert capsys.readouterr().out.startswith("no difference")


def test_repeats_of_the_first_run_widen_the_floor(base, tmp_path):
    slow = open_side(record(tmp_path, load(1, shared=100), caching=False))
    assert compare(open_side(base), slow).metric("ttft_seconds").verdict == "worse"
    comparison = compare(open_side(base), slow, repeats=[slow])
    ttft = comparison.metric("ttft_seconds")
    assert (ttft.floor_source, ttft.verdict) == ("measured", "inconclusive")
    assert ttft.floor == pytest.approx(ttft.difference)
    assert comparison.paired


def test_one_repeat_that_happens_to_agree_makes_no_regression_of_noise(base, tmp_path):
    busier = open_side(record(tmp_path, load(1, shared=100), speed=1.3))
    comparison = compare(open_side(base), busier, repeats=[open_side(base)])
    per_token = comparison.metric("tpot_seconds")
    # Slower for certain, and by less than the 5 % that are assumed for two runs of one engine.
    assert per_token.low > 0
    assert (per_token.floor_source, per_token.verdict) == ("assumed", "equal")

"""The arithmetic of comparisons, and results of vllm bench serve and metrics pages."""

from __future__ import annotations

import json
import statistics
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.analysis.compare import compare
from kvcatch.analysis.compare_drift import drift
from kvcatch.analysis.compare_sides import from_bench
from kvcatch.analysis.compare_stats import (
    Difference,
    Draws,
    Known,
    Noise,
    difference,
    noise_of,
    t_quantile,
    verdict,
)
from kvcatch.cli.compare import open_side
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    # printed tables of Student's t
    [
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 5, 2.571),
        (0.975, 15, 2.131),
        (0.995, 10, 3.169),
        (0.9995, 15, 4.073),
        (0.975, 1000, 1.962),
    ],
)
def test_quantiles_of_t_are_those_of_printed_tables(probability, freedom, expected):
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=0.01)


def test_two_runs_widen_the_floor_and_never_sharpen_it():
    noise = noise_of([-0.3], 2)
    assert noise.range == 0.3
    assert noise.floor(0.1) == 0.3
    assert noise.floor(0.5) == 0.5
    assert noise_of([0.0], 2).floor(0.5) == 0.5


def test_many_runs_that_agree_sharpen_the_floor():
    values = [1.00, 1.01, 0.99, 1.02, 0.98, 1.00]
    noise = noise_of([b - a for a, b in combinations(values, 2)], len(values))
    assert noise.range == pytest.approx(0.04)
    assert noise.bound == pytest.approx(2.571 * statistics.stdev(values) * 2**0.5, rel=1e-3)
    assert noise.floor(0.10) == noise.bound < 0.10


def test_noise_of_two_configurations_is_the_larger_in_each_number():
    assert Noise(0.3, 0.5).or_wider(Noise(0.1, 0.9)) == Noise(0.3, 0.9)
    assert Noise(0.3, 0.5).or_wider(None) == Noise(0.3, 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_two_runs_of_one_configuration_pass_their_floor_in_few_cases(seed):
    rng = np.random.default_rng(seed)
    for runs in (3, 6):
        passed = 0
        for _ in range(2000):
            *known, a, b = rng.normal(1.0, 0.1, runs + 2)
            passed += abs(a - b) > noise_of([y - x for x, y in combinations(known, 2)], runs).bound
        assert passed / 2000 == pytest.approx(0.05, abs=0.02)  # four standard errors of 2,000 tries at 5 %


def test_the_error_of_independent_draws_is_the_textbook_one():
    rng = np.random.default_rng(5)
    a, b = rng.normal(10, 2, 6400), rng.normal(10, 2, 6400)
    change = difference(Draws(a), Draws(b))
    assert change.error == pytest.approx(2 * np.sqrt(2 / 6400), rel=0.5)


def test_neighbours_that_move_together_widen_the_interval():
    rng = np.random.default_rng(6)
    steps = rng.normal(0, 1, 1600)
    walk = np.convolve(steps, np.ones(50), "valid")[:1500]
    alone = np.sort(walk)[rng.permutation(1500)]
    together = difference(Draws(walk), Known(0.0, 0.0)).error
    assert together > 3 * difference(Draws(alone), Known(0.0, 0.0)).error


def test_pairs_cancel_what_both_runs_share():
    rng = np.random.default_rng(7)
    a = rng.exponential(1, 200)
    loose = difference(Draws(a), Draws(a + 0.01))
    tight = difference(Draws(a), Draws(a + 0.01), paired=True)
    assert tight.error == pytest.approx(0, abs=1e-12)
    assert loose.error > 0.05


@pytest.mark.parametrize(
    ("value", "error", "better", "expected"),
    [
        (0.0, 0.001, "up", "equal"),
        (1.0, 0.05, "up", "better"),
        (1.0, 0.05, "down", "worse"),
        (-1.0, 0.05, "up", "worse"),
        (1.0, 0.05, "", "different"),
        (1.0, 2.0, "up", "inconclusive"),
        (0.05, 0.001, "up", "equal"),
        (1.0, None, "up", "inconclusive"),
    ],
)
def test_verdicts(value, error, better, expected):
    assert verdict(Difference(1.0, 1.0 + value, error, 1000), 0.05, 0.1, better) == expected


@settings(max_examples=25)
@given(st.lists(st.floats(0.001, 1000), min_size=40, max_size=80), st.floats(0.001, 1000))
def test_swapping_the_runs_turns_the_sign(values, shift):
    a, b = Draws(np.array(values)), Draws(np.array(values) + shift)
    one, other = difference(a, b, paired=True), difference(b, a, paired=True)
    assert one.value == pytest.approx(-other.value)
    assert one.error == pytest.approx(other.error, abs=1e-9)


def test_drift_names_the_flag_that_restores_the_old_value():
    a = EngineInfo(config={"scheduler": {"max_num_seqs": 256, "async_scheduling": False}, "cache": {"cache_dtype": "auto"}},
                   env={"VLLM_USE_V1": "1"})  # fmt: skip
    b = EngineInfo(config={"scheduler": {"max_num_seqs": 128, "async_scheduling": True}, "cache": {"cache_dtype": "fp8"}},
                   env={"VLLM_USE_V1": "0"})  # fmt: skip
    assert [row.restore for row in drift(a, b)] == [
        "--max-num-seqs 256",
        "--no-async-scheduling",
        "--kv-cache-dtype auto",
        "export VLLM_USE_V1=1",
    ]


def bench(scale=1.0, detailed=True):
    rng = np.random.default_rng(9)
    ttfts = (rng.gamma(4, 0.05, 400) * scale).tolist()
    result = {
        "model_id": "tiny", "completed": 400, "duration": 100.0, "request_rate": 4.0, "mean_ttft_ms": 1e3 * float(np.mean(ttfts)),
        "std_ttft_ms": 1e3 * float(np.std(ttfts)), "total_input_tokens": 40000, "total_output_tokens": 8000,
        "output_throughput": 80.0,
    }  # fmt: skip
    return {**result, "ttfts": ttfts} if detailed else result


def test_bench_results_with_and_without_single_requests():
    for detailed in (True, False):
        comparison = compare(from_bench("a", bench(detailed=detailed)), from_bench("b", bench(1.5, detailed)))
        assert comparison.metric("ttft_seconds").verdict == "worse"
        assert comparison.metric("ttft_seconds").relative_difference == pytest.approx(0.5)
        # One figure without spread says nothing about noise.
        assert comparison.metric("output_tokens_per_second").verdict == "inconclusive"


def test_a_bench_file_and_what_is_none(tmp_path, capsys):
    good, broken, other = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    good.write_text(json.dumps(bench()))
    broken.write_text('{"completed": 4')
    other.write_text('{"something": 1}')
    assert main(["compare", str(good), str(good)]) == 0
    assert "no setting differs" not in capsys.readouterr().out
    assert main(["compare", str(good), str(broken)]) == 2
    assert "not JSON" in capsys.readouterr().err
    assert main(["compare", str(good), str(other)]) == 2
    assert "mean_ttft_ms" in capsys.readouterr().err


PAGE = """# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} {preemptions}
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} 100000
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.5
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{blocks}",enable_prefix_caching="True"}} 1.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.5",model_name="m"}} 900
vllm:time_to_first_token_seconds_bucket{{engine="0",le="1.0",model_name="m"}} 1000
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} 1000
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} 1000
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} 300
"""


def test_pages_of_two_engines(tmp_path):
    a, b = tmp_path / "a.prom", tmp_path / "b.prom"
    a.write_text(PAGE.format(preemptions=20, hits=60000, blocks=1001))
    b.write_text(PAGE.format(preemptions=400, hits=20000, blocks=501))
    comparison = compare(open_side(str(a)), open_side(str(b)))
    said = {row.name: row.verdict for row in comparison.metrics}
    assert said["preemptions_per_request"] == "worse"  # 0.02 against 0.4
    assert said["hit_ratio"] == "worse"  # 60 % against 20 %
    assert said["kv_capacity_tokens"] == "worse"  # 16,000 against 8,000
    # Mean 0.3 s, spread 0.29 s, 1,000 each: a standard error of 13 ms cannot tell 5 % of 0.3 s.
    assert said["ttft_seconds"] == "inconclusive"
    assert {"KVC401", "KVC402", "KVC404"} <= {one.code for one in comparison.findings}
    assert ("cache.num_gpu_blocks", 1001, 501) in [(row.name, row.a, row.b) for row in comparison.drift]


def test_nothing_in_common_is_an_error(tmp_path):
    page = tmp_path / "a.prom"
    page.write_text(
        '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0",model_name="m"} 1\n'
    )
    with pytest.raises(KVCatchError, match="no metric in common"):
        compare(open_side(str(page)), from_bench("b", bench()))


def test_a_page_and_a_recording_of_one_engine_spell_their_settings_alike(tmp_path):
    # A label says "16" and "True" where a recording has 16 and True.
    page = tmp_path / "a.prom"
    page.write_text(PAGE.format(preemptions=20, hits=60000, blocks=1001))
    recorded = EngineInfo(
        engine="vllm",
        config={"cache": {"block_size": 16, "num_gpu_blocks": 1001, "enable_prefix_caching": True}},
    )
    assert [row.name for row in drift(open_side(str(page)).info, recorded)] == []

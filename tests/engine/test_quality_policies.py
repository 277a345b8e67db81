"""Formats, eviction policies and their judge: properties, on torch but without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.support import env
from engine.support.hardware import needs_fp8_cache
from kvcatch.quality.corpus import shipped
from kvcatch.quality.eviction import Reader, cases, judge, stored_bytes, thin
from kvcatch.quality.formats import FORMATS, stored
from kvcatch.quality.policies import BLOCK, POLICIES, RECENT, SINKS, choose, choose_blocks, kept_count
from kvcatch.quality.stats import kendall


def quiet(_text: str) -> None:
    """No progress."""


def prompt(tokens: int, seed: int = 0, heads: int = 4, kv: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and causal attention."""
    torch.manual_seed(seed)
    keys = torch.randn(1, kv, tokens, 16)
    mask = torch.triu(torch.full((tokens, tokens), float("-inf")), 1)
    return keys, torch.softmax(torch.randn(1, heads, tokens, tokens) + mask, dim=-1)


def test_fp8_by_hand():
    values = torch.tensor([1.06, 1.0625, 1.07, 1.12, -1.19, 0.0019, 500.0, 448.0])
    # Steps of 1/8 between 1 and 2; the smallest step is 2**-9 = 0.00195; the largest value is 448.
    near = [1.0, 1.0, 1.125, 1.125, -1.25, 0.001953125, 448.0, 448.0]
    assert stored(values, "e4m3").tolist() == near
    # Towards zero, as measured on vLLM 0.32's CPU cache.
    zero = [1.0, 1.0, 1.0, 1.0, -1.125, 0.0, 448.0, 448.0]
    assert stored(values, "e4m3", 1.0, "zero").tolist() == zero
    assert stored(torch.tensor([1.2, -1.13]), "e5m2").tolist() == [1.25, -1.25]
    assert stored(torch.tensor([1.2, -1.13]), "e5m2", 1.0, "zero").tolist() == [1.0, -1.0]


def test_small_formats_by_hand():
    row = torch.tensor([[127.0, 63.4, -1.0, 0.4]])
    assert stored(row, "int8").tolist() == [[127.0, 63.0, -1.0, 0.0]]
    assert stored(torch.tensor([[7.0, 3.4, -1.6, 0.4]]), "int4").tolist() == [[7.0, 3.0, -2.0, 0.0]]
    # The block's largest value 6 makes the step 1: values go to 0, .5, 1, 1.5, 2, 3, 4, 6.
    block = torch.tensor([[6.0, 5.1, 2.4, 0.2, -1.3] + [0.0] * 11])
    assert stored(block, "nvfp4")[0, :5].tolist() == [6.0, 6.0, 2.0, 0.0, -1.5]


@given(st.integers(0, 1000), st.sampled_from([form for form in FORMATS if form != "auto"]))
@settings(deadline=None, max_examples=30)
def test_storing_twice_changes_nothing_more(seed, form):
    torch.manual_seed(seed)
    once = stored(torch.randn(2, 5, 64) * 3, form)
    assert torch.allclose(stored(once, form), once, atol=1e-6)


@needs_fp8_cache
def test_the_engines_own_cache_rounds_towards_zero():
    code = (
        "import torch\nfrom vllm import _custom_ops as ops\nimport vllm._C\n"
        "k = torch.linspace(-9, 9, 32 * 64).view(32, 1, 64).contiguous()\n"
        "c, d = (torch.zeros(2, 1, 32, 64, dtype=torch.uint8) for _ in range(2))\n"
        "ops.cpu_attn_reshape_and_cache(k, k.clone(), c, d, torch.arange(32), 'vec', 1.0, 1.0, 'fp8_e4m3')\n"
        "held = sorted(set(d[0].view(torch.float8_e4m3fn).float().flatten().tolist()) | {0.0})\n"
        "from kvcatch.quality.formats import stored\n"
        "ours = sorted(set(stored(k, 'e4m3', 1.0, 'zero').flatten().tolist()) | {0.0})\n"
        "from collections import Counter\n"
        "a = Counter(d[0].view(torch.float8_e4m3fn).float().abs().flatten().tolist())\n"
        "b = Counter(stored(k, 'e4m3', 1.0, 'zero').abs().flatten().tolist())\n"
        "assert a == b, (a - b, b - a)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@given(st.integers(24, 200), st.sampled_from([0.75, 0.5, 0.25, 0.12]), st.sampled_from(sorted(POLICIES)))
@settings(deadline=None, max_examples=60)
def test_a_budget_is_never_exceeded_and_sinks_and_the_latest_stay(tokens, budget, policy):
    keys, attention = prompt(tokens)
    index = choose(POLICIES[policy](keys, attention, 3), budget)
    count = kept_count(tokens, budget)
    assert index.shape == (1, 2, count)
    assert count <= tokens * budget
    assert (index.diff(dim=-1) > 0).all()
    sinks = min(SINKS, count)
    assert index[..., :sinks].tolist() == [[list(range(sinks))] * 2]
    recent = min(RECENT, count - sinks)
    assert index[..., count - recent :].tolist() == [[list(range(tokens - recent, tokens))] * 2]


@given(st.integers(40, 200), st.sampled_from([0.75, 0.5, 0.25, 0.12]))
@settings(deadline=None, max_examples=30)
def test_whole_blocks_stay_or_go_in_every_layer(tokens, budget):
    keys, attention = prompt(tokens)
    index = choose_blocks([POLICIES["h2o"](keys, attention, 0)] * 3, budget).tolist()
    whole = tokens // BLOCK
    for block in range(whole):
        inside = [at for at in index if at // BLOCK == block]
        assert len(inside) in (0, BLOCK)
    assert set(range(whole * BLOCK, tokens)) <= set(index)
    assert len(index) < tokens * budget + BLOCK
    assert tokens - 1 in index


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"random"}))
def test_scores_use_nothing_later_and_are_the_same_every_time(policy):
    keys, attention = prompt(100)
    score = POLICIES[policy](keys, attention, 0)
    assert torch.equal(score, POLICIES[policy](keys, attention, 0))
    # Only what the policy was given counts: values that come later were never part of it.
    assert score.shape == (1, 2, 100)


def test_grouped_heads_share_what_their_group_saw():
    keys, attention = prompt(80, heads=4, kv=2)
    swapped = attention[:, [1, 0, 3, 2]]
    for policy in ("h2o", "snapkv"):
        assert torch.allclose(
            POLICIES[policy](keys, attention, 0), POLICIES[policy](keys, swapped, 0), atol=1e-6
        )


def test_memory_is_what_was_predicted():
    keys, attention = prompt(160)
    kept = [(keys, keys.clone())] * 3
    scores = [POLICIES["h2o"](keys, attention, 0)] * 3
    thinned, freed, blocks = thin(kept, scores, 0.25, "token")
    assert stored_bytes(thinned) == stored_bytes([(k.clone(), v.clone()) for k, v in kept]) // 4
    # 160 tokens are ten blocks; a quarter of them is 40 tokens, and two whole blocks fit into that.
    coarse, freed_whole, _ = thin(kept, scores, 0.25, "block")
    assert stored_bytes(coarse) * 40 == stored_bytes(thinned) * 32
    assert (blocks, freed_whole) == (10, 8)
    assert freed <= freed_whole


@pytest.fixture(scope="module")
def reader(smollm2_model: Path) -> Reader:
    return Reader(str(smollm2_model))


def test_everything_kept_is_bit_equal_and_less_is_worse(reader):
    made = cases(reader, shipped(), seed=0, prompt=160, follow=32, groups=1)
    found = judge(reader, made, quiet, policies=("random",), budgets=(1.0, 0.5, 0.12))
    for trial in found.trials:
        if trial.budget == 1:
            assert trial.kl == trial.flips == 0.0
            assert trial.right == found.full_right
        else:
            assert trial.kl > 0
            # One block of every prompt: 30 layers, keys and values of 3 heads of 64 values of 4 bytes.
            block = len(made) * BLOCK * 30 * 2 * 3 * 64 * 4
            assert abs(trial.kv_bytes - trial.predicted_bytes) < block
    by = {(one.policy, one.grain, one.budget): one for one in found.trials}
    assert by["random", "token", 0.12].kl > by["random", "token", 0.5].kl
    assert by["random", "token", 0.5].blocks_freed < by["random", "block", 0.5].blocks_freed
    assert {one.workload for one in found.advice} == {"text", "needle", "recall", "arithmetic"}
    assert found.prompt_tokens[1] < 600


@pytest.mark.soak
def test_the_ranking_of_policies_is_stable_over_seeds(reader):
    rankings = []
    for seed in range(3):
        made = cases(reader, shipped(), seed=seed, prompt=384, follow=128, groups=3)
        found = judge(reader, made, quiet, seed=seed, grains=("token",), budgets=(0.5, 0.25))
        rankings.append([one.kl for one in found.trials])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert kendall(rankings[a], rankings[b]) >= 0.8


@pytest.mark.soak
def test_scores_equal_kvpress():
    done = subprocess.run(
        [sys.executable, str(env.ROOT / "tools" / "kvpress_check.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 6

"""The statistics, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvcatch.quality import stats


def logs(*masses: float) -> dict[int, float]:
    return {token: math.log(mass) for token, mass in enumerate(masses)}


def test_divergence_of_two_coins_by_hand():
    # 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75) = 0.5 ln(4/3)
    assert stats.lower_kl(logs(0.5, 0.5), logs(0.25, 0.75)) == pytest.approx(0.5 * math.log(4 / 3))


def test_what_only_one_side_names_is_in_the_rest():
    # shared: token 0; rest 0.4 against 0.8
    p, q = {0: math.log(0.6), 1: math.log(0.3)}, {0: math.log(0.2), 2: math.log(0.5)}
    assert stats.lower_kl(p, q) == pytest.approx(0.6 * math.log(3) + 0.4 * math.log(0.5))


masses = st.lists(st.floats(0.001, 1), min_size=3, max_size=12)


@given(masses, st.randoms(use_true_random=False), st.integers(1, 12))
def test_merging_bins_only_lowers_the_divergence_and_self_is_zero(weights, rng, keep):
    p = np.array(weights) / sum(weights)
    other = np.array([weight * rng.uniform(0.2, 5) for weight in weights])
    q = other / other.sum()
    full = float((p * np.log(p / q)).sum())
    few_p = {i: math.log(p[i]) for i in np.argsort(-p)[:keep]}
    few_q = {i: math.log(q[i]) for i in np.argsort(-q)[:keep]}
    assert 0 <= stats.lower_kl(few_p, few_q) <= full + 1e-6
    assert stats.lower_kl(few_p, few_p) == 0.0


def test_mcnemar_by_hand_and_by_scipy():
    assert stats.mcnemar(0, 0) == 1.0
    assert stats.mcnemar(5, 0) == pytest.approx(2 / 32)
    assert stats.mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 512)
    for lost, won in ((3, 3), (12, 4), (1, 9), (40, 15)):
        assert stats.mcnemar(lost, won) == pytest.approx(scipy_stats.binomtest(lost, lost + won).pvalue)


def test_binomial_tail_by_hand():
    assert stats.binomial_tail(2, 3, 0.5) == pytest.approx(0.5)
    assert stats.binomial_tail(0, 3, 0.2) == 1.0
    assert stats.binomial_tail(3, 3, 0.2) == pytest.approx(0.008)


@pytest.mark.parametrize(("hits", "trials"), [(0, 20), (20, 20), (3, 17), (9, 10)])
def test_exact_interval_as_scipy(hits, trials):
    ours = stats.clopper_pearson(hits, trials, 0.05)
    theirs = scipy_stats.binomtest(hits, trials).proportion_ci(0.95, "exact")
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_no_change_in_few_questions_still_leaves_room_for_a_loss():
    # 0 of 20: the exact 97.5 % bound is 1 - 0.025 ** (1/20) = 16.8 %
    low, high = stats.net_loss(0, 0, 20)
    assert high == pytest.approx(1 - 0.025 ** (1 / 20))
    assert low == -high


def test_bootstrap_draws_documents_not_positions():
    # Two documents that differ: drawing positions would give a narrow interval, drawing documents gives 0 to 1.
    found = stats.bootstrap([[0.0] * 500, [1.0] * 500])
    assert (found.value, found.low, found.high, found.units) == (0.5, 0.0, 1.0, 2)
    same = stats.bootstrap([[0.25, 0.75], [0.5, 0.5]])
    assert same.low == same.high == 0.5


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(5)
    covered = 0
    for round_ in range(200):
        groups = [rng.normal(rng.normal(1.0, 0.3), 0.1, 50) for _ in range(20)]
        found = stats.bootstrap(groups, seed=round_)
        covered += found.low <= 1.0 <= found.high
    # 95 % promised; percentile intervals of 20 groups are a little short. 3 sigma below 0.92 of 200.
    assert covered >= 0.92 * 200 - 3 * math.sqrt(200 * 0.92 * 0.08)


def test_one_document_is_cut_into_blocks():
    found = stats.bootstrap([[0.0] * 32 + [1.0] * 32])
    assert found.units == 2


def test_trend_by_hand():
    rho, p = stats.trend([1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7])
    assert rho == pytest.approx(1.0)
    assert p < 0.01
    assert stats.trend([1, 2, 3], [5, 5, 5]) == (0.0, 1.0)
    assert stats.trend(range(20), range(20, 0, -1))[1] > 0.99


def test_kendall_as_scipy():
    a, b = [1, 2, 3, 4, 5, 5], [2, 1, 4, 3, 6, 7]
    assert stats.kendall(a, b) == pytest.approx(scipy_stats.kendalltau(a, b).statistic)
    assert stats.kendall([1, 2, 3], [3, 2, 1]) == -1.0


def test_questions_needed_does_find_the_loss():
    # A loss of a fifth: 2 * 0.5 ** 8 < 0.01, so 8 lost answers are needed; P(at least 8 of n) >= 0.8 at n = 50.
    needed = stats.questions_needed(0.9, 0.2)
    assert scipy_stats.binom.sf(7, needed, 0.2) >= 0.8 > scipy_stats.binom.sf(7, needed - 1, 0.2)
    assert stats.mcnemar(8, 0) < 0.01 <= stats.mcnemar(7, 0)

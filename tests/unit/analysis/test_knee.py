"""The breakpoint of hinges that were made with a known one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.analysis.knee import find_knee, kneedle, slow_from

AT = 0.60


def hinge(
    seed: int, end: float = 0.99, noise: float = 0.15, count: int = 400
) -> tuple[np.ndarray, np.ndarray]:
    """Log slowdown that is flat up to 0.6 of demand and then rises by 4 a unit."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.05, end, count)
    return x, 0.1 * x + 4 * np.maximum(0, x - AT) + rng.normal(0, noise, count)


def test_the_mean_error_on_synthetic_hinges_is_at_most_two_hundredths() -> None:
    errors = [abs((find_knee(*hinge(seed)).value or 9) - AT) for seed in range(40)]
    assert np.mean(errors) <= 0.02
    assert max(errors) <= 0.05


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    found = [find_knee(*hinge(seed)) for seed in range(40)]
    inside = sum((knee.low or 9) <= AT <= (knee.high or 0) for knee in found)
    assert inside >= 34  # 38 expected, 34 or fewer in 1 of 40 times


def test_the_end_of_the_sweep_does_not_move_the_answer() -> None:
    """Where the normalised curve's knee moves by tenths (governance, M/M/1: 0.57 to 0.89)."""
    moved = []
    for seed in range(20):
        short, long = find_knee(*hinge(seed, 0.80)), find_knee(*hinge(seed, 0.99))
        assert short.value is not None
        assert long.value is not None
        moved.append(abs(short.value - long.value))
    assert np.mean(moved) <= 0.03


def test_a_straight_line_has_none() -> None:
    """One breakpoint is one more chance to fit noise: at most one false knee in a hundred."""
    false = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        x = rng.uniform(0, 1, 300)
        false += find_knee(x, 1.5 * x + rng.normal(0, 0.3, 300)).value is not None
    assert false <= 1


def test_a_bend_downwards_is_no_knee() -> None:
    x, y = hinge(1)
    assert find_knee(x, -y).value is None


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.floats(-3, 3), st.floats(0.1, 5))
def test_units_of_latency_and_order_do_not_matter(seed: int, shift: float, scale: float) -> None:
    x, y = hinge(seed % 7)
    base = find_knee(x, y)
    # Seconds or milliseconds shift the logarithm; another base of it scales.
    other = find_knee(x, scale * y + shift)
    assert base.value is not None
    assert other.value == pytest.approx(base.value, abs=1e-6)
    order = np.random.default_rng(seed).permutation(len(x))
    assert find_knee(x[order], y[order]).value == pytest.approx(base.value, abs=1e-9)


def test_fewer_observations_widen_the_interval() -> None:
    def width(count: int) -> float:
        widths = []
        for seed in range(8):
            knee = find_knee(*hinge(seed, count=count))
            widths.append((knee.high or 0) - (knee.low or 0))
        return float(np.mean(widths))

    assert width(100) > 1.5 * width(800)


def test_too_few_or_no_spread_give_no_knee() -> None:
    for count in (0, 1, 20):
        assert find_knee(np.linspace(0, 1, count), np.zeros(count)).value is None
    assert find_knee(np.full(100, 0.5), np.arange(100.0)).value is None


def test_the_second_opinions() -> None:
    x = np.linspace(0.01, 1.2, 600)
    slowdown = np.exp(6 * np.maximum(0, x - 0.8))
    slow = slow_from(x, slowdown)
    assert slow == pytest.approx(0.8 + np.log(2) / 6, abs=0.05)
    assert slow_from(x[x < 0.8], slowdown[x < 0.8]) is None
    # A single burst below the bend is no line.
    burst = slowdown.copy()
    burst[100:104] = 50
    assert slow_from(x, burst) == pytest.approx(slow, abs=0.05)
    # Where the curve is as steep as its chord: 6 exp(6 (x - 0.8)) = (exp(2.4) - 1) / 1.19.
    assert kneedle(x, slowdown) == pytest.approx(0.8 + np.log((np.exp(2.4) - 1) / 1.19 / 6) / 6, abs=0.05)
    assert kneedle(x[:20], slowdown[:20]) is None

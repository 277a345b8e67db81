"""The output-length bound: strict until it knows, then a quantile of those that got this far."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.policy.lengths import ENOUGH, WINDOW, OutputLengths


def test_strict_always_plans_max_tokens() -> None:
    lengths = OutputLengths(None)
    for _ in range(500):
        lengths.observe("a", 100, 5)
    assert lengths.bound("a", 100, 3, 800) == 800


def test_fifty_samples_of_the_same_tenant_and_bucket_are_needed() -> None:
    lengths = OutputLengths(0.9)
    for i in range(ENOUGH - 1):
        lengths.observe("a", 100, i + 1)
    assert lengths.bound("a", 100, 0, 800) == 800
    lengths.observe("a", 100, 50)
    assert lengths.bound("a", 100, 0, 800) == 46  # the 46th of 1..50: 90 % of 50 samples lie below it
    assert lengths.bound("b", 100, 0, 800) == 800
    assert lengths.bound("a", 5000, 0, 800) == 800


def test_bound_is_conditional_on_what_was_generated() -> None:
    lengths = OutputLengths(0.5)
    for _ in range(60):
        lengths.observe("", 100, 10)
    for _ in range(30):
        lengths.observe("", 100, 500)
    assert lengths.bound("", 100, 0, 4000) == 10
    assert lengths.bound("", 100, 10, 4000) == 500  # it outlived the short ones
    assert lengths.bound("", 100, 500, 4000) == 4000  # and the long ones: no evidence, be strict


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 400), min_size=60, max_size=700), st.integers(0, 300), st.integers(1, 300))
def test_bound_matches_numpy_on_the_window_and_never_leaves_its_range(
    samples: list[int], generated: int, more: int
) -> None:
    lengths = OutputLengths(0.9)
    for sample in samples:
        lengths.observe("t", 700, sample)
    max_tokens = generated + more
    bound = lengths.bound("t", 700, generated, max_tokens)
    assert generated + 1 <= bound <= max_tokens
    longer = [s for s in samples[-WINDOW:] if s > generated]
    if len(longer) >= 10:
        expected = np.sort(longer)[min(len(longer) - 1, int(0.9 * len(longer)))]
        assert bound == min(max_tokens, expected)


def test_memory_is_bounded() -> None:
    lengths = OutputLengths(0.9)
    for i in range(5000):
        lengths.observe(f"tenant{i}", 100, 10)
    assert len(lengths._recent) == len(lengths._sorted) == 1024

"""Binning keeps peaks and never invents values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.analysis.rates import binned_max, peak, utilization


def test_bins_take_the_maximum_and_carry_states_not_events():
    times, values = np.array([5, 15, 16, 40]), np.array([1.0, 3.0, 2.0, 9.0])
    assert binned_max(times, values, 0, 50, 5) == [1.0, 3.0, None, None, 9.0]
    assert binned_max(times, values, 0, 50, 5, carry=True) == [1.0, 3.0, 2.0, 2.0, 9.0]
    assert binned_max(times, values, 30, 50, 2, carry=True) == [2.0, 9.0]
    assert binned_max(np.array([], dtype=np.int64), np.array([]), 0, 10, 2, carry=True) == [None, None]


@given(
    st.lists(st.tuples(st.integers(0, 999), st.floats(0, 1e6)), min_size=1, max_size=50), st.integers(1, 40)
)
def test_the_overall_peak_survives_any_number_of_bins(points, bins):
    times, values = np.array([when for when, _ in points]), np.array([value for _, value in points])
    curve = binned_max(times, values, 0, 1000, bins)
    assert len(curve) == bins
    assert max(value for value in curve if value is not None) == values.max()


def test_unknown_values_are_left_out():
    assert binned_max(np.array([1, 2]), np.array([np.nan, 4.0]), 0, 10, 1) == [4.0]
    assert peak({"running": np.array([1, 7, 3])}, "running") == 7
    assert peak({"running": np.array([])}, "running") is None
    assert peak({}, "running") is None
    assert peak({"running": np.array([1]), "running_max": np.array([5])}, "running") == 5
    assert list(utilization({"active_blocks": np.array([5]), "active_max": np.array([15])}, 20)) == [0.75]
    assert list(utilization({"active_blocks": np.array([5, 10])}, 20)) == [0.25, 0.5]
    assert len(utilization({"active_blocks": np.array([5])}, 0)) == 0

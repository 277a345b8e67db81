"""Curves of future blocks: what a ledger in Redis adds up, against the exact peak."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.gateway.curve import EDGES, MARGIN, SLOTS, demand_curve
from kvcatch.gateway.ledger import Entry, Ledger, plus
from kvcatch.policy.blocks import BlockTable
from kvcatch.policy.demand import Demand, peak

LAYOUT = BlockTable.uniform(16, 1 << 14)

requests = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, MARGIN), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@given(requests)
def test_curves_of_any_split_say_at_least_the_exact_peak_after_any_progress(rows):
    """held, steps, progress since it was announced, and which of four gateways announced it."""
    total = np.zeros(SLOTS, dtype=np.int64)
    now = []
    for gateway in range(4):
        own = [(held, held + steps, steps) for held, steps, _, who in rows if who == gateway]
        if own:
            columns = (np.array(column, dtype=np.int64) for column in zip(*own, strict=True))
            held_, total_, steps_ = columns
            total += demand_curve(held_, total_, steps_, np.ones_like(held_), LAYOUT)
    for held, steps, progress, _ in rows:
        moved = min(progress, steps)
        now.append(Demand(held + moved, held + steps, steps - moved))
    exact = peak(now, LAYOUT)
    assert int(total.max()) >= exact
    # And never more than everybody at full size at once.
    assert int(total.max()) <= sum(-(-(held + steps) // 16) for held, steps, _, _ in rows)


def test_one_slot_by_hand():
    # 100 tokens now, 40 steps to go: 7 blocks now, ceil(140 / 16) = 9 in the end. Slot 0 ends after step 15,
    # and 32 steps of progress more: 147 > 140 tokens, so 9; it may be there at step 32 but not at step 48.
    curve = demand_curve(*(np.array([n]) for n in (100, 140, 40, 1)), LAYOUT)
    assert EDGES[:4].tolist() == [0, 16, 32, 48]
    assert curve[:4].tolist() == [9, 9, 9, 0]
    # 1000 steps to go: slot 0 says ceil((100 + 15 + 32) / 16) = 10 blocks.
    curve = demand_curve(*(np.array([n]) for n in (100, 1100, 1000, 2)), LAYOUT)
    assert curve[0] == 20
    assert curve.max() == 2 * 69


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(0, 300)), min_size=2, max_size=8)
)
def test_the_ledgers_curve_covers_what_its_own_peak_says_later(rows):
    """Also for a request that has outgrown its plan."""
    ledger = Ledger(LAYOUT, 10_000, 0.0)
    for number, (prompt, planned, produced) in enumerate(rows):
        one = Entry(f"k{number}", "", (prompt,), 1, planned + 400, planned, produced=produced)
        ledger.size(one)
        ledger.add(one)
    curve = ledger.curve(ledger.entries.values())
    assert ledger.peak_with(None) <= curve.max()
    for number, one in enumerate(ledger.entries.values()):
        one.produced = min((one.produced or 0) + (number * 13) % (MARGIN + 1), one.strict)
    assert ledger.peak_with(None) <= curve.max()


def test_curves_of_different_lengths_add():
    assert plus(np.array([1, 2]), np.array([1, 1, 1])).tolist() == [2, 3, 1]

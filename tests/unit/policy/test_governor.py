"""The promises of the policy, on a toy engine: no overflow in strict mode, no starvation, nobody lost."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcatch.policy import governor as why
from kvcatch.policy.settings import Settings
from unit.policy.toy import Ask, Toy


@st.composite
def workloads(draw: st.DrawFn, exact: bool) -> list[Ask]:
    asks = []
    for _ in range(draw(st.integers(1, 25))):
        prompt = draw(st.one_of(st.integers(1, 12), st.integers(30, 60)))
        most = draw(st.integers(1, 30))
        output = most if exact else draw(st.integers(1, most))
        asks.append(Ask(draw(st.integers(1, 60)), prompt, most, output))
    return asks


@given(workloads(exact=False), st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=400, derandomize=True)
def test_strict_mode_never_needs_a_preemption_and_loses_nobody(asks: list[Ask], safe: float) -> None:
    toy = Toy(asks, Settings(safe_utilization=safe)).run()
    assert toy.overflow == 0
    assert toy.foreign == 0  # every block in use is explained by a plan
    assert set(toy.started) == set(toy.ended) == {str(i) for i in range(len(asks))}
    assert not toy.governor.running
    assert len(toy.governor.line) == 0
    assert all(toy.governor.timeline.at(toy.step + k) == 0 for k in range(100))


#: a backfilled request that takes one token of every step makes the head's prefill one step longer than its place
ONE_MORE_DECODE = [
    Ask(1, 1, 1, 1), Ask(10, 1, 7, 7), Ask(13, 57, 1, 1), Ask(6, 1, 13, 13), Ask(13, 5, 9, 9), Ask(16, 1, 4, 4),
    Ask(5, 8, 17, 17),
]  # fmt: skip


@given(workloads(exact=True))
@example(ONE_MORE_DECODE)
@settings(deadline=None, max_examples=400, derandomize=True)
def test_a_blocked_head_starts_no_later_than_promised_when_it_became_head(asks: list[Ask]) -> None:
    toy = Toy(asks, Settings()).run()
    for name, promised in toy.promised.items():
        # A step whose token budget is used up before the queue is asked cannot start anybody.
        excused = sum(promised <= step < toy.started[name] for step in toy.starved)
        assert toy.started[name] <= promised + excused


@given(workloads(exact=False))
@settings(deadline=None, max_examples=60)
def test_backfill_without_peak_check_still_finishes_everything(asks: list[Ask]) -> None:
    toy = Toy(asks, Settings(mode="backfill"), usable=60).run()
    assert set(toy.ended) == {str(i) for i in range(len(asks))}


def flood(shorts: int) -> list[Ask]:
    """One long request among endless shorts that alone would keep the pool full."""
    return [Ask(30, 60, 10, 10), *(Ask(1 + i, 8, 12, 12) for i in range(shorts))]


def test_a_flood_of_shorts_cannot_starve_a_long_request() -> None:
    toy = Toy(flood(600), Settings()).run()
    # Before it arrives about 8 shorts hold the pool; the last of them ends 12 steps later. Behind it the queue
    # grows for 570 more steps: skip-ahead would start it after the flood.
    assert toy.started["0"] - 30 < 60
    assert why.BACKFILLED in toy.reasons


def test_the_guard_bounds_the_wait_when_bounds_are_lies() -> None:
    """Shorts that announce 1 token and generate 60: every shadow is wrong, the guard is what is left."""
    asks = [Ask(5, 60, 5, 5), *(Ask(1 + i, 4, 1, 60) for i in range(300))]
    settings = Settings(max_wait=1.0, mode="backfill")
    toy = Toy(asks, settings, usable=40, seconds_per_step=0.02).run()
    # 1 s = 50 steps until nothing passes, then the longest running request (60 more steps) and a margin.
    assert toy.started["0"] - 5 <= 50 + 60 + 20


def test_a_small_bypass_limit_stops_passing() -> None:
    asks = [Ask(1, 40, 30, 30), Ask(2, 60, 10, 10), *(Ask(3 + i, 2, 2, 2) for i in range(60))]
    toy = Toy(asks, Settings(max_bypass=3)).run()
    passed = [name for name in toy.started if name not in ("0", "1") and toy.started[name] < toy.started["1"]]
    assert len(passed) == 3


def test_below_the_safe_utilisation_arrival_order_is_kept_and_above_it_shorts_go_first() -> None:
    asks = [Ask(1, 4, 20, 20), Ask(2, 40, 4, 4), Ask(2, 4, 4, 4)]
    # Running: 2 blocks of 24. The long head needs 10 more: 12/24 = 0.5. A budget of 8 lets one start a step.
    below = Toy(asks, Settings(safe_utilization=0.6), budget=8).run()
    above = Toy(asks, Settings(safe_utilization=0.4), budget=8).run()
    assert list(below.started) == ["0", "1", "2"]
    assert list(above.started) == ["0", "2", "1"]
    assert why.SHORT_FIRST in above.reasons
    assert set(below.reasons) == {why.ALONE, why.IN_ORDER}


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_quantile_bound_lets_more_run_at_once_than_strict(quantile: float) -> None:
    asks = [Ask(1 + i, 8, 60, 6) for i in range(200)]
    strict = Toy(asks, Settings()).run()
    balanced = Toy(asks, Settings(quantile=quantile)).run()
    assert balanced.step < 0.75 * strict.step
    assert balanced.overflow == 0  # all outputs are alike: the quantile is right

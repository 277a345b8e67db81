"""Peak and shadow against step-by-step simulation, and the fast timeline against both."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.policy.blocks import BlockTable
from kvcatch.policy.demand import Demand, peak, shadow
from kvcatch.policy.timeline import Plan, Timeline

BLOCK = 4
TABLE = BlockTable.uniform(BLOCK, 64)


@st.composite
def demands(draw: st.DrawFn, most: int = 6) -> list[Demand]:
    found = []
    for _ in range(draw(st.integers(0, most))):
        held = draw(st.integers(1, 20))
        total = held + draw(st.integers(0, 20))
        found.append(Demand(held, total, total - held + draw(st.integers(0, 4))))
    return found


def simulated(requests: list[Demand]) -> list[int]:
    """Blocks in use at every step: grow by a token until the bound, leave when the steps are over."""
    used = []
    for step in range(64):
        alive = [r for r in requests if step <= r.steps]
        used.append(sum(-(-min(r.held + step, r.total) // BLOCK) for r in alive))
    return used


def plan(demand: Demand, start: int) -> Plan:
    return Plan(start, demand.held, demand.total, demand.steps - (demand.total - demand.held))


@settings(deadline=None, max_examples=50)
@given(demands())
def test_peak_is_the_maximum_of_a_step_by_step_simulation(requests: list[Demand]) -> None:
    assert peak(requests, TABLE) == max(simulated(requests))


def test_peak_of_two_requests_by_hand() -> None:
    # Blocks of 4. A holds 4 tokens and leaves after 2 more steps with 6 (2 blocks); B holds 5 and leaves after
    # 7 steps with 12 (3 blocks). At A's last step B has 7 tokens (2 blocks): 4. At B's last step: 3.
    assert peak([Demand(4, 6, 2), Demand(5, 12, 7)], TABLE) == 4


@settings(deadline=None, max_examples=50)
@given(demands(), demands(most=1).filter(bool), st.integers(1, 40))
def test_shadow_is_the_first_step_at_which_a_simulated_start_never_overflows(
    running: list[Demand], heads: list[Demand], limit: int
) -> None:
    head = heads[0]
    alone = simulated([head])
    used = simulated(running) + [0] * 64

    def fits(start: int) -> bool:
        return all(used[start + k] + alone[k] <= limit for k in range(head.steps + 1))

    expected = next((start for start in range(60) if fits(start)), None)
    found = shadow(running, head, TABLE, limit)
    assert (None if found is None else found.steps) == expected


@settings(deadline=None, max_examples=50)
@given(demands(), st.integers(0, 9000), st.lists(st.integers(0, 5), max_size=3))
def test_timeline_equals_the_reference_sum_at_every_step(
    requests: list[Demand], start: int, dropped: list[int]
) -> None:
    line = Timeline(TABLE)
    line.advance(max(0, start - 10))
    plans = [plan(r, start) for r in requests]
    for each in plans:
        line.add(each)
    gone = {i for i in dropped if i < len(plans)}
    for i in gone:
        line.add(plans[i], -1)
    kept = [r for i, r in enumerate(requests) if i not in gone]
    assert [line.at(start + step) for step in range(64)] == simulated(kept)


@settings(deadline=None, max_examples=50)
@given(demands(), demands(most=1).filter(bool), st.integers(0, 5000))
def test_peak_with_equals_the_reference_peak_of_running_and_candidate(
    running: list[Demand], heads: list[Demand], start: int
) -> None:
    head = heads[0]
    line = Timeline(TABLE)
    for r in running:
        line.add(plan(r, start))
    together = [a + b for a, b in zip(simulated(running), simulated([head]), strict=True)]
    assert line.peak_with(plan(head, start)) == max(together[: head.steps + 1])


@settings(deadline=None, max_examples=50)
@given(demands(), demands(most=1).filter(bool), st.integers(1, 40), st.integers(0, 5000))
def test_timeline_shadow_equals_the_reference(
    running: list[Demand], heads: list[Demand], limit: int, start: int
) -> None:
    line = Timeline(TABLE)
    for r in running:
        line.add(plan(r, start))
    expected = shadow(running, heads[0], TABLE, limit)
    found = line.shadow(plan(heads[0], start), limit)
    assert (None if found is None else found - start) == (None if expected is None else expected.steps)


@settings(deadline=None, max_examples=50)
@given(demands(), st.integers(2, 7), st.integers(0, 300))
def test_wider_slots_never_count_too_little(requests: list[Demand], width: int, start: int) -> None:
    line = Timeline(TABLE, width)
    for r in requests:
        line.add(plan(r, start))
    for step, used in enumerate(simulated(requests)):
        assert line.at(start + step) >= used


@settings(deadline=None, max_examples=50)
@given(demands())
def test_credit_and_flat_plans_leave_nothing_behind(requests: list[Demand]) -> None:
    line = Timeline(TABLE)
    plans = [plan(r, 3) for r in requests]
    for i, each in enumerate(plans):
        if i % 2:
            each.flat = True
        else:
            each.credit = np.ones(each.end - each.start + 1, dtype=np.int64)
        line.add(each)
    for each in plans:
        line.add(each, -1)
    assert all(line.at(step) == 0 for step in range(80))


def test_table_asks_the_engine_once_per_block() -> None:
    asked: list[int] = []

    def count(tokens: int) -> int:
        asked.append(tokens)
        return -(-tokens // 16) + min(3, -(-tokens // 16))  # full attention beside a window of 3 blocks

    table = BlockTable.sampled(count, 16, 100)
    assert [table[n] for n in (0, 1, 16, 17, 48, 49, 100)] == [0, 2, 2, 4, 6, 7, 10]
    assert len(asked) == 7

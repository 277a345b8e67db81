"""Victim choice: what it costs to compute again against what is freed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.policy.eviction import EVICTIONS, Newest, PriorityPosition, RecomputeLoss, Runner, victims


def runner(name: str, **fields: int) -> Runner:
    base = {
        "priority": 0, "position": 0, "held_blocks": 10, "freed_blocks": 10, "computed_tokens": 100,
        "recompute_tokens": 100, "remaining_tokens": 100, "preemptions": 0,
    }  # fmt: skip
    return Runner(name, **{**base, **fields})


def test_least_recompute_per_freed_block_goes_first() -> None:
    # 100 tokens for 10 blocks = 10 a block; 90 tokens for 3 blocks (7 are shared) = 30 a block.
    views = [runner("shared", freed_blocks=3, recompute_tokens=90), runner("own", position=1)]
    assert victims(RecomputeLoss(), views, 1) == ["own"]


def test_nearly_finished_and_often_preempted_are_spared_while_there_is_a_choice() -> None:
    views = [
        runner("twice", preemptions=2, recompute_tokens=1),
        runner("done", remaining_tokens=3, recompute_tokens=1),
        runner("fair"),
    ]
    assert victims(RecomputeLoss(), views, 1) == ["fair"]
    assert victims(RecomputeLoss(), views, 25) == ["fair", "done"]  # never the last one


def test_priority_before_position() -> None:
    views = [runner("vip", priority=0, position=9), runner("batch", priority=5, position=0)]
    assert victims(PriorityPosition(), views, 1) == ["batch"]
    equals = [runner("old", position=0), runner("young", position=1)]
    assert victims(PriorityPosition(), equals, 1) == ["young"]
    assert victims(Newest(), equals, 1) == ["young"]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 2000)), min_size=1, max_size=20), st.integers(0, 99)
)
def test_enough_is_freed_or_all_but_one_are_chosen(rows: list[tuple[int, int]], needed: int) -> None:
    views = [
        runner(str(i), position=i, freed_blocks=freed, recompute_tokens=loss)
        for i, (freed, loss) in enumerate(rows)
    ]
    for policy in EVICTIONS.values():
        chosen = victims(policy(), views, needed)
        freed = sum(views[int(name)].freed_blocks for name in chosen)
        assert len(set(chosen)) == len(chosen)
        assert freed >= needed or len(chosen) == len(views) - 1

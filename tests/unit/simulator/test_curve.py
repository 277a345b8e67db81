"""One pass over the trace gives what a run per capacity gives."""

from __future__ import annotations

from hypothesis import given, settings

from kvcatch.simulator.curve import hit_curve, host_tier
from kvcatch.simulator.whatif import simulate
from kvcatch.workload import Workload, build

from .small import workloads


@given(workloads())
@settings(max_examples=30, deadline=None)
def test_plain_lru_at_every_capacity(workload):
    curve = hit_curve(workload, 4, engine_rules=False)
    for capacity in range(2, 40):
        run = simulate(workload, num_blocks=capacity, block_size=4, engine_rules=False)
        assert curve.at(capacity) == (run.hit_blocks, run.hit_tokens)


@given(workloads())
@settings(max_examples=30, deadline=None)
def test_engine_rules_at_every_capacity_that_fits_all(workload):
    curve = hit_curve(workload, 4)
    for capacity in range(curve.first, curve.first + 30):
        run = simulate(workload, num_blocks=capacity + 1, block_size=4)
        if curve.exact:
            assert curve.at(capacity) == (run.hit_blocks, run.hit_tokens)
        else:
            # A second copy of a repeated last block takes room that the model does not see.
            assert abs(curve.at(capacity)[0] - run.hit_blocks) <= 6


@given(workloads())
@settings(max_examples=30, deadline=None)
def test_more_room_never_hits_less(workload):
    for rules in (True, False):
        hits = hit_curve(workload, 4, engine_rules=rules).hit_blocks
        assert (hits[1:] >= hits[:-1]).all()


def row(*names: str, output: int = 1) -> dict[str, object]:
    return {
        "arrival": 0.0,
        "prompt": 4 * len(names) + 1,
        "output": output,
        "segments": [*((name, 4) for name in names), ("end", 1)],
    }


def by_hand() -> Workload:
    """Prompts AB, CD, AB of whole blocks plus one token each."""
    return build("hand", [row("A", "B"), row("C", "D"), row("A", "B")], grain=4)


def test_by_hand():
    # Each request needs 3 blocks (two full, one for the odd token). The third finds A and B only when the
    # second did not need their room: 2 + 2 cached blocks and 1 partial one = 5.
    curve = hit_curve(by_hand(), 4)
    assert curve.first == 3
    assert curve.saturated_at == 5
    assert [curve.at(room)[0] for room in (3, 4, 5, 6)] == [0, 1, 2, 2]


def test_ends_of_the_curve():
    curve = hit_curve(by_hand(), 4)
    assert curve.at(-5) == (0, 0)
    assert curve.at(10**9) == (2, 8)
    assert curve.ratio(10**9) == 8 / 27
    assert curve.capacities(5)[0] == 3
    assert curve.capacities(5)[-1] == 5


def test_a_repeated_prompt_of_whole_blocks_is_flagged():
    repeated = {"arrival": 0.0, "prompt": 8, "output": 1, "segments": [("A", 4), ("B", 4)]}
    assert not hit_curve(build("two", [repeated, repeated], grain=4), 4).exact
    assert hit_curve(by_hand(), 4).exact


def test_a_tier_behind_the_pool_is_a_point_further_right():
    curve = hit_curve(by_hand(), 4)
    # A pool of 3 hits nothing; with 2 blocks behind it both blocks of the third prompt: 8 tokens of 2 bytes.
    tier = host_tier(curve, 3, 2, bytes_per_token=2, bytes_per_second=4)
    assert (tier.host_hit_tokens, tier.transfer_seconds) == (8, 4.0)
    assert tier.token_hit_ratio == 8 / 27
    assert host_tier(curve, 3, 2, bytes_per_token=None, bytes_per_second=4).transfer_seconds is None

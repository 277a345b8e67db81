"""Plans of engines whose requests do not advance one token per step."""

from __future__ import annotations

from kvcatch.policy.blocks import BlockTable
from kvcatch.policy.governor import Governor
from kvcatch.policy.settings import Settings
from kvcatch.policy.waiting import Job


def planned(**engine: int | bool) -> tuple[int, list[int]]:
    """(last planned step, blocks at steps 0, 4, ...) of a request with 8 tokens that may generate 9 more."""
    governor = Governor(Settings(), BlockTable.uniform(4, 64), 100, 64, **engine)  # type: ignore[arg-type]
    job = Job("a", 8, 0, 0, 8, 9)
    job.total = governor.bound(job, 0)
    governor.admit(job, 8, None)
    assert job.plan is not None
    return job.plan.end, [governor.timeline.at(step) for step in range(0, 20, 4)]


def test_one_token_per_step() -> None:
    # The 9th token is sampled in step 8 and never stored: 16 tokens, 4 blocks, until step 8.
    assert planned() == (8, [2, 3, 4, 0, 0])


def test_two_batches_in_flight_hold_the_blocks_a_step_longer() -> None:
    assert planned(lag=1)[0] == 9


def test_two_pipeline_stages_take_two_steps_per_token() -> None:
    assert planned(pace=2) == (16, [2, 3, 4, 4, 4])


def test_unknown_speed_is_planned_at_full_size() -> None:
    assert planned(flat=True) == (8, [4, 4, 4, 0, 0])

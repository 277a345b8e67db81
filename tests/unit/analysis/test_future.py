"""What fits beside running requests, by hand; the real scheduler judges in the engine tests."""

from __future__ import annotations

import msgspec

from kvcatch.analysis.future import Running, fits_beside, running_requests
from kvcatch.analysis.headroom import headroom, snapshot_headroom
from kvcatch.events import EngineInfo
from kvcatch.results import Latency, Pool, Queues, RequestView, Snapshot

INFO = EngineInfo(num_blocks=21, block_size=10, max_model_len=1000)


def blocks(tokens: int) -> int:
    return -(-tokens // 10)


def fits(running: list[Running], free: int, size: tuple[int, int], delay: int = 0) -> int:
    return fits_beside(running, blocks, free, 20, size, INFO, delay)


def test_alone_only_the_peak_of_each_counts() -> None:
    """11 + 10 tokens hold 20 slots at the end: 2 blocks, 10 of them in 20."""
    assert fits([], 20, (11, 10)) == 10


def test_what_leaves_in_time_makes_room() -> None:
    """One request holds 10 blocks; new ones of 1 + 20 tokens need their second block at step 11."""
    leaves, stays = Running(100, 104, 5, 0), Running(100, 190, 90, 0)
    assert fits([leaves], 10, (1, 20)) == 9  # when it leaves it holds 11 blocks, the new ones one each
    assert fits([stays], 10, (1, 20)) == 4  # at step 20 it holds 12 blocks, the new ones two each
    assert fits([stays], 10, (1, 20), delay=40) == 2  # started 40 steps later, it would hold 16 by then


def test_shared_blocks_are_held_once_until_a_sharer_leaves() -> None:
    """Two requests of 5 blocks share 3: 7 are active, 13 free; both stay and grow no more."""
    pair = [Running(50, 50, 90, 3), Running(50, 50, 90, 3)]
    assert fits(pair, 13, (10, 1)) == 13
    soon = [Running(50, 50, 3, 3), Running(50, 50, 90, 3)]
    assert fits(soon, 13, (10, 1)) == 13
    # Once the first is gone the other holds its 5 alone: 15 are free, never fewer than before.
    assert fits(soon, 13, (1, 10)) == 13
    # Two blocks each from step 2 on: 7 and 12 at step 3.
    assert fits(soon, 13, (10, 10)) == 6


def test_running_requests_become_demand_by_their_limits() -> None:
    view = RequestView(
        request_id="a",
        engine_request_id="a",
        status="running",
        prompt_tokens=30,
        output_tokens=5,
        max_tokens=20,
    )
    waiting = RequestView(request_id="b", engine_request_id="b", status="waiting")
    assert running_requests(INFO, [view, waiting]) == [Running(34, 49, 15, 0)]
    short = EngineInfo(num_blocks=21, block_size=10, max_model_len=40)
    assert running_requests(short, [view]) == [Running(34, 39, 5, 0)]
    unknown = RequestView(request_id="c", engine_request_id="c", status="running", prompt_tokens=30)
    assert running_requests(INFO, [view, unknown]) is None


def test_headroom_follows_the_requests_when_it_knows_them() -> None:
    view = RequestView(
        request_id="a",
        engine_request_id="a",
        status="running",
        prompt_tokens=96,
        output_tokens=5,
        max_tokens=10,
    )
    pool = Pool(num_blocks=20, active_blocks=10, block_size=10)
    known = headroom(INFO, pool, Queues(running=1, waiting_for_blocks=0), 10, 60, requests=[view])
    # It grows to 105 slots, 11 blocks, and leaves after 5 steps; 69 slots of a new one are 7 blocks: 2 fit.
    assert (known.requests, known.limit) == (2, "blocks")
    blind = headroom(INFO, pool, Queues(running=1, waiting_for_blocks=0), 10, 60, committed_blocks=1)
    assert (blind.requests, blind.limit) == (1, "blocks")


def test_how_soon_is_counted_in_steps_of_the_engines_pace() -> None:
    """The case above: 4 requests fit at once, 2 when they may start 40 steps of 10 ms later."""
    view = RequestView(
        request_id="a", engine_request_id="a", status="running", prompt_tokens=100, output_tokens=1, max_tokens=91,
        num_blocks=10,
    )  # fmt: skip
    state = Snapshot(
        pool=Pool(num_blocks=20, active_blocks=10), queues=Queues(running=1, waiting_for_blocks=0), requests=(view,),
        latency=Latency(step_seconds=0.01),
    )  # fmt: skip

    def counted(within: float, pace: float | None = 0.01) -> int | None:
        now = msgspec.structs.replace(state, latency=Latency(step_seconds=pace))
        return snapshot_headroom(INFO, now, (1, 20), within).requests

    assert (counted(0), counted(0.4)) == (4, 2)
    assert (
        counted(0.4, pace=0.4) == 3
    )  # one step: at step 21 it holds 121 tokens, 13 blocks, the new ones two each
    assert (counted(0, None), counted(0.05, None)) == (4, 2)  # no pace known: 32 steps

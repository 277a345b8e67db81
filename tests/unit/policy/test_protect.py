"""Protected prefixes: floors, order of eviction, and what counts as a floor."""

from __future__ import annotations

import pytest

from kvcatch.errors import KVCatchError
from kvcatch.policy.keeper import Keeper
from kvcatch.policy.protect import Protection, parse_floors
from kvcatch.simulator.blockpool import BlockPool


def test_floors_are_shares_of_the_pool() -> None:
    assert parse_floors("chat=0.1, agents=0.25") == {"chat": 0.1, "agents": 0.25}
    assert parse_floors("") == {}


@pytest.mark.parametrize("text", ["chat", "chat=0", "=0.1", "chat=x", "chat=0.6", "a=0.3,b=0.3"])
def test_a_floor_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(KVCatchError, match="KVCATCH_PROTECT"):
        parse_floors(text)


def test_head_of_a_prefix_outlives_its_tail_and_recent_hits_outlive_old_ones() -> None:
    kept = Protection({"chat": 0.05}, usable_blocks=100)  # room for 5
    kept.hit("chat", [(1, "a"), (2, "b"), (3, "c")])
    kept.hit("chat", [(7, "x"), (8, "y"), (9, "z")])
    # 6 proven blocks, room for 5: the last block of the older prefix goes.
    assert kept.alive(lambda *_: True) == [2, 1, 9, 8, 7]


def test_a_block_with_other_content_is_dropped_and_other_tenants_are_not_kept() -> None:
    kept = Protection({"chat": 0.5}, usable_blocks=10)
    kept.hit("other", [(5, "e")])
    kept.hit("chat", [(1, "a"), (2, "b")])
    now = {1: "a", 2: "changed", 5: "e"}
    assert kept.alive(lambda block, content: now[block] == content) == [1]
    assert len(kept) == 1


def test_star_keeps_everybody_else_within_one_floor() -> None:
    kept = Protection({"*": 0.02}, usable_blocks=100)
    kept.hit("a", [(1, "a")])
    kept.hit("b", [(2, "b"), (3, "c")])
    assert kept.alive(lambda *_: True) == [3, 2]


def test_protected_blocks_are_moved_before_a_flood_of_small_steps_reaches_them() -> None:
    # 15 usable blocks of 4 tokens, 3 proven. A step takes at most 2 blocks of what others left before them; freed again
    # those stand behind, so after six steps nothing but the counting keeps the seventh from the proven ones.
    pool = BlockPool(16)
    keeper = Keeper(pool, [4], Protection({"chat": 0.2}, 15), token_budget=8)

    def serve(*names: bytes) -> None:
        keeper.before_step(0)
        held = pool.get_new_blocks(len(names))
        keeper.after_step(4 * len(names), 1)
        for block, name in zip(held, names, strict=True):
            pool.cache_block(block, name)
        pool.free_blocks(reversed(held))

    prefix = (b"a", b"b", b"c")
    serve(*prefix)
    hit = [block for block in map(pool.get_cached_block, prefix) if block is not None]
    pool.touch(hit)
    keeper.admitted("chat", [hit])
    pool.free_blocks(reversed(hit))
    for number in range(40):
        serve(b"x%d" % number, b"y%d" % number)
    assert all(pool.get_cached_block(name) is not None for name in prefix)
    assert pool.get_cached_block(b"x0") is None

"""Peak future blocks, and a door that never admits beyond it."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.events import EngineInfo
from kvcatch.gateway.door import Door, Rules
from kvcatch.gateway.engine import Engine, Reading
from kvcatch.gateway.ledger import Entry, Ledger, peak_blocks
from kvcatch.gateway.refusal import Refusal
from kvcatch.policy.blocks import BlockTable
from kvcatch.policy.demand import Demand, peak

rows = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=14)


@given(rows, st.sampled_from([1, 4, 16]))
def test_peak_over_arrays_is_the_policys_peak_and_a_walk_of_the_steps(sizes, block):
    table = BlockTable.uniform(block, 256)
    demands = [Demand(held, held + steps, steps) for held, steps in sizes]
    held, total, steps = (np.array(column, dtype=np.int64) for column in zip(*demands, strict=True))
    ours = peak_blocks(held, total, steps, np.ones_like(held), table)
    assert ours == peak(demands, table)
    walked = max(
        sum(-(-(d.held + step) // block) for d in demands if d.steps >= step)
        for step in range(max(d.steps for d in demands) + 1)
    )
    assert ours == walked


def engine(blocks: int = 41, size: int = 16, context: int = 4096) -> Engine:
    found = Engine("http://127.0.0.1:1", reserve_ratio=0.0)
    info = EngineInfo(num_blocks=blocks, block_size=size, max_model_len=context)
    found.take(Reading(info, 1, 0, 0, 0, 0, "recorder"), 0.0)
    return found


def entry(key: str, prompt: int, output: int, produced: int | None = 0, tenant: str = "") -> Entry:
    return Entry(
        key=key, tenant=tenant, prompts=(prompt,), weight=1, strict=output, planned=output, produced=produced
    )


def test_requests_of_unknown_progress_count_at_full_size():
    ledger = Ledger(BlockTable.uniform(16, 4096), 100, 0.0)
    for key, produced in (("a", None), ("b", 0)):
        one = entry(key, 160, 161, produced)
        ledger.size(one)
        ledger.add(one)
    assert ledger.entries["a"].blocks == 20
    # b grows from 10 to 20 blocks beside a's 20.
    assert ledger.peak_with(None) == 40
    ledger.entries["b"].produced = 160
    assert ledger.peak_with(None) == 40
    ledger.remove("b")
    assert ledger.peak_with(None) == 20


def test_load_that_is_not_ours_makes_the_pool_smaller():
    ledger = Ledger(BlockTable.uniform(16, 4096), 100, 0.1)
    one = entry("a", 160, 161)
    ledger.size(one)
    ledger.add(one)
    ledger.observe_active(40, 0.0)
    assert (ledger.foreign, ledger.limit) == (30.0, 60)
    for second in range(1, 60):
        ledger.observe_active(10, float(second))
    assert ledger.limit == 89  # all but the reserve, and a rest of memory
    ledger.forget_foreign()
    assert ledger.limit == 90


plans = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 120), st.sampled_from(["", "a", "b"]), st.integers(0, 6), st.booleans()),
    min_size=1, max_size=25,
)  # fmt: skip


@given(plans, st.sampled_from(["strict", "balanced"]), st.randoms(use_true_random=False))
def test_the_door_never_plans_beyond_the_pool_and_forgets_everybody(plans, mode, rng):
    """Requests come, wait, are cancelled, progress at their own pace (strict: some stall) and go."""

    async def scenario() -> None:
        one = engine()
        assert one.ledger is not None
        door = Door(Rules(mode=mode, max_wait=1e6, max_queue=1000, tenant_shares=(("a", 0.5),)))
        inside: dict[str, Entry] = {}
        tasks: dict[str, asyncio.Task[None]] = {}

        async def visit(item: Entry) -> None:
            await door.enter(item, [one])
            inside[item.key] = item

        def check() -> None:
            ledger = one.ledger
            assert ledger is not None
            if len(ledger.entries) > 1:
                assert ledger.peak_with(None, mode == "strict") <= ledger.limit
            assert sum(e.blocks for e in ledger.entries.values() if e.tenant == "a") <= 20
            used = sum(-(-(e.prompts[0] + (e.produced or 0)) // 16) for e in ledger.entries.values())
            assert used <= max(ledger.limit, max((e.blocks for e in ledger.entries.values()), default=0))

        for index, (prompt, output, tenant, steps, cancel) in enumerate(plans):
            item = entry(f"k{index}", prompt, output, 0, tenant)
            tasks[item.key] = asyncio.create_task(visit(item))
            for _ in range(steps):
                # Balanced plans hold for requests that advance together: nobody takes a step before all who were let in
                # have heard of it, and nobody leaves in the middle of one.
                while True:
                    await asyncio.sleep(0)
                    if set(inside) == set(one.ledger.entries):
                        break
                for going in inside.values():
                    if mode == "balanced" or rng.random() < 0.7:
                        going.produced = (going.produced or 0) + 1
                for key, going in list(inside.items()):
                    if (going.produced or 0) >= going.strict:
                        door.leave(inside.pop(key), one, going.strict)
                check()
            waiting = [key for key, task in tasks.items() if not task.done()]
            if cancel and waiting:
                tasks[rng.choice(waiting)].cancel()
        while inside or any(not task.done() for task in tasks.values()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for key, going in list(inside.items()):
                door.leave(inside.pop(key), one, going.strict)
            check()
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert all(isinstance(r, None | asyncio.CancelledError | Refusal) for r in results)
        assert not one.ledger.entries
        assert (door.waiting, door.queued_tokens) == (0, 0)
        # A tenant's larger than its share is refused at once, never left waiting.
        refused = [r for r in results if isinstance(r, Refusal)]
        assert all(r.status == 413 for r in refused)

    asyncio.run(scenario())


def test_a_large_request_is_not_starved_by_small_ones():
    async def scenario() -> None:
        clock = [0.0]
        one = engine()
        door = Door(Rules(mode="strict", max_wait=60), lambda: clock[0])
        small = [entry(f"s{n}", 16, 145) for n in range(4)]  # ten blocks each
        for item in small:
            await door.enter(item, [one])
        large = entry("large", 400, 225)  # 39 of 40 blocks
        task = asyncio.create_task(door.enter(large, [one]))
        await asyncio.sleep(0)
        # A flood of small ones: each takes the place of one that leaves.
        waiting = []
        for round_ in range(40):
            clock[0] += 1.0
            late = entry(f"f{round_}", 16, 145)
            waiting.append(asyncio.create_task(door.enter(late, [one])))
            await asyncio.sleep(0)
            if small:
                door.leave(small.pop(0), one, 1)
            await asyncio.sleep(0)
            small += [e for e in one.ledger.entries.values() if e.key.startswith("f") and e not in small]
            if task.done():
                break
        assert task.done()
        assert clock[0] <= 40
        for one_waiting in waiting:
            one_waiting.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())


def test_observe_only_says_what_it_would_have_done():
    async def scenario() -> None:
        one = engine()
        door = Door(Rules(long_tokens=100, long_concurrency=1))
        for n in range(3):
            item = entry(f"k{n}", 300, 100)
            await door.enter(item, [one])
        assert item.observed == ["long-concurrency", "long-share", "peak"]
        assert len(one.ledger.entries) == 3

    asyncio.run(scenario())


def test_what_is_kept_free_is_what_was_measured_on_this_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCATCH_DIR", str(tmp_path))
    info = EngineInfo(num_blocks=101, block_size=16, max_model_len=4096)
    found = Engine("http://127.0.0.1:1")
    found.take(Reading(info, 1, 0, 0, 0, 0, "recorder"), 0.0)
    assert found.ledger is not None
    assert found.ledger.limit == 95
    (tmp_path / "watermark.json").write_text('{"schema_version": 1, "safe_utilization_ratio": 0.8}')
    assert found.reserved() == 0.2
    found.reserve_ratio = 0.5
    assert found.reserved() == 0.5

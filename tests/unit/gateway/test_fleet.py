"""One ledger per engine for several gateways, on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from kvcatch.events import EngineInfo
from kvcatch.gateway import fleet, link
from kvcatch.gateway.door import Door, Rules
from kvcatch.gateway.engine import Engine, Reading
from kvcatch.gateway.fleet import Fleet
from kvcatch.gateway.ledger import Entry
from kvcatch.policy.blocks import BlockTable
from services import redis_server

from .stub import until

LAYOUT = BlockTable.uniform(16, 1 << 14)


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers of these tests are old enough from the start; one test is about young ones."""
    monkeypatch.setattr(fleet, "WARM_SECONDS", 0)
    monkeypatch.setattr(link, "TIMEOUT_SECONDS", 10.0)  # a busy machine is not a lost Redis


class Gateway:
    """Door, ledger and fleet of one gateway; no sockets but Redis'."""

    def __init__(self, url: str, prefix: str, blocks: int = 40, mode: str = "strict", **options: Any):
        self.engine = Engine("http://engine:8000", reserve_ratio=0.0)
        self.info = EngineInfo(num_blocks=blocks + 1, block_size=16, max_model_len=4096)
        self.see(0)
        self.fleet = Fleet(url, prefix=prefix, **options)
        self.fleet.strict = mode == "strict"
        self.door = Door(Rules(mode=mode, max_wait=600), shared=self.fleet)

    def see(self, epoch: int, active: int = 0, now: float = 0.0) -> None:
        self.engine.take(Reading(self.info, 1, active, 0, 0, 0, "metrics", epoch=epoch), now)

    def start(self) -> None:
        self.fleet.start([self.engine], self.door.drain, lambda: self.door.waiting > 0)

    async def enter(self, key: str, blocks: int) -> Entry:
        entry = Entry(key, "", (blocks * 16,), 1, 1, 1, produced=0)
        await self.door.enter(entry, [self.engine])
        return entry

    def leave(self, entry: Entry) -> None:
        self.door.leave(entry, self.engine, 1)

    async def settled(self) -> None:
        for desk in self.fleet._desks.values():
            while desk.sending is not None and not desk.sending.done():
                await desk.sending


@asynccontextmanager
async def gateways(url: str, prefix: str, count: int, **options: Any) -> AsyncIterator[list[Gateway]]:
    found = [Gateway(url, prefix, **options) for _ in range(count)]
    for one in found:
        one.start()
    try:
        yield found
    finally:
        for one in found:
            with contextlib.suppress(Exception):
                await one.fleet.close()


def key(prefix: str) -> str:
    """The hash of the engine that these gateways share."""
    return "{" + prefix + "}:kv1:engine:8000"


def row(url: str, prefix: str) -> list[int]:
    """held, planned and requests that all gateways hold together, and the highest slot."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        words = (client.hget(key(prefix), "sum") or "0 0 0 0").split()
    return [int(word) for word in words[:3]] + [max(map(int, words[3:]))]


def rows(url: str, prefix: str) -> int:
    """Gateways that hold something."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        names = client.hkeys(key(prefix))
        assert client.zcard(key(prefix) + ":z") == sum(n.startswith("g:") for n in names)
    return sum(name.startswith("g:") for name in names)


def test_what_one_gateway_holds_another_cannot_take_and_gets_when_it_is_free(redis_url):
    async def scenario() -> None:
        async with gateways(redis_url, "two", 2) as (one, two):
            first = await one.enter("a", 30)
            second = asyncio.create_task(two.enter("b", 20))
            await until(lambda: two.door.waiting == 1, "b to wait")
            third = await two.enter("c", 10)
            assert row(redis_url, "two") == [40, 40, 2, 40]
            one.leave(first)
            entry = await second
            await one.settled()
            assert row(redis_url, "two") == [30, 30, 2, 30]
            for left in (entry, third):
                two.leave(left)
            await two.settled()
            assert row(redis_url, "two") == [0, 0, 0, 0]
            assert rows(redis_url, "two") == 0

    asyncio.run(scenario())


def test_many_gateways_at_once_never_plan_beyond_the_pool_and_leave_nothing(redis_url):
    async def scenario() -> None:
        async with gateways(redis_url, "many", 4) as doors:
            rng = random.Random(5)
            held = most = done = 0

            async def one(number: int) -> None:
                nonlocal held, most, done
                blocks = rng.randint(1, 15)
                entry = await doors[number % 4].enter(f"k{number}", blocks)
                held += blocks
                most = max(most, held)
                for _ in range(rng.randint(0, 30)):
                    await asyncio.sleep(0)
                held -= blocks
                done += 1
                doors[number % 4].leave(entry)

            tasks = [asyncio.create_task(one(number)) for number in range(200)]
            for number in range(0, 200, 9):
                tasks[number].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(answer) for answer in answers} == {type(None), asyncio.CancelledError}, answers
            for door in doors:
                await door.settled()
            assert most <= 40
            assert done == 200 - len(range(0, 200, 9))
            assert row(redis_url, "many") == [0, 0, 0, 0]
            assert rows(redis_url, "many") == 0

    asyncio.run(scenario())


def test_one_request_alone_may_use_the_whole_pool_but_only_one(redis_url):
    async def scenario() -> None:
        async with gateways(redis_url, "alone", 2) as (one, two):
            for gateway in (one, two):
                gateway.engine.reserve_ratio = 0.5
                assert gateway.engine.ledger is not None
                gateway.engine.ledger.reserve_ratio = 0.5
            first = await one.enter("a", 39)
            waiting = asyncio.create_task(two.enter("b", 39))
            await until(lambda: two.door.waiting == 1, "b to wait")
            one.leave(first)
            two.leave(await waiting)

    asyncio.run(scenario())


def test_an_admission_is_one_round_trip(redis_url):
    async def scenario() -> None:
        async with gateways(redis_url, "cost", 1) as (one,):
            entry = await one.enter("first", 1)
            await one.settled()
            with redis.Redis.from_url(redis_url) as client:
                client.config_resetstat()
                entries = [await one.enter(f"k{n}", 1) for n in range(20)]
                calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert calls <= 20 + 1  # a heartbeat may fall in between
            for each in [entry, *entries]:
                one.leave(each)

    asyncio.run(scenario())


# One gateway of its own process: takes blocks, says so, and waits for its end.
HOLDER = """
import asyncio, sys
from kvcatch.gateway import fleet, link
fleet.WARM_SECONDS, fleet.LEASE_SECONDS, link.HEARTBEAT_SECONDS = 0, 1, 0.2
from kvcatch.events import EngineInfo
from kvcatch.gateway.door import Door, Rules
from kvcatch.gateway.engine import Engine, Reading
from kvcatch.gateway.ledger import Entry
async def main():
    engine = Engine("http://engine:8000", reserve_ratio=0.0)
    engine.take(Reading(EngineInfo(num_blocks=41, block_size=16, max_model_len=4096), 1, 0, 0, 0, 0, "metrics"), 0.0)
    ours = fleet.Fleet(sys.argv[1], prefix=sys.argv[2])
    ours.strict = True
    door = Door(Rules(mode="strict", max_wait=600), shared=ours)
    ours.start([engine], door.drain, lambda: False)
    for n in range(3):
        await door.enter(Entry(f"dead{n}", "", (160,), 1, 1, 1, produced=0), [engine])
    print("held", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_what_a_killed_gateway_held_comes_back_once(redis_url, monkeypatch):
    monkeypatch.setattr(fleet, "LEASE_SECONDS", 1)
    monkeypatch.setattr(link, "HEARTBEAT_SECONDS", 0.2)

    async def scenario() -> None:
        async with gateways(redis_url, "kill", 2) as (one, two):
            own = await one.enter("own", 10)
            dead = subprocess.Popen(
                [sys.executable, "-c", HOLDER, redis_url, "kill"], stdout=subprocess.PIPE, text=True
            )
            try:
                assert dead.stdout is not None
                assert (await asyncio.to_thread(dead.stdout.readline)).strip() == "held"
                assert row(redis_url, "kill") == [40, 40, 4, 40]
                waiting = asyncio.create_task(two.enter("late", 30))
                await until(lambda: two.door.waiting == 1, "late to wait")
            finally:
                dead.send_signal(signal.SIGKILL)
                dead.wait(10)
            late = await asyncio.wait_for(waiting, 20)
            # Ten of our own and thirty of the new one: what the dead one held was subtracted, and once.
            await two.settled()
            assert row(redis_url, "kill") == [40, 40, 2, 40]
            assert rows(redis_url, "kill") == 2
            one.leave(own)
            two.leave(late)

    asyncio.run(scenario())


def test_a_redis_that_comes_back_empty_learns_what_everybody_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "WARM_SECONDS", 1)
    monkeypatch.setattr(link, "HEARTBEAT_SECONDS", 0.1)
    first = redis_server(tmp_path)

    async def scenario() -> None:
        with first as (url, process):
            async with gateways(url, "restart", 2, replicas=2) as (one, two):
                await until(lambda: len(one.fleet._desks) == 1, "the start")
                held = await one.enter("a", 15)
                await until(lambda: not any(d.alone for d in one.fleet._desks.values()), "an old ledger")
                await until(lambda: not any(d.alone for d in two.fleet._desks.values()), "an old ledger")
                other = await two.enter("b", 5)
                process.send_signal(signal.SIGKILL)
                process.wait(10)
                await until(lambda: one.fleet.lost and two.fleet.lost, "both to notice")
                # 20 of 40 are planned; of the 20 spare ones each may add ten, and nobody more than half the pool:
                # the first may have 20 in all, so five more, the second 15.
                with redis_server(tmp_path, first.port):
                    await until(lambda: rows(url, "restart") == 2, "both to announce")
                    assert row(url, "restart")[1] == 20
                    waiting = asyncio.create_task(two.enter("c", 25))
                    await until(lambda: two.door.waiting == 1, "c to wait")
                    one.leave(held)
                    big = await waiting
                    await two.settled()
                    assert row(url, "restart")[1] == 30
                    for entry in (other, big):
                        two.leave(entry)
                    await two.settled()
                    assert row(url, "restart") == [0, 0, 0, 0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("policy", "first", "second"), [("local", 20, 15), ("closed", 15, 5), ("open", 40, 40)]
)
def test_without_redis_each_keeps_to_its_share(tmp_path, monkeypatch, policy, first, second):
    monkeypatch.setattr(link, "HEARTBEAT_SECONDS", 0.1)

    async def scenario() -> None:
        server = redis_server(tmp_path)
        with server as (url, process):
            async with gateways(url, "lost", 2, replicas=2, when_lost=policy) as (one, two):
                await one.enter("a", 15)
                await two.enter("b", 5)
                await until(
                    lambda: one.engine.ledger.others is not None and one.engine.ledger.others.planned == 5,
                    "the first to know of the second",
                )
                process.send_signal(signal.SIGKILL)
                process.wait(10)
                await until(lambda: all(d.fleet.lost for d in (one, two)), "both to notice")
                # 20 of 40 are planned; of the 20 spare ones each may add ten, and nobody more than half the pool.
                for gateway, most in ((one, first), (two, second)):
                    tasks = [asyncio.create_task(gateway.enter(f"k{n}", 1)) for n in range(40)]
                    await until(
                        lambda tasks=tasks, gateway=gateway: (
                            sum(t.done() for t in tasks) + gateway.door.waiting == 40
                        ),
                        "everybody to be in or in line",
                    )
                    assert gateway.engine.ledger.planned_blocks() == most
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


def test_a_young_ledger_is_not_believed(redis_url, monkeypatch):
    monkeypatch.setattr(fleet, "WARM_SECONDS", 3600)

    async def scenario() -> None:
        async with gateways(redis_url, "young", 2, replicas=4) as (one, _):
            tasks = [asyncio.create_task(one.enter(f"k{n}", 1)) for n in range(20)]
            await until(lambda: sum(t.done() for t in tasks) + one.door.waiting == 20, "all in or in line")
            assert sum(task.done() for task in tasks) == 10  # a quarter of 40
            monkeypatch.setattr(fleet, "WARM_SECONDS", 0)
            await asyncio.gather(*tasks)
            await one.settled()
            assert row(redis_url, "young")[:3] == [20, 20, 20]
            for task in tasks:
                one.leave(task.result())

    asyncio.run(scenario())


def test_an_engine_that_starts_anew_starts_an_empty_ledger(redis_url):
    async def scenario() -> None:
        async with gateways(redis_url, "epoch", 2) as (one, two):
            for gateway in (one, two):
                gateway.see(epoch=1_000)
            old = await one.enter("a", 30)
            older = await two.enter("b", 10)
            assert row(redis_url, "epoch")[1] == 40
            # The second sees it first; what both held is gone with the old process.
            two.see(epoch=2_000)
            new = await two.enter("c", 35)
            assert row(redis_url, "epoch")[1:3] == [35, 1]
            # The first learns it from the ledger, and does not bring its old request back.
            small = await one.enter("d", 5)
            assert row(redis_url, "epoch")[1:3] == [40, 2]
            assert list(one.engine.ledger.entries) == ["d"]
            one.leave(old)
            two.leave(older)
            await one.settled()
            await two.settled()
            assert row(redis_url, "epoch")[1:3] == [40, 2]
            one.leave(small)
            two.leave(new)

    asyncio.run(scenario())


def test_a_clock_that_is_five_seconds_off_changes_nothing(redis_url, monkeypatch):
    """No gateway's clock reaches Redis: leases and ages are in the server's time."""

    async def scenario() -> None:
        async with gateways(redis_url, "skew", 2) as (one, two):
            first = await one.enter("a", 30)
            with redis.Redis.from_url(redis_url, decode_responses=True) as client:
                seconds, micros = client.time()
                for skew in (-5.0, 5.0):
                    with monkeypatch.context() as patch:
                        real = fleet.time.time
                        patch.setattr(fleet.time, "time", lambda skew=skew, real=real: real() + skew)
                        entry = await two.enter(f"skew{skew}", 10)
                    end = client.zscore("{skew}:kv1:engine:8000:z", two.fleet._name)
                    assert 0 <= end / 1e6 - (seconds + micros / 1e6) - fleet.LEASE_SECONDS < 5
                    assert row(redis_url, "skew")[1] == 40
                    two.leave(entry)
                    await two.settled()
            one.leave(first)

    asyncio.run(scenario())


def test_two_versions_of_the_script_keep_one_ledger(redis_url):
    """A rolling upgrade: another text, another hash, and a row with a slot more."""
    newer = "-- the next release\n" + fleet._SCRIPT.replace(
        "redis.call('EXPIRE', z, 86400)",
        "redis.call('EXPIRE', z, 86400); redis.call('HSET', h, 'note', 'new')",
    )
    assert newer.count("'note'") == 1

    async def scenario() -> None:
        old, new = Gateway(redis_url, "roll"), Gateway(redis_url, "roll", script=newer)
        for one in (old, new):
            one.start()
        first = await old.enter("a", 20)
        second = await new.enter("b", 15)
        assert row(redis_url, "roll") == [35, 35, 2, 35]
        waiting = asyncio.create_task(old.enter("c", 10))
        await until(lambda: old.door.waiting == 1, "c to wait")
        new.leave(second)
        await new.settled()
        third = await waiting
        assert row(redis_url, "roll") == [30, 30, 2, 30]
        for entry in (first, third):
            old.leave(entry)
        await old.settled()
        assert row(redis_url, "roll") == [0, 0, 0, 0]
        await old.fleet.close()
        await new.fleet.close()

    asyncio.run(scenario())


def test_a_late_command_does_not_undo_a_newer_one(redis_url, monkeypatch):
    """One that waited in a broken connection while the next went over a new one."""

    async def scenario() -> None:
        one = Gateway(redis_url, "late")
        sent: list[tuple[list[str], list[object]]] = []
        run = one.fleet._link.run

        async def noted(keys, arguments):
            sent.append((list(keys), list(arguments)))
            return await run(keys, arguments)

        monkeypatch.setattr(one.fleet._link, "run", noted)
        first, second = await one.enter("a", 10), await one.enter("b", 20)
        assert (await run(*sent[0]))[0] == "late"
        assert row(redis_url, "late") == [30, 30, 2, 30]
        for entry in (first, second):
            one.leave(entry)
        await one.settled()
        await one.fleet.close()

    asyncio.run(scenario())


def test_blocks_of_other_gateways_are_not_somebody_elses_load(redis_url):
    async def scenario() -> None:
        async with gateways(redis_url, "foreign", 2) as (one, two):
            first = await one.enter("a", 12)
            second = await two.enter("b", 3)
            two.see(0, active=20, now=1e6)
            # 20 in use: 3 are ours, 12 another gateway's, 5 nobody's whom we know.
            assert two.engine.ledger.foreign == 5
            one.leave(first)
            two.leave(second)

    asyncio.run(scenario())

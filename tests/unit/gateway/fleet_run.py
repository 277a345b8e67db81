"""A small fleet under fire: gateways as processes, engines that count their blocks, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import redis
from aiohttp import web

from services import free_port, redis_server

from .stub import Stub

BLOCK = 16
STEP_SECONDS = 0.005


@dataclass(eq=False)
class Sequence:
    """One request in an engine."""

    prompt: int
    output: int
    produced: int = 0
    started: bool = False
    step: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + max(0, self.produced - 1)) // BLOCK) if self.started else 0


class Pool(Stub):
    """An engine that gives every running request one token per step and counts what does not fit."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks=blocks + 1, answer=self._generate)
        self.usable = blocks
        self.sequences: set[Sequence] = set()
        self.overshoot = self.worst = self.steps = self.held = self.served = 0
        self.started_at = time.time()

    async def step_forever(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            for one in list(self.sequences):
                one.started = True
                one.produced += 1
                one.step.set()
            used = sum(one.blocks for one in self.sequences)
            self.steps += bool(self.sequences)
            self.held += used
            self.worst = max(self.worst, used)
            self.overshoot += max(0, used - self.usable)
            self.usage = min(1.0, used / self.usable)

    async def _metrics(self, request: web.Request) -> web.Response:
        page = (await super()._metrics(request)).text
        return web.Response(text=f"{page}process_start_time_seconds {self.started_at}\n")

    async def _generate(self, _: Stub, request: web.Request) -> web.StreamResponse:
        body = self.seen.pop()[1]
        one = Sequence(len(body["prompt"]), body["max_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.sequences.add(one)
        try:
            if body.get("stream"):
                await response.prepare(request)
            while one.produced < one.output:
                one.step.clear()
                await one.step.wait()
                if body.get("stream"):
                    await response.write(b'data: {"choices":[{"text":"x"}]}\n\n')
        finally:
            self.sequences.discard(one)
        self.served += 1
        usage = {"prompt_tokens": one.prompt, "completion_tokens": one.output}
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": usage})
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class Process:
    """`kvcatch gateway` on a port of its own."""

    def __init__(self, number: int, folder: Path, urls: list[str], redis_url: str, mode: str, replicas: int):
        self.port, self.folder = free_port(), folder / f"g{number}"
        self.folder.mkdir()
        self.killed: list[float] = []
        self._command = [
            sys.executable, "-m", "kvcatch", "gateway", "--listen", f"127.0.0.1:{self.port}", "--mode", mode,
            "--redis", redis_url, "--replicas", str(replicas), "--max-wait", "30",
        ]  # fmt: skip
        for url in urls:
            self._command += ["--upstream", url]
        self.start()

    def start(self) -> None:
        environment = os.environ | {"KVCATCH_DIR": str(self.folder)}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.killed.append(time.monotonic())

    async def ready(self, session: aiohttp.ClientSession) -> None:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{self.port}/health") as answer:
                    if answer.status == 200:
                        return
            assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, "a gateway does not start"
            await asyncio.sleep(0.05)


@dataclass
class Outcome:
    """What came of a run. Seconds, blocks, counts."""

    statuses: dict[str, int]
    overshoot: int
    worst: list[int]
    residual: list[Any]
    redis_recovery: float
    asked: int
    admitted: int
    calls: int
    script_usec: str
    admission_ms: tuple[float, float]
    balance: float
    seconds: float

    def __str__(self) -> str:
        p50, p99 = self.admission_ms
        return (
            f"{sum(self.statuses.values())} requests in {self.seconds:.1f} s: {self.statuses}\n"
            f"overshoot {self.overshoot} block-steps, most in use {self.worst}; left over: {self.residual}\n"
            f"recovered from Redis' restart in {self.redis_recovery:.1f} s\n"
            f"{self.asked} admission calls let in {self.admitted} ({self.asked / max(1, self.admitted):.2f} each); "
            f"with releases and renewals {self.calls} calls; in Redis {self.script_usec}\n"
            f"admission p50 {p50:.2f} ms, p99 {p99:.2f} ms; max/mean KV of the engines {self.balance:.3f}"
        )


def _ledgers(client: redis.Redis) -> Iterator[str]:
    return (name for name in client.keys("{kvcatch}:kv1:*") if not name.endswith(":z"))


async def run(folder: Path, **options: Any) -> Outcome:
    """Random requests from ``at_once`` clients through random gateways, a tenth of them cancelled."""
    with contextlib.ExitStack() as stack:
        return await _run(folder, stack, **options)


async def _run(
    folder: Path, stack: contextlib.ExitStack, *, requests: int, at_once: int, mode: str, kills: int, restart: bool, seed: int = 1,
    blocks: int = 60, gateways: int = 4,
) -> Outcome:  # fmt: skip
    rng = random.Random(seed)
    pools = [Pool(blocks) for _ in range(3)]
    runners, urls = [], []
    for pool in pools:
        runner = web.AppRunner(pool.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    steppers = [asyncio.create_task(pool.step_forever()) for pool in pools]
    server = redis_server(folder)
    redis_url, _ = server.__enter__()
    client: Any = redis.Redis.from_url(redis_url, decode_responses=True)

    def end_redis() -> None:
        server.process.kill()  # the one that runs now: it is started anew below

    # Whatever fails below, nothing keeps running.
    stack.callback(end_redis)
    doors = [Process(n, folder, urls, redis_url, mode, gateways) for n in range(gateways)]
    for door in doors:
        stack.callback(lambda door=door: door.process.kill())
    statuses: dict[str, int] = {}
    todo = iter(range(requests))
    sent = 0
    asked = admitted = calls = 0
    script = ""
    recovery: dict[str, Any] = {"redis": 0.0}

    def count_calls() -> None:
        nonlocal asked, admitted, calls, script
        for name in _ledgers(client):
            asked += int(client.hget(name, "asked") or 0)
            admitted += int(client.hget(name, "admitted") or 0)
        calls += int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))
        script = str(client.info("latencystats").get("latency_percentiles_usec_evalsha", ""))

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        await asyncio.gather(*(door.ready(session) for door in doors))
        # Ledgers that are too young are not what is measured here.
        await _until_old(client, 3)
        start = time.monotonic()

        async def ask(number: int) -> str:
            # The last token is never attended to: a request fills its blocks exactly at its end.
            output = 24 if mode == "balanced" else rng.randint(2, 30)
            body = {"model": "stub", "prompt": "p" * rng.randint(8, 200), "max_tokens": output,
                    "stream": rng.random() < 0.7}  # fmt: skip
            url = f"http://127.0.0.1:{rng.choice(doors).port}/v1/completions"
            try:
                async with session.post(url, json=body) as answer:
                    await answer.read()
                    return str(answer.status)
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)  # that gateway is dead; another time, another one
                return "broken"

        async def worker() -> None:
            nonlocal sent
            for number in todo:
                sent += 1
                task = asyncio.create_task(ask(number))
                if rng.random() < 0.1:
                    await asyncio.sleep(rng.random() / 10)
                    task.cancel()
                (answer,) = await asyncio.gather(task, return_exceptions=True)
                word = answer if isinstance(answer, str) else type(answer).__name__
                statuses[word] = statuses.get(word, 0) + 1

        async def fire() -> None:
            for number in range(kills):
                while sent < requests * (number + 1) / (kills + 2):
                    await asyncio.sleep(0.01)
                door = doors[number % len(doors)]
                door.kill()
                door.start()
                await door.ready(session)
            if restart:
                while sent < requests * (kills + 1) / (kills + 2):
                    await asyncio.sleep(0.01)
                count_calls()
                began = time.monotonic()
                server.process.kill()
                server.process.wait(10)
                await asyncio.to_thread(server.__enter__)
                await _until_old(client, 3)
                recovery["redis"] = time.monotonic() - began

        probe = asyncio.create_task(_probe(redis_url))
        firing = asyncio.create_task(fire())
        await asyncio.gather(*(worker() for _ in range(at_once)))
        await firing
        seconds = time.monotonic() - start
        probe.cancel()
        (times,) = await asyncio.gather(probe, return_exceptions=True)
        assert isinstance(times, list), times
        residual = await _left_over(client, bool(kills))
        count_calls()
        for door in doors:
            door.process.terminate()
        for door in doors:
            await asyncio.to_thread(door.process.wait, 20)
    for stepper in steppers:
        stepper.cancel()
    for runner in runners:
        await runner.cleanup()
    client.close()
    server.__exit__()
    means = [pool.held / max(1, pool.steps) for pool in pools]
    times.sort()
    return Outcome(
        statuses=statuses, overshoot=sum(pool.overshoot for pool in pools), worst=[pool.worst for pool in pools],
        residual=residual, redis_recovery=recovery["redis"], asked=asked, admitted=admitted,
        calls=calls, script_usec=script,
        admission_ms=(times[len(times) // 2] * 1e3, times[int(len(times) * 0.99)] * 1e3) if times else (0.0, 0.0),
        balance=max(means) / (sum(means) / len(means)), seconds=seconds,
    )  # fmt: skip


async def _until_old(client: Any, engines: int) -> None:
    """Until every ledger is believed again."""
    from kvcatch.gateway.fleet import WARM_SECONDS

    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(redis.RedisError):
            seconds, _ = client.time()
            born = [int(client.hget(name, "born")) / 1e6 for name in _ledgers(client)]
            if len(born) == engines and seconds - max(born) > WARM_SECONDS:
                return
        assert time.monotonic() < end, "no ledgers"
        await asyncio.sleep(0.05)


async def _probe(redis_url: str) -> list[float]:
    """Seconds of single admissions beside the fleet, on a ledger of its own, until cancelled."""
    from .test_fleet import Gateway

    one = Gateway(redis_url, "probe")
    found = []
    try:
        while True:
            await asyncio.sleep(0.02)
            begin = time.perf_counter()
            entry = await one.enter(f"k{len(found)}", 1)
            if not one.fleet._desk(one.engine).alone:
                found.append(time.perf_counter() - begin)
            one.leave(entry)
    except asyncio.CancelledError:
        await one.fleet.close()
        return found


async def _left_over(client: Any, killed: bool) -> list[Any]:
    """What the ledgers still say once everybody is gone; a lease's time after the last kill."""
    end = time.monotonic() + (15 if killed else 5)
    while True:
        left = []
        for name in _ledgers(client):
            if "probe" in name:
                continue
            held = {row: value for row, value in client.hgetall(name).items() if row.startswith("g:")}
            numbers = [int(word) for word in (client.hget(name, "sum") or "0").split()]
            if held or any(numbers) or client.zcard(name + ":z"):
                left.append((name, held, numbers))
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.1)

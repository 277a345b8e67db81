"""Half an hour of a gateway on a real engine with everything that goes wrong: nothing is left behind.

``KVCATCH_SOAK_SECONDS`` (default 1,800) shortens it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.support.gateway import Gateway, gateway
from engine.support.processes import deadline_poll
from engine.support.server import engine_lock, server
from services import free_port, redis_server

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("KVCATCH_SOAK_SECONDS", "1800"))
CLIENTS = 12
POOL = (
    "--num-gpu-blocks-override",
    "120",
    "--block-size",
    "32",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "16",
)


class Clients:
    """Clients of every kind of manners, one request after the other."""

    KINDS = ("whole", "stream", "leaves", "slow", "half-closed", "malformed", "too-long")

    def __init__(self, port: int) -> None:
        self.port = port
        self.seen: Counter[str] = Counter()
        self.over = False

    async def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.over:
            kind = rng.choice(self.KINDS)
            try:
                async with asyncio.timeout(120):
                    status = await self._one(kind, rng)
            except (OSError, asyncio.IncompleteReadError):
                status = "broken"
            self.seen[f"{kind} {status}"] += 1

    async def _one(self, kind: str, rng: random.Random) -> str:
        prompt = "x" * (9_000 if kind == "too-long" else rng.randrange(10, 600))
        body = json.dumps(
            {"model": "tiny", "prompt": prompt, "max_tokens": rng.randrange(1, 120), "ignore_eos": True,
             "stream": kind in ("stream", "leaves", "slow"), "user": f"u{rng.randrange(4)}"}
        ).encode()  # fmt: skip
        if kind == "malformed":
            body = body[: len(body) // 2]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            if kind == "half-closed":
                writer.write_eof()
            line = await reader.readline()
            if kind == "leaves":
                await reader.read(64)
            elif kind == "slow":
                while await reader.read(256):
                    await asyncio.sleep(0.02)  # what makes it slow
            else:
                await reader.read()
            return line.split()[1].decode() if line else "none"
        finally:
            writer.transport.abort()


def sockets(pid: int) -> int:
    """Sockets that a process has open."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return count


def resident(pid: int) -> int:
    """Bytes of memory in use."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def empty(front: Gateway) -> bool:
    """Nobody is in flight, nothing is held in the ledger."""
    state = front.state()
    return not state["requests"] and all(one["planned_blocks"] == 0 for one in state["engines"])


async def load(front: Gateway, seconds: float) -> Counter[str]:
    clients = Clients(front.port)
    tasks = [asyncio.create_task(clients.run(seed)) for seed in range(CLIENTS)]
    await asyncio.sleep(seconds)  # the length of the load, nothing waits for it
    clients.over = True
    await asyncio.gather(*tasks)
    return clients.seen


def test_half_an_hour_of_faults_leaves_nothing_behind(tmp_path: Path, tiny_model: Path) -> None:
    engine_port, redis_port = free_port(), free_port()
    flags = ("--redis", f"redis://127.0.0.1:{redis_port}/0", "--redis-lost", "local", "--mode", "balanced")
    flags += ("--tokens-per-minute", "1000000", "--upstream", f"http://127.0.0.1:{engine_port}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine_lock())
        lives: Iterator[int] = itertools.count()

        def engine() -> contextlib.ExitStack:
            life = contextlib.ExitStack()
            life.enter_context(
                server(tmp_path / f"engine{next(lives)}", tiny_model, *POOL, lock=False, port=engine_port)
            )
            return life

        def cache() -> contextlib.ExitStack:
            life = contextlib.ExitStack()
            life.enter_context(redis_server(tmp_path, redis_port))
            return life

        running, storing = engine(), cache()
        stack.callback(lambda: (running.close(), storing.close()))
        front = stack.enter_context(gateway(tmp_path, tmp_path / "rings", *flags))
        asyncio.run(load(front, 20))  # everything has been imported and pooled once
        deadline_poll(lambda: empty(front), 60, "an empty gateway", 0.2)
        before = sockets(front.process.pid), resident(front.process.pid)
        seen: Counter[str] = Counter()
        end = time.monotonic() + SECONDS
        for turn in itertools.count():
            seen += asyncio.run(load(front, min(60.0, SECONDS / 6)))
            if time.monotonic() > end:
                break
            if turn % 2:
                storing.close()
                seen += asyncio.run(load(front, 5))
                storing = cache()
            else:
                running.close()
                seen += asyncio.run(load(front, 5))
                running = engine()
        deadline_poll(lambda: empty(front), 90, "an empty gateway", 0.2)
        # Connections that clients left are gone once the gateway has seen it; those to the engine are kept in a pool.
        deadline_poll(lambda: sockets(front.process.pid) <= before[0] + 4, 90, "closed sockets", 0.5)
        after = resident(front.process.pid)
        log = front.text
    assert "Traceback" not in log
    assert after < 1.25 * before[1] + (16 << 20), (before[1], after)
    answers = Counter(word.rpartition(" ")[2] for word in seen.elements())
    assert answers["200"] > 50
    assert seen["malformed 400"] > 0
    assert seen["too-long 413"] > 0
    print(json.dumps({"seen": seen, "sockets": before[0], "resident": [before[1], after]}))

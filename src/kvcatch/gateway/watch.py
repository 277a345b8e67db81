"""Engines met once and looked at ever after, however they are reached."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.gateway.counting import Counter
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.refusal import Refusal

logger = logging.getLogger("kvcatch.gateway")

#: between two looks at an engine: its recorder is memory of this machine, its page costs the engine time
RECORDER_INTERVAL, PAGE_INTERVAL = 0.25, 1.0
#: between two lists of an engine's models
MODELS_INTERVAL = 30.0

#: (engine, method, path, JSON body or None) -> JSON answer; raises Refusal
Call = Callable[[Engine, str, str, Any], Awaitable[Any]]


class Watch:
    """Keeps what a gate knows about its engines fresh. tokenizer: as for ``Proxy``."""

    def __init__(self, gate: Gate, call: Call, tokenizer: str | None = None) -> None:
        self.gate = gate
        self._call = call
        self._tokenizer = tokenizer
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Meet every engine once, then keep looking at them."""
        await asyncio.gather(*(self.meet(engine) for engine in self.gate.engines))
        self.gate.start()
        self._tasks = [asyncio.create_task(self._follow(engine)) for engine in self.gate.engines]

    async def stop(self) -> None:
        """Stop looking, and settle what is open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.gate.close()

    async def meet(self, engine: Engine) -> None:
        """Learn an engine's models and take a first look at its pool. Never raises for an engine that is down."""
        try:
            answer = await self._call(engine, "GET", "/v1/models", None)
        except Refusal:
            engine.healthy = False
            return
        rows = answer.get("data") if isinstance(answer, dict) else None
        rows = [row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)]
        engine.models = tuple(row["id"] for row in rows)
        lengths = [row["max_model_len"] for row in rows if isinstance(row.get("max_model_len"), int)]
        engine.max_model_len = max(lengths, default=engine.max_model_len)
        engine.healthy = True
        counter = Counter(lambda path, body: self._call(engine, "POST", path, body))
        if engine.url not in self.gate.counters:
            self.gate.counters[engine.url] = counter
        else:
            counter = self.gate.counters[engine.url]
        root = next((row.get("root") for row in rows if isinstance(row.get("root"), str)), None)
        folder = self._tokenizer or root
        if counter.local is None and folder and rows:
            await counter.adopt(folder, engine.models[0])
        await self._look(engine)

    async def _follow(self, engine: Engine) -> None:
        met = time.monotonic()
        while True:
            source = engine.reading.source if engine.reading is not None else "metrics"
            await asyncio.sleep(RECORDER_INTERVAL if source == "recorder" else PAGE_INTERVAL)
            now = time.monotonic()
            if not engine.healthy or now - met > MODELS_INTERVAL:
                met = now
                await self.meet(engine)
            else:
                await self._look(engine)
            self.gate.door.drain()

    async def _look(self, engine: Engine) -> None:
        try:
            reading = await asyncio.to_thread(engine.look)
        except KVCatchError as error:
            logger.debug("%s", error)
            engine.too_old(time.monotonic())
            return
        engine.take(reading, time.monotonic())


def understood(path: str, status: int, found: bytes) -> Any:
    """The JSON of an engine's answer to a small call. Raises Refusal: 400 as the engine said, 502 for nonsense."""
    if status in {400, 422}:
        raise Refusal(400, "rejected", _message(found), code="invalid_request")
    if status == 404 and path == "/tokenize" and b"model" in found:
        raise Refusal(404, "model", "No engine serves this model.", code="model_not_found")
    if status != 200:
        raise Refusal(502, "upstream", f"The engine answered {status} to {path}.", retry_seconds=2.0)
    try:
        return msgspec.json.decode(found)
    except msgspec.DecodeError:
        raise Refusal(502, "upstream", f"The engine's answer to {path} is not JSON.") from None


def _message(found: bytes) -> str:
    """The engine's own words for a refusal, without what it quotes."""
    try:
        document = msgspec.json.decode(found)
    except msgspec.DecodeError:
        return "The engine refused the prompt."
    error = document.get("error", document) if isinstance(document, dict) else {}
    kind = error.get("type") if isinstance(error, dict) else None
    suffix = f" ({kind})" if isinstance(kind, str) and len(kind) < 40 else ""
    return f"The engine refused to render the prompt{suffix}."

"""A stand-in for an OpenAI server that answers as told; for faults, where a real engine cannot be made to fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answerer = Callable[[web.Request, dict[str, Any]], Any]


class Fake:
    """What arrived, and when. ``answer`` may be replaced."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.url = ""
        self.answer: Answerer = stream

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        found: web.StreamResponse = await self.answer(request, body)
        return found

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Bodies without those of the warm-up, as numbered by the sender.

        Requests a few milliseconds apart come by connections of their own and may overtake each other.
        """
        return [body for _, _, body in self._numbered()]

    @property
    def ids(self) -> list[str]:
        """Request ids of ``asked``."""
        return [name for _, name, _ in self._numbered()]

    def _numbered(self) -> list[tuple[int, str, dict[str, Any]]]:
        names = [headers["X-Request-Id"] for headers in self.headers]
        rows = [(name, body) for name, body in zip(names, self.bodies, strict=True) if "warm-up" not in name]
        return sorted(
            ((int(name.rpartition("r")[2]), name, body) for name, body in rows), key=lambda row: row[0]
        )


async def stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Every token at once, then the usage."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    count = body["max_tokens"]
    for number in range(count):
        choice = {"index": 0, "text": "x", "finish_reason": "length" if number == count - 1 else None}
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count, "prompt_tokens_details": None}
    await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    return response


@contextmanager
def fake_server() -> Iterator[Fake]:
    """The server in a thread of its own."""
    fake, ready, loop = Fake(), threading.Event(), asyncio.new_event_loop()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "made-up", "max_model_len": 4096}]})

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", fake.completions)
        runner = web.AppRunner(app, shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        fake.url = f"http://127.0.0.1:{port}"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)

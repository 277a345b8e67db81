"""An engine's HTTP side for faults, and a gateway in front of it in the same event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from kvcatch.gateway.engine import Engine
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.limits import Limits
from kvcatch.gateway.policy import from_document
from kvcatch.gateway.proxy import Proxy
from kvcatch.gateway.service import _silent

PAGE = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="{blocks}",sliding_window="None"}} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="stub"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="stub"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="stub"}} {usage}
"""

Answer = Callable[["Stub", web.Request], Awaitable[web.StreamResponse]]


async def plain(stub: Stub, request: web.Request) -> web.StreamResponse:
    """A finished completion of two tokens."""
    return web.json_response({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})


@dataclass
class Stub:
    """One token is one character; blocks of 16 tokens."""

    blocks: int = 101
    max_model_len: int = 4096
    usage: float = 0.0
    answer: Answer = plain
    seen: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    cancelled: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"):
            app.router.add_post(route, self._work)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "stub", "max_model_len": self.max_model_len}]}
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=PAGE.format(blocks=self.blocks, running=self.running, usage=self.usage))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body.get("prompt")
        if text is None:
            text = "".join(f"<{m['role']}>{m.get('content') or ''}" for m in body["messages"]) + "<assistant>"
        return web.json_response({"count": len(text), "tokens": [1] * len(text)})

    async def _work(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((dict(request.headers), json.loads(await request.read())))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self.answer(self, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@dataclass
class Running:
    """A gateway that serves."""

    url: str
    port: int
    gate: Gate
    proxy: Proxy
    stubs: list[Stub]
    session: aiohttp.ClientSession

    @property
    def stub(self) -> Stub:
        return self.stubs[0]

    async def post(
        self, route: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, Any, Any]:
        """(status, headers, JSON) of one request."""
        document = {"model": "stub", "prompt": "hello", "max_tokens": 4} | body
        if "chat" in route:
            document.pop("prompt", None)
        async with self.session.post(self.url + route, json=document, headers=headers) as answer:
            return answer.status, answer.headers, await answer.json(content_type=None)


async def until(ready: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Give way until something is so. TimeoutError names it."""
    end = asyncio.get_running_loop().time() + seconds
    while not ready():
        if asyncio.get_running_loop().time() > end:
            raise TimeoutError(what)
        await asyncio.sleep(0.005)


@asynccontextmanager
async def gateway(
    *stubs: Stub, limiter: Limits | None = None, upstream_key: str | None = None, **document: Any
) -> AsyncIterator[Running]:
    """A gateway in front of these engines; the keywords are tables of a policy file."""
    engines, runners = list(stubs) or [Stub()], []
    urls = []
    for stub in engines:
        runner = web.AppRunner(stub.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    gate = Gate(from_document(document), [Engine(url) for url in urls], limiter)
    proxy = Proxy(gate, upstream_key=upstream_key)
    await proxy.start()
    front = web.AppRunner(
        proxy.application(), handler_cancellation=True, auto_decompress=False, access_log=None,
        shutdown_timeout=0.1, logger=_silent(), max_field_size=16384,
    )  # fmt: skip
    await front.setup()
    await web.TCPSite(front, "127.0.0.1", 0).start()
    port = front.addresses[0][1]
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        try:
            yield Running(f"http://127.0.0.1:{port}", port, gate, proxy, engines, session)
        finally:
            for stub in engines:
                stub.go.set()
            await front.cleanup()
            await proxy.stop()
            for runner in runners:
                await runner.cleanup()

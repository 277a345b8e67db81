"""The proxy: aiohttp on both sides, one process, any number of engines.

aiohttp because it is server and client in one event loop with one parser (llhttp), relays raw chunks without
decoding them, cancels a handler when its client leaves, and is what vLLM itself already depends on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvcatch import __version__
from kvcatch.gateway import headers
from kvcatch.gateway.body import ROUTES
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.govern import governed, internal
from kvcatch.gateway.intake import ClientGone
from kvcatch.gateway.refusal import Refusal
from kvcatch.gateway.relay import read_body, relay
from kvcatch.gateway.watch import Watch, understood

logger = logging.getLogger("kvcatch.gateway")

#: an idle connection is used again for so long: uvicorn closes its side after 5 s
KEEP_ALIVE = 3.0
CONNECT_SECONDS = 5.0
#: GET routes that pass to one engine as they are
PASSED = ("/version", "/v1/models/{model}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """Serves one gate.

    upstream_key: API key for the engines. timeout: seconds without any byte from an engine. tokenizer: folder with
    tokenizer.json for all models, None = the model's own folder when it is on this machine.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        upstream_key: str | None = None,
        timeout: float = 600.0,
        tokenizer: str | None = None,
    ) -> None:
        self.gate = gate
        self._key = upstream_key
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=timeout)
        self._watch = Watch(gate, self.call, tokenizer)
        self._session: aiohttp.ClientSession | None = None
        #: told of every answered request; must neither wait nor raise
        self.copy: Callable[[Flight, bytes, web.StreamResponse], None] | None = None

    # ---- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Meet every engine once, then keep looking at them."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=1 << 18,
        )
        await self._watch.start()

    async def stop(self) -> None:
        """Stop looking, settle what is open, disconnect."""
        await self._watch.stop()
        if self._session is not None:
            await self._session.close()
        for engine in self.gate.engines:
            engine.close()

    def application(self) -> web.Application:
        """The routes that clients see."""
        app = web.Application(middlewares=[_guard], client_max_size=self.gate.policy.max_body)
        for route in ROUTES:
            app.router.add_post(route, self._handler(route))
        app.router.add_get("/v1/models", self._models)
        for route in PASSED:
            app.router.add_get(route, self._pass)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    # ---- engines ---------------------------------------------------------------------------------------

    async def call(self, engine: Engine, method: str, path: str, body: Any = None) -> Any:
        """One small call to an engine. Raises Refusal: 400 as the engine said, 502 when it does not answer."""
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        wanted = CIMultiDict({"Content-Type": "application/json", "Accept-Encoding": "identity"})
        if self._key:
            wanted["Authorization"] = f"Bearer {self._key}"
        try:
            async with self._session.request(
                method, engine.url + path, data=data, headers=wanted, allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=30, sock_connect=CONNECT_SECONDS),
            ) as answer:  # fmt: skip
                found = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            engine.healthy = engine.healthy and not isinstance(error, aiohttp.ClientConnectorError)
            raise Refusal(502, "upstream", "The engine does not answer.", retry_seconds=2.0) from None
        return understood(path, answer.status, found)

    # ---- requests --------------------------------------------------------------------------------------

    def _handler(self, route: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            client = _Client(self, request)
            return await governed(self.gate, route, request.headers.get("X-Request-Id"), client, self.copy)

        return handle

    async def send(
        self, request: web.Request, flight: Flight, engine: Engine, payload: bytes, extra: dict[str, str]
    ) -> web.StreamResponse:
        """Ask an engine and relay its answer. Raises Refusal or ClientGone."""
        assert self._session is not None
        tags = self.gate.policy.tags
        consumed = (tags.tenant_header, tags.user_header)
        wanted = headers.to_engine(request.headers, flight.request_id, self._key, consumed)
        flight.mark_sent()
        try:
            try:
                return await self._exchange(request, flight, engine, payload, wanted, extra)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if flight.answered or isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # The engine closed an idle connection while we began to use it: it has not read the request.
                logger.info("%s closed a kept connection, trying another", engine.label)
                return await self._exchange(request, flight, engine, payload, wanted, extra)
        except aiohttp.ClientConnectorError as error:
            logger.warning("%s: %s", engine.label, error)
            engine.healthy = flight.sent = False
            raise Refusal(502, "upstream", "The engine does not answer.", retry_seconds=2.0) from None
        except TimeoutError:
            if flight.answered:
                _cut(request)
                raise ClientGone from None
            raise Refusal(504, "upstream-timeout", "The engine sent nothing for too long.") from None
        except aiohttp.ClientError as error:
            logger.warning("%s: %s", engine.label, type(error).__name__)
            if flight.answered:
                # The client must see that the answer is not whole.
                _cut(request)
                raise ClientGone from None
            raise Refusal(
                502, "upstream", "The engine broke off before it answered.", retry_seconds=2.0
            ) from None

    async def _exchange(
        self, request: web.Request, flight: Flight, engine: Engine, payload: bytes, wanted: CIMultiDict[str],
        extra: dict[str, str],
    ) -> web.StreamResponse:  # fmt: skip
        assert self._session is not None
        async with self._session.post(
            engine.url + flight.route, data=payload, headers=wanted, allow_redirects=False,
            timeout=self._timeout, skip_auto_headers=("User-Agent", "Accept-Encoding"),
        ) as answer:  # fmt: skip
            return await relay(request, flight, answer, extra)

    # ---- everything else -------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """One engine's list as it is; several engines' lists as one."""
        engines = [engine for engine in self.gate.engines if engine.healthy] or self.gate.engines
        if len(engines) == 1:
            return await self._pass(request)
        rows: dict[str, Any] = {}
        for answer in await asyncio.gather(
            *(self.call(engine, "GET", "/v1/models") for engine in engines), return_exceptions=True
        ):
            if isinstance(answer, dict):
                rows |= {
                    row["id"]: row for row in answer.get("data", ()) if isinstance(row, dict) and "id" in row
                }
        return web.json_response({"object": "list", "data": list(rows.values())})

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        """A GET without a body, to the first engine that is well."""
        assert self._session is not None
        engines = sorted(self.gate.engines, key=lambda engine: not engine.healthy)
        wanted = headers.to_engine(request.headers, request.headers.get("X-Request-Id") or "-", self._key)
        del wanted["X-Request-Id"], wanted["Content-Type"]
        try:
            async with self._session.get(
                engines[0].url + request.rel_url.raw_path_qs, headers=wanted, allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=30),
            ) as answer:  # fmt: skip
                kept = headers.to_client(answer.headers, "-")
                del kept["X-Request-Id"]
                kept.popall("Content-Length", None)
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
        except (aiohttp.ClientError, TimeoutError):
            refusal = Refusal(502, "upstream", "The engine does not answer.", retry_seconds=2.0)
            return web.Response(status=502, headers=CIMultiDict(refusal.headers()), body=refusal.body())

    async def _health(self, request: web.Request) -> web.StreamResponse:
        up = sum(engine.healthy for engine in self.gate.engines)
        answer = {"status": "ok" if up else "no engine", "engines": len(self.gate.engines), "engines_up": up,
                  "version": __version__}  # fmt: skip
        return web.json_response(answer, status=200 if up else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        page, content_type = self.gate.meters.page(self.gate, request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})


class _Client:
    """The client behind one aiohttp request."""

    def __init__(self, proxy: Proxy, request: web.Request) -> None:
        self._proxy = proxy
        self._request = request

    def headers(self) -> Iterable[tuple[str, str]]:
        """As they came."""
        return self._request.headers.items()

    async def body(self, limit: int) -> bytes:
        """Whole. Raises Refusal."""
        return await read_body(self._request, limit)

    async def send(
        self, flight: Flight, engine: Engine, payload: bytes, extra: dict[str, str]
    ) -> web.StreamResponse:
        """Through the proxy's connections."""
        return await self._proxy.send(self._request, flight, engine, payload, extra)

    async def refuse(self, flight: Flight, refusal: Refusal) -> web.StreamResponse:
        """The refusal as an answer; the server sends it."""
        found = CIMultiDict(refusal.headers())
        found["X-Request-Id"] = flight.request_id
        return web.Response(status=refusal.status, headers=found, body=refusal.body())

    def cut(self) -> None:
        """Abort the connection."""
        _cut(self._request)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer of ours in OpenAI's shape; no exception's text reaches a log or a client."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        word = {404: "no-route", 405: "method", 413: "body-size"}.get(error.status, "http")
        refusal = Refusal(error.status, word, f"{error.reason}.")
    except ClientGone:
        raise asyncio.CancelledError from None
    except Exception as error:  # noqa: BLE001 (the door answers, whatever failed)
        refusal = internal(error)
    return web.Response(status=refusal.status, headers=CIMultiDict(refusal.headers()), body=refusal.body())


def _cut(request: web.Request) -> None:
    """End the client's connection without the end of the message."""
    if request.transport is not None:
        request.transport.abort()

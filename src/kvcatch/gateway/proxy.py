"""The proxy: aiohttp on both sides, one process, any number of engines.

aiohttp because it is server and client in one event loop with one parser (llhttp), relays raw chunks without
decoding them, cancels a handler when its client leaves, and is what vLLM itself already depends on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvcatch import __version__
from kvcatch.errors import KVCatchError
from kvcatch.gateway import headers
from kvcatch.gateway.body import ROUTES
from kvcatch.gateway.counting import Counter
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.refusal import Refusal
from kvcatch.gateway.relay import ClientGone, read_body, relay

logger = logging.getLogger("kvcatch.gateway")

#: an idle connection is used again for so long: uvicorn closes its side after 5 s
KEEP_ALIVE = 3.0
CONNECT_SECONDS = 5.0
#: between two looks at an engine: its recorder is memory of this machine, its page costs the engine time
RECORDER_INTERVAL, PAGE_INTERVAL = 0.25, 1.0
#: between two lists of an engine's models
MODELS_INTERVAL = 30.0
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
        self._tokenizer = tokenizer
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        #: told of every answered request; must neither wait nor raise
        self.copy: Callable[[Flight, bytes, web.StreamResponse | None], None] | None = None

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
        await asyncio.gather(*(self.meet(engine) for engine in self.gate.engines))
        self._tasks = [asyncio.create_task(self._follow(engine)) for engine in self.gate.engines]

    async def stop(self) -> None:
        """Stop looking, settle what is open, disconnect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.gate.settled()
        await self.gate.limits.close()
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

    async def meet(self, engine: Engine) -> None:
        """Learn an engine's models and take a first look at its pool. Never raises for an engine that is down."""
        try:
            answer = await self._json(engine, "GET", "/v1/models")
        except Refusal:
            engine.healthy = False
            return
        rows = answer.get("data") if isinstance(answer, dict) else None
        rows = [row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)]
        engine.models = tuple(row["id"] for row in rows)
        lengths = [row["max_model_len"] for row in rows if isinstance(row.get("max_model_len"), int)]
        engine.max_model_len = max(lengths, default=engine.max_model_len)
        engine.healthy = True
        counter = Counter(lambda path, body: self._json(engine, "POST", path, body))
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

    async def _json(self, engine: Engine, method: str, path: str, body: Any = None) -> Any:
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
        if answer.status in {400, 422}:
            raise Refusal(400, "rejected", _message(found), code="invalid_request")
        if answer.status == 404 and path == "/tokenize" and b"model" in found:
            raise Refusal(404, "model", "No engine serves this model.", code="model_not_found")
        if answer.status != 200:
            raise Refusal(
                502, "upstream", f"The engine answered {answer.status} to {path}.", retry_seconds=2.0
            )
        try:
            return msgspec.json.decode(found)
        except msgspec.DecodeError:
            raise Refusal(502, "upstream", f"The engine's answer to {path} is not JSON.") from None

    # ---- requests --------------------------------------------------------------------------------------

    def _handler(self, route: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._governed(request, route)

        return handle

    async def _governed(self, request: web.Request, route: str) -> web.StreamResponse:
        gate = self.gate
        flight = gate.begin(route, request.headers.get("X-Request-Id"))
        outcome, reason = "failed", "internal"
        try:
            raw = await read_body(request, gate.policy.max_body)
            ask = await gate.judge(flight, request.headers.items(), raw)
            engine = await gate.admit(flight)
            extra = (
                {**ask.changed, "x-kvcatch-engine": engine.label} if len(gate.engines) > 1 else ask.changed
            )
            if flight.entry is not None and flight.entry.observed:
                extra = {**extra, "x-kvcatch-would-hold": ",".join(flight.entry.observed)}
            payload = ask.encode()
            response = await self._send(request, flight, engine, payload, extra)
            outcome, reason = (
                "relayed",
                "ok" if response.status < 400 else f"status-{response.status // 100}xx",
            )
            if self.copy is not None:
                self.copy(flight, payload, response)
            return response
        except Refusal as refusal:
            outcome, reason = "refused", refusal.reason
            return self._refuse(flight, refusal)
        except ClientGone:
            outcome, reason = "cancelled", "slow-client"
            _cut(request)
            raise
        except asyncio.CancelledError:
            outcome, reason = "cancelled", "client"
            if not flight.aborted:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            outcome, reason = "cancelled", flight.aborted
            if flight.answered:
                _cut(request)
                raise
            return self._refuse(
                flight, Refusal(409, "aborted", "This request was aborted by an operator.", code="aborted")
            )
        finally:
            gate.end(flight, outcome, reason)

    async def _send(
        self, request: web.Request, flight: Flight, engine: Engine, payload: bytes, extra: dict[str, str]
    ) -> web.StreamResponse:
        assert self._session is not None
        tags = self.gate.policy.tags
        consumed = (tags.tenant_header, tags.user_header)
        wanted = headers.to_engine(request.headers, flight.request_id, self._key, consumed)
        flight.sent_at = time.monotonic()
        flight.sent = (
            True  # from here on the engine may work on it, also when its client leaves before it answers
        )
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

    def _refuse(self, flight: Flight, refusal: Refusal) -> web.Response:
        status = refusal.status
        if status == 503:
            status = self.gate.policy.overload_status
        found = CIMultiDict(refusal.headers())
        found["X-Request-Id"] = flight.request_id
        return web.Response(status=status, headers=found, body=refusal.body())

    # ---- everything else -------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """One engine's list as it is; several engines' lists as one."""
        engines = [engine for engine in self.gate.engines if engine.healthy] or self.gate.engines
        if len(engines) == 1:
            return await self._pass(request)
        rows: dict[str, Any] = {}
        for answer in await asyncio.gather(
            *(self._json(engine, "GET", "/v1/models") for engine in engines), return_exceptions=True
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
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        self.gate.meters.look(self.gate)
        return web.Response(body=encode(self.gate.meters.registry), headers={"Content-Type": content_type})


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
        # Where it failed, without the exception's own words: they may quote the request.
        where = "".join(traceback.format_tb(error.__traceback__))
        logger.error("internal error: %s\n%s", type(error).__name__, where)
        refusal = Refusal(500, "internal", "The gateway failed on this request.")
    return web.Response(status=refusal.status, headers=CIMultiDict(refusal.headers()), body=refusal.body())


def _cut(request: web.Request) -> None:
    """End the client's connection without the end of the message."""
    if request.transport is not None:
        request.transport.abort()


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

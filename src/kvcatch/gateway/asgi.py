"""One gate inside an engine's API server: ASGI on both sides, no socket but the operators' own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcatch.capture import tags
from kvcatch.errors import KVCatchError
from kvcatch.gateway.admin import Admin, inside_path, sweep
from kvcatch.gateway.answer import AnswerMeter
from kvcatch.gateway.body import ROUTES
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.govern import governed, internal
from kvcatch.gateway.inner import Inner, header, route
from kvcatch.gateway.inside import CONFIG_VARIABLE, App, Message, Receive, Send
from kvcatch.gateway.intake import ClientGone, read_whole
from kvcatch.gateway.policy import from_document
from kvcatch.gateway.policyfile import load
from kvcatch.gateway.refusal import Refusal
from kvcatch.gateway.reload import Reloader
from kvcatch.gateway.shared import limits_of
from kvcatch.gateway.watch import Watch
from kvcatch.store.paths import default_directory

#: where a scraper finds the gateway's own metrics: ``/metrics`` is the engine's
METRICS = "/kvcatch/metrics"
#: an engine that was told that a client left has so long to stop by itself, seconds
STOP_SECONDS = 10.0
#: of a policy file, without a meaning here
UNUSED = (("gateway", "listen"), ("gateway", "upstreams"), ("gateway", "upstream_timeout"), ("mirror", "url"))


class Inside:
    """Governs one API server process. Raises KVCatchError for a bad policy.

    give_up: called once, with the reason, when the start fails later; from then on everything passes.
    """

    def __init__(
        self, app: App, environ: Mapping[str, str], give_up: Callable[[BaseException], None]
    ) -> None:
        self.app = app
        self.gate: Gate | None = None
        self._environ = environ
        self._give_up = give_up
        self._config = environ.get(CONFIG_VARIABLE) or None
        self._document = self._load()
        self._policy = from_document(self._document)
        self._limits = limits_of(self._document)
        self._inner = Inner(app, environ)
        self._starting: asyncio.Task[bool] | None = None
        self._life = contextlib.AsyncExitStack()

    def _load(self) -> dict[str, Any]:
        return load(self._config) if self._config else {}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        path = route(scope) if scope["type"] == "http" else ""
        ours = path in ROUTES and scope["method"] == "POST"
        if not (ours or path == METRICS) or not await self._started(scope):
            await self.app(scope, receive, send)
        elif ours:
            await self._govern(scope, path, receive, send)
        else:
            assert self.gate is not None
            page, kind = self.gate.meters.page(self.gate, header(scope, b"accept") or "")
            await respond(send, 200, {"Content-Type": kind}, page)

    # ---- life ------------------------------------------------------------------------------------------

    async def _lifespan(self, scope: Any, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                self._begin(scope)  # in the background: the server must not wait for us

        try:
            await self.app(scope, receive, watched)
        finally:
            await self.stop()

    def _begin(self, scope: Any) -> asyncio.Task[bool]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(scope))
        return self._starting

    async def _started(self, scope: Any) -> bool:
        """Whether requests are governed; waits for a start that is under way."""
        task = self._begin(scope)
        return task.result() if task.done() else await asyncio.shield(task)

    async def _start(self, scope: Any) -> bool:
        try:
            await self._build(scope)
        except Exception as error:  # noqa: BLE001 (whatever it is, the engine serves)
            self.gate = None
            await self._life.aclose()
            self._give_up(error)
            return False
        return True

    async def _build(self, scope: Any) -> None:
        directory = default_directory(self._environ)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        tags.load_key(directory)
        host, port, processes = await asyncio.to_thread(self._inner.learn, scope)
        engine = Engine(f"http://{host}:{port}", None, self._policy.reserve_ratio)
        gate = Gate(self._policy, [engine], self._limits)
        self._life.callback(engine.close)
        watch = Watch(gate, self._inner.call, self._document.get("gateway", {}).get("tokenizer"))
        self._life.push_async_callback(watch.stop)
        await watch.start()
        if not engine.models:
            raise KVCatchError(
                "/v1/models of this server names no model.", "With an API key: KVCATCH_UPSTREAM_KEY."
            )
        await asyncio.to_thread(sweep, directory, port)
        admin = Admin(gate, inside_path(directory, port, os.getpid()))
        self._life.push_async_callback(admin.stop)
        await admin.start()
        reloading = asyncio.create_task(Reloader(gate, self._document, self._load, self._config).watch())
        self._life.callback(reloading.cancel)
        self.gate = gate
        for table, key in UNUSED:
            if key in self._document.get(table, {}):
                _say(f"{table}.{key} has no meaning inside the engine's server and is not used")
        shared = bool(self._document.get("redis", {}).get("url"))
        if processes > 1:
            what = "admission and classes" if shared else "limits, admission and classes"
            _say(f"{processes} API server processes: {what} count in each of them for itself")
        pool = (
            f"{engine.info.usable_blocks} blocks of {engine.info.block_size}"
            if engine.reading
            else "pool unknown"
        )
        counts = "locally" if gate.counters[engine.url].local is not None else "by the engine"
        _say(
            f"governing requests of {engine.label}: {pool}, prompts counted {counts}, mode {self._policy.rules.mode}"
        )

    async def stop(self) -> None:
        """Close what was opened; requests that come later pass."""
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await self._life.aclose()

    # ---- requests --------------------------------------------------------------------------------------

    async def _govern(self, scope: Any, path: str, receive: Receive, send: Send) -> None:
        assert self.gate is not None
        client = _Client(self.app, scope, receive, send)
        try:
            await governed(self.gate, path, header(scope, b"x-request-id"), client)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            # The client left, or its stream was aborted: the server closes what is not whole.
            if not (client.gone or client.was_cut):
                raise
            task = asyncio.current_task()
            if task is not None and client.gone:
                task.uncancel()
        except Exception as error:
            if client.failed or client.answered:
                raise  # the engine's own fault: the server has its way of saying so
            await client.answer(internal(error))
        finally:
            client.close()


@dataclass(frozen=True)
class Sent:
    """An answer that has gone."""

    status: int


class _Client:
    """The client behind one ASGI call, and the engine's handlers behind us."""

    def __init__(self, app: App, scope: Any, receive: Receive, send: Send) -> None:
        self.gone = False  # the client left before its answer was whole
        self.was_cut = False
        self.failed = False  # the engine's handler raised
        self.answered = False
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        self._task = asyncio.current_task()
        self._left = asyncio.Event()  # what the engine's handler sees: nobody waits any more
        self._deaf = False
        self._whole = False
        self._listener: asyncio.Task[None] | None = None

    def headers(self) -> Iterable[tuple[str, str]]:
        """As they came."""
        return [(k.decode("latin-1"), v.decode("latin-1")) for k, v in self._scope["headers"]]

    async def body(self, limit: int) -> bytes:
        """Whole. Raises Refusal, ClientGone."""
        length = header(self._scope, b"content-length")
        size = int(length) if length is not None and length.isdigit() else None
        found = await read_whole(self._chunks(), header(self._scope, b"content-encoding"), size, limit)
        self._listener = asyncio.create_task(self._listen())
        return found

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    async def _listen(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
        if not self._whole and self._task is not None:
            self.gone = True
            self._task.cancel()

    async def send(self, flight: Flight, engine: Engine, payload: bytes, extra: dict[str, str]) -> Sent:
        """Call the engine's handler in a task of its own, so that it can be told to stop as its server tells it."""
        del engine  # there is one
        dropped = (b"content-length", b"transfer-encoding", b"x-request-id", b"content-type")
        named = [(k, v) for k, v in self._scope["headers"] if k.lower() not in dropped]
        named += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(payload)).encode()),
            (b"x-request-id", flight.request_id.encode()),
        ]
        flight.mark_sent()
        status = 500
        meter: AnswerMeter | None = None
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": payload, "more_body": False}
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def relay(message: Message) -> None:
            nonlocal status, meter
            if self._deaf:
                return
            if message["type"] == "http.response.start":
                status = message["status"]
                meter = _meter(flight, message)
                message = {**message, "headers": _named(message["headers"], flight.request_id, extra)}
                flight.answered = self.answered = True
            elif message["type"] == "http.response.body" and meter is not None:
                meter.feed(message.get("body", b""))
                if not message.get("more_body", False):
                    meter.end()
                    self._whole = True
            await self._send(message)
            if self._whole:
                self._left.set()  # as servers do: who listens for the end of the connection may stop

        handler = asyncio.ensure_future(self._app({**self._scope, "headers": named}, receive, relay))
        try:
            await asyncio.wait({handler})
        except asyncio.CancelledError:
            self._deaf = True
            self._left.set()
            await _end(handler)
            raise
        if handler.cancelled():
            raise asyncio.CancelledError
        self.failed = handler.exception() is not None
        handler.result()
        return Sent(status)

    async def refuse(self, flight: Flight, refusal: Refusal) -> Sent:
        """Answer without the engine."""
        return await self.answer(refusal, flight.request_id)

    async def answer(self, refusal: Refusal, request_id: str | None = None) -> Sent:
        """The refusal as a whole answer."""
        found = refusal.headers()
        if request_id is not None:
            found["X-Request-Id"] = request_id
        self._whole = self.answered = True
        await respond(self._send, refusal.status, found, refusal.body())
        return Sent(refusal.status)

    def cut(self) -> None:
        """Nothing more is sent: the server closes a connection whose answer is not whole."""
        self._deaf = self.was_cut = True

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.cancel()


async def _end(handler: asyncio.Future[None]) -> None:
    """Wait for a handler that was told that its client left; its outcome interests nobody."""
    await asyncio.wait({handler}, timeout=STOP_SECONDS)
    if not handler.done():
        handler.cancel()
        await asyncio.wait({handler}, timeout=STOP_SECONDS)
    if handler.done() and not handler.cancelled():
        handler.exception()


def _meter(flight: Flight, start: Message) -> AnswerMeter:
    found = {k.lower(): v.decode("latin-1") for k, v in start["headers"]}
    length = found.get(b"content-length")
    size = int(length) if length is not None and length.isdigit() else None
    kind, encoding = found.get(b"content-type"), found.get(b"content-encoding")
    return AnswerMeter(flight, start["status"], kind, encoding, size)


def _named(given: Iterable[tuple[bytes, bytes]], request_id: str, extra: Mapping[str, str]) -> list[Any]:
    """The answer's headers with ours."""
    kept = [(k, v) for k, v in given if k.lower() != b"x-request-id"]
    ours = {"x-request-id": request_id, **extra}
    return kept + [(name.encode(), value.encode("latin-1", "replace")) for name, value in ours.items()]


async def respond(send: Send, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """One whole answer."""
    named = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    named.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _say(text: str) -> None:
    print(f"kvcatch: {text}", file=sys.stderr, flush=True)

"""The admin socket: a Unix socket in the recorder directory, mode 0600. Who may write there may abort and hold."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import http.client
import os
import socket
import time
from typing import Any

import msgspec
from aiohttp import web

from kvcatch.errors import KVCatchError
from kvcatch.gateway.body import ROUTES
from kvcatch.gateway.explain import explain
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.gate import Gate

#: longest tenant name and longest hold in seconds
MAX_NAME, MAX_HOLD = 256, 30 * 86400.0
#: a socket path may have this many bytes
MAX_PATH = 100


def socket_path(directory: str, port: int) -> str:
    """Where the gateway on a port listens for its operators."""
    return os.path.join(directory, f"gateway-{port}.sock")


def inside_path(directory: str, port: int, pid: int) -> str:
    """Where the gateway inside one API server process listens: several may serve one port."""
    return os.path.join(directory, f"gateway-{port}-{pid}.sock")


def sweep(directory: str, port: int) -> None:
    """Remove what killed processes behind a port left. Blocking."""
    for path in glob.glob(os.path.join(glob.escape(directory), f"gateway-{port}-*.sock")):
        if not _answers(path):
            with contextlib.suppress(OSError):
                os.unlink(path)


class Admin:
    """Serves operators of one gate on a Unix socket."""

    def __init__(self, gate: Gate, path: str) -> None:
        if len(os.fsencode(path)) > MAX_PATH:
            raise KVCatchError(f"{path}: too long for a socket.", "Set KVCATCH_DIR to a shorter folder.")
        self.gate = gate
        self.path = path
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. A socket that a killed gateway left behind is replaced. Raises KVCatchError."""
        app = web.Application()
        app.router.add_post("/abort", self._abort)
        app.router.add_post("/hold", self._hold)
        app.router.add_post("/explain", self._explain)
        app.router.add_get("/state", self._state)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        if os.path.exists(self.path):
            if await asyncio.to_thread(_answers, self.path):
                raise KVCatchError(f"{self.path} is in use: another gateway runs on this port.")
            os.unlink(self.path)
        before = os.umask(0o177)
        try:
            await web.UnixSite(self._runner, self.path).start()
        finally:
            os.umask(before)

    async def stop(self) -> None:
        """Stop listening and remove the socket."""
        if self._runner is not None:
            await self._runner.cleanup()
        if os.path.exists(self.path):
            os.unlink(self.path)

    async def _abort(self, request: web.Request) -> web.Response:
        document = await _document(request)
        name = document.get("request_id")
        if not isinstance(name, str) or not name:
            return _answer(400, {"error": "request_id must be text"})
        ended = self.gate.abort(name)
        return _answer(200, {"aborted": [_row(flight) for flight in ended]})

    async def _hold(self, request: web.Request) -> web.Response:
        document = await _document(request)
        tenant, seconds = document.get("tenant"), document.get("seconds")
        if not isinstance(tenant, str) or not tenant or len(tenant) > MAX_NAME:
            return _answer(400, {"error": "tenant must be a short text"})
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_HOLD:
            return _answer(400, {"error": f"seconds must be a number from 0 to {MAX_HOLD:.0f}"})
        self.gate.hold(tenant, float(seconds))
        running = sum(flight.tenant == tenant for flight in self.gate.flights.values())
        return _answer(200, {"tenant": tenant, "seconds": seconds, "in_flight": running})

    async def _explain(self, request: web.Request) -> web.Response:
        document = await _document(request)
        route = document.get("route", ROUTES[0])
        given = document.get("headers") or {}
        if route not in ROUTES or not isinstance(given, dict):
            return _answer(400, {"error": "route or headers are wrong"})
        body = msgspec.json.encode(document.get("body"))
        return _answer(
            200, await explain(self.gate, route, [(str(k), str(v)) for k, v in given.items()], body)
        )

    async def _state(self, request: web.Request) -> web.Response:
        gate = self.gate
        now = time.monotonic()
        engines = [
            {
                "engine": engine.label,
                "up": engine.healthy,
                "models": engine.models,
                "source": engine.reading.source if engine.reading is not None else None,
                "age_seconds": engine.age(now),
                "degraded": engine.degraded(now),
                "usable_blocks": engine.ledger.usable if engine.ledger is not None else None,
                "planned_blocks": engine.ledger.planned_blocks() if engine.ledger is not None else None,
                "limit_blocks": engine.ledger.limit if engine.ledger is not None else None,
                "foreign_blocks": engine.ledger.foreign if engine.ledger is not None else None,
                "in_flight": engine.in_flight,
                "local_tokenizer": bool(getattr(gate.counters.get(engine.url), "local", None)),
            }
            for engine in gate.engines
        ]
        held = {tenant: gate.door.on_hold(tenant) for tenant in list(gate.door.held)}
        return _answer(
            200,
            {
                "mode": gate.policy.rules.mode, "engines": engines, "waiting": gate.door.waiting,
                "held_tenants": {tenant: left for tenant, left in held.items() if left > 0},
                "requests": [_row(flight) for flight in gate.flights.values()],
            },
        )  # fmt: skip


def _row(flight: Flight) -> dict[str, Any]:
    entry = flight.entry
    return {
        "request_id": flight.request_id,
        "tenant": flight.tenant or None,
        "route": flight.route,
        "state": flight.state,
        "age_seconds": time.monotonic() - flight.started,
        "prompt_tokens": entry.total_prompt if entry is not None else None,
        "planned_blocks": entry.blocks if entry is not None else None,
        "engine": flight.engine.label if flight.engine is not None else None,
    }


async def _document(request: web.Request) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(await request.read())
    except msgspec.DecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _answer(status: int, document: Any) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type="application/json")


# ---- the other side ------------------------------------------------------------------------------------------


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def gateways(directory: str) -> list[str]:
    """Admin sockets of this user's gateways that answer, newest first."""
    paths = glob.glob(os.path.join(glob.escape(directory), "gateway-*.sock"))
    paths.sort(key=lambda path: -os.stat(path).st_mtime)
    return [path for path in paths if _answers(path)]


def _answers(path: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except OSError:
        return False
    return True


def call(path: str, method: str, route: str, document: Any = None, timeout: float = 10.0) -> dict[str, Any]:
    """One call to an admin socket. Raises KVCatchError."""
    connection = _Connection(path, timeout)
    try:
        connection.request(method, route, body=None if document is None else msgspec.json.encode(document))
        answer = connection.getresponse()
        found = msgspec.json.decode(answer.read(1 << 24))
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise KVCatchError(f"{path}: {type(error).__name__}.", "Is the gateway still running?") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise KVCatchError(f"{path}: {found.get('error', answer.status)}.")
    return dict(found)

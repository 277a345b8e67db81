"""Small calls to the API server that we are part of: no socket, only its own handlers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.inside import App, Message
from kvcatch.gateway.refusal import Refusal
from kvcatch.gateway.watch import understood
from kvcatch.sources.procs import engine_of

#: the engine's API key, in the order in which it is looked for
KEY_VARIABLES = ("KVCATCH_UPSTREAM_KEY", "VLLM_API_KEY")
CALL_SECONDS = 30.0


class Inner:
    """The handlers behind the middleware. ``learn`` first."""

    def __init__(self, app: App, environ: Mapping[str, str]) -> None:
        self._app = app
        self._key = next((environ[name] for name in KEY_VARIABLES if environ.get(name)), None)
        self._scope: dict[str, Any] = {}

    def learn(self, scope: Mapping[str, Any]) -> tuple[str, int, int]:
        """(host, port, API server processes) of this server, from any scope. Blocking. Raises KVCatchError."""
        application = scope.get("app")
        arguments = getattr(getattr(application, "state", None), "args", None)
        host = getattr(arguments, "host", None)
        port = getattr(arguments, "port", None)
        if port is None and scope.get("server"):
            port = scope["server"][1]
        if port is None:
            engine = engine_of(os.getpid())
            port = engine.port if engine is not None else None
        if not isinstance(port, int):
            raise KVCatchError("the port of this server is not known.")
        keys = getattr(arguments, "api_key", None)
        if self._key is None and keys:
            self._key = keys if isinstance(keys, str) else keys[0]
        host = host if isinstance(host, str) and host not in ("", "0.0.0.0", "::") else "127.0.0.1"
        count = getattr(arguments, "api_server_count", None)
        self._scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "root_path": scope.get("root_path", ""), "query_string": b"", "client": (host, 0), "server": (host, port),
            "app": application,
        }  # fmt: skip
        return host, port, count if isinstance(count, int) else 1

    async def call(self, engine: Engine, method: str, path: str, body: Any) -> Any:
        """One small call. Raises Refusal as ``Call`` says."""
        del engine  # there is one
        data = b"" if body is None else msgspec.json.encode(body)
        named = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        if self._key:
            named.append((b"authorization", f"Bearer {self._key}".encode()))
        whole = self._scope.get("root_path", "") + path
        scope = {
            **self._scope, "method": method, "path": whole, "raw_path": whole.encode(), "headers": named, "state": {},
        }  # fmt: skip
        status, parts = 500, []
        ended = asyncio.Event()
        messages = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    ended.set()

        try:
            async with asyncio.timeout(CALL_SECONDS):
                await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 (a handler that fails is an engine that does not answer)
            raise Refusal(
                502, "upstream", f"The engine failed at {path}: {type(error).__name__}.", retry_seconds=2.0
            ) from None
        return understood(path, status, b"".join(parts))


def header(scope: Mapping[str, Any], name: bytes) -> str | None:
    """The first header of this name (lower case), None without one."""
    return next((v.decode("latin-1") for k, v in scope["headers"] if k.lower() == name), None)


def route(scope: Mapping[str, Any]) -> str:
    """The path below the server's ``--root-path``, by the rule of its own router."""
    path, root = str(scope["path"]), scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path

"""ASGI middleware for vLLM's ``--middleware``: who sends a request becomes tags the engine records.

    vllm serve MODEL --middleware kvcatch.capture.middleware.TagMiddleware

The engine never sees headers, API keys or the OpenAI ``user`` field; ``vllm_xargs`` in the JSON body it does
see. So the tags are written there (and Content-Length is corrected); nothing is removed, tags that the client
set itself are kept, and a body that is not JSON passes untouched. ``KVCATCH_TAGS`` names a TOML file::

    [tenant]
    header = "x-tenant"              # first choice: this header
    default = "unknown"              # last choice
    [tenant.keys]                    # second choice: the API key of "Authorization: Bearer KEY"
    "sha256:9f86d0818…" = "billing"  # the key's SHA-256, so that the file holds no secret
    [user]
    header = "x-user"                # first choice
    body_field = "user"              # second choice; "" switches it off

Without a file: header ``x-tenant``, user from header ``x-user`` or the body's ``user``. User values are hashed
with the recorder directory's key before they are written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tomllib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvcatch.capture import tags
from kvcatch.store.paths import default_directory

logger = logging.getLogger("kvcatch")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_BODY = 64 << 20


class TagConfig:
    """Where tenant and user come from. Raises ValueError or OSError for a bad file, naming the field."""

    def __init__(self, path: str | None = None, tables: dict[str, Any] | None = None) -> None:
        raw: dict[str, Any] = tables or {}
        if path:
            with open(path, "rb") as file:
                raw = tomllib.load(file)
        tenant, user = _table(raw, "tenant"), _table(raw, "user")
        self.tenant_header = _text(tenant, "header", "x-tenant").lower()
        self.tenant_default = _text(tenant, "default", "")
        self.user_header = _text(user, "header", "x-user").lower()
        self.user_field = _text(user, "body_field", "user")
        self.keys: dict[str, str] = {}
        for key, name in _table(tenant, "keys").items():
            if not isinstance(name, str):
                raise ValueError(f"tenant.keys: the tenant of a key must be text, not {name!r}")
            digest = key.removeprefix("sha256:") if key.startswith("sha256:") else _digest(key)
            self.keys[digest.lower()] = name

    def tags_for(
        self, headers: list[tuple[bytes, bytes]], body: dict[str, Any], trust_header: bool = True
    ) -> dict[str, str]:
        """``kvcatch_tenant`` and ``kvcatch_user`` for a request; the user is hashed.

        trust_header: False where clients must not name their own tenant.
        """
        found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        result: dict[str, str] = {}
        key = found.get("authorization", "").removeprefix("Bearer ").strip()
        named = found.get(self.tenant_header) if trust_header else None
        tenant = named or self.keys.get(_digest(key) if key else "") or self.tenant_default
        if tenant:
            result["kvcatch_tenant"] = tenant[: tags.MAX_VALUE]
        user = found.get(self.user_header) or (body.get(self.user_field) if self.user_field else None)
        if isinstance(user, str) and user:
            result["kvcatch_user"] = tags.hash_user(user)
        return result


def _table(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"[{name}] must be a table, not {value!r}")
    return value


def _text(table: dict[str, Any], name: str, default: str) -> str:
    value = table.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {value!r}")
    return value


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class TagMiddleware:
    """Adds tags to completion, chat and response requests; everything else passes through."""

    def __init__(self, app: Any, config: TagConfig | None = None) -> None:
        self.app = app
        if config is None:
            directory = default_directory(os.environ)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            tags.load_key(directory)
            config = TagConfig(os.environ.get("KVCATCH_TAGS"))
        self.config = config

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One ASGI call."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(PATHS):
            await self.app(scope, receive, send)
            return
        seen, body, whole = await _read(receive)
        changed = self._tagged(scope["headers"], body) if whole else None
        if changed is None:
            await self.app(scope, _replay(seen, receive), send)
            return
        headers = [
            (k, v) for k, v in scope["headers"] if k.lower() not in (b"content-length", b"transfer-encoding")
        ]
        headers.append((b"content-length", str(len(changed)).encode()))
        message = {"type": "http.request", "body": changed, "more_body": False}
        await self.app({**scope, "headers": headers}, _replay([message], receive), send)

    def _tagged(self, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes | None:
        try:
            decoded = json.loads(body)
        except (ValueError, RecursionError):
            return None  # the server itself answers 400
        if not isinstance(decoded, dict):
            return None
        existing = decoded.get("vllm_xargs")
        if existing is not None and not isinstance(existing, dict):
            return None
        added = self.config.tags_for(headers, decoded)
        if not added:
            return None
        decoded["vllm_xargs"] = {**added, **(existing or {})}
        return json.dumps(decoded).encode()


async def _read(receive: Receive) -> tuple[list[Message], bytes, bool]:
    """The messages, the body, and whether the body is whole and of a sane size."""
    seen: list[Message] = []
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        seen.append(message)
        if message["type"] != "http.request":
            return seen, b"", False
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            return seen, b"", False
        if not message.get("more_body", False):
            return seen, b"".join(parts), True


def _replay(seen: list[Message], receive: Receive) -> Receive:
    queue = list(seen)

    async def replay() -> Message:
        return queue.pop(0) if queue else await receive()

    return replay

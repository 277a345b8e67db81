"""The ASGI middleware: tags go into vllm_xargs, everything else stays as it was."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest

from kvcatch.capture import tags
from kvcatch.capture.middleware import TagConfig, TagMiddleware

CONFIG = """
[tenant]
header = "X-Team"
default = "unknown"
[tenant.keys]
"sha256:{digest}" = "billing"
[user]
body_field = "user"
"""


@pytest.fixture
def config(tmp_path) -> TagConfig:
    tags.load_key(str(tmp_path))
    path = tmp_path / "tags.toml"
    path.write_text(CONFIG.format(digest=hashlib.sha256(b"sk-secret").hexdigest()))
    return TagConfig(str(path))


def call(
    config: TagConfig, body: bytes, headers: dict[str, str], path: str = "/v1/completions", pieces: int = 1
):
    """What the app behind the middleware receives: (headers, body)."""
    got: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message["body"])
            more = message.get("more_body", False)
        got["headers"], got["body"] = dict(scope["headers"]), b"".join(parts)

    size = -(-len(body) // pieces) or 1
    chunks = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    raw = [(k.lower().encode(), v.encode()) for k, v in {"content-length": str(len(body)), **headers}.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": raw}
    asyncio.run(TagMiddleware(app, config)(scope, receive, None))
    return got["headers"], got["body"]


@pytest.mark.parametrize("pieces", [1, 7])
def test_key_and_user_become_tags(config: TagConfig, pieces: int) -> None:
    body = json.dumps({"prompt": "hi", "user": "alice", "max_tokens": 3}).encode()
    headers, sent = call(config, body, {"authorization": "Bearer sk-secret"}, pieces=pieces)
    decoded = json.loads(sent)
    assert decoded["vllm_xargs"] == {"kvcatch_tenant": "billing", "kvcatch_user": tags.hash_user("alice")}
    assert {k: v for k, v in decoded.items() if k != "vllm_xargs"} == json.loads(body)
    assert headers[b"content-length"] == str(len(sent)).encode()
    assert headers[b"authorization"] == b"Bearer sk-secret"


def test_the_header_wins_and_existing_xargs_stay(config: TagConfig) -> None:
    body = json.dumps(
        {"prompt": "hi", "vllm_xargs": {"mine": 1, "kvcatch_user": "u:0123456789abcdef"}}
    ).encode()
    _, sent = call(config, body, {"x-team": "search", "authorization": "Bearer sk-secret"})
    assert json.loads(sent)["vllm_xargs"] == {
        "mine": 1, "kvcatch_user": "u:0123456789abcdef", "kvcatch_tenant": "search",
    }  # fmt: skip


@pytest.mark.parametrize("body", [b"not json", b"[1]", b'{"vllm_xargs": 3}', b"", b'{"a":' + b"[" * 100_000])
def test_what_is_not_a_request_passes_untouched(config: TagConfig, body: bytes) -> None:
    headers, sent = call(config, body, {"x-team": "search"})
    assert sent == body
    assert headers[b"content-length"] == str(len(body)).encode()


def test_other_paths_pass_untouched(config: TagConfig) -> None:
    body = b'{"model": "m"}'
    assert call(config, body, {"x-team": "a"}, path="/v1/models")[1] == body


def test_a_bad_file_names_the_field(tmp_path) -> None:
    path = tmp_path / "tags.toml"
    path.write_text("[tenant.keys]\nabc = 3\n")
    with pytest.raises(ValueError, match=r"tenant\.keys"):
        TagConfig(str(path))

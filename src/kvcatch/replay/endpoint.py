"""The engine at the other end: its model, its token ids, its counters."""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import numpy as np

from kvcatch.errors import KVCatchError
from kvcatch.replay.prompts import Ints
from kvcatch.sources import frames, openmetrics, readings
from kvcatch.sources.readings import Reading

#: text whose tokens are ordinary ones in every vocabulary
_TEXT = " ".join(string.ascii_letters + string.digits) + " the cache of a server holds keys and values"
#: without a tokenizer: low ids, the first of which are often special
_FALLBACK = range(3, 100)
_SECONDS = 30.0
COUNTERS = ("queries", "hits", "preemptions", "prompt_tokens", "generation_tokens")
_PATH = re.compile(r"/(v1(/completions|/chat/completions)?|metrics)?/?$")


@dataclass
class Endpoint:
    """An OpenAI-compatible server. reading: its metrics page, None when it has none that is known."""

    url: str
    model: str
    alphabet: Ints
    engine_version: str | None = None
    max_model_len: int | None = None
    reading: Reading | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, str]:
        """What the engine says of its cache, empty when it says nothing."""
        return dict(self.reading.config) if self.reading is not None else {}


def base_url(url: str) -> str:
    """The server's root from any address that people paste. Raises KVCatchError when it is no address."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise KVCatchError(f"{shown(url)}: not an http:// or https:// address.", "Write http://host:8000")
    return urlunsplit((parts.scheme, parts.netloc, _PATH.sub("", parts.path), "", ""))


def shown(url: str) -> str:
    """The address without a password, a query or a fragment, fit for files and screens."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def open_session(api_key: str | None, timeout_seconds: float) -> aiohttp.ClientSession:
    """A client without a limit on connections; ``timeout_seconds`` bounds one answer."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        headers=headers,
        # Servers close what is idle (uvicorn after 5 s); a request sent into that moment would be lost.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0),
        timeout=aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_SECONDS),
        read_bufsize=1 << 20,
    )


async def find(
    session: aiohttp.ClientSession, url: str, *, model: str | None = None, vocab_size: int | None = None
) -> Endpoint:
    """What can be known of the server. Raises KVCatchError when it does not answer or serves no model."""
    base = base_url(url)
    listed = await _json(session, f"{base}/v1/models")
    rows = listed.get("data") if isinstance(listed, dict) else None
    names = [row for row in rows if isinstance(row, dict) and row.get("id")] if isinstance(rows, list) else []
    chosen = next((row for row in names if model in (None, row["id"])), None)
    if chosen is None:
        raise KVCatchError(
            f"{shown(base)} serves {[row['id'] for row in names]}, not {model!r}."
            if model
            else f"{shown(base)} serves no model.",
            "Name one of them with --model.",
        )
    length = chosen.get("max_model_len")
    version = await _json(session, f"{base}/version", optional=True)
    endpoint = Endpoint(
        base,
        str(chosen["id"]),
        np.zeros(0, np.int64),
        engine_version=str(version["version"])
        if isinstance(version, dict) and "version" in version
        else None,
        max_model_len=length if isinstance(length, int) else None,
    )
    endpoint.alphabet = await _alphabet(session, endpoint, vocab_size)
    endpoint.reading = await read(session, base)
    return endpoint


async def read(session: aiohttp.ClientSession, base: str) -> Reading | None:
    """The server's counters, all its engines together; None when it shows none that are known."""
    try:
        async with session.get(f"{base}/metrics", timeout=aiohttp.ClientTimeout(total=_SECONDS)) as answer:
            if answer.status != 200:
                return None
            body = await answer.read()
        pages = openmetrics.parse([body], base)
    except (aiohttp.ClientError, TimeoutError, OSError, KVCatchError):
        return None
    known = readings.read(pages[-1]) if pages else {}
    return frames.merged(list(known.values())) if known else None


def growth(before: Reading | None, after: Reading | None) -> dict[str, float]:
    """How far the counters went, those known on both sides."""
    if after is None or before is None or frames.restarted(before, after):
        return {}
    found = {name: frames.increase(before, after, name) for name in COUNTERS}
    return {name: value for name, value in found.items() if value is not None}


async def _alphabet(session: aiohttp.ClientSession, endpoint: Endpoint, vocab_size: int | None) -> Ints:
    """Token ids that the model certainly has."""
    if vocab_size is not None:
        if vocab_size < 8:
            raise KVCatchError(f"--vocab-size {vocab_size} is below 8.", "Give the model's own.")
        # Special tokens stand at one of the ends.
        return np.arange(vocab_size // 4, vocab_size - vocab_size // 4, dtype=np.int64)
    body = {"model": endpoint.model, "prompt": _TEXT, "add_special_tokens": False}
    try:
        async with session.post(
            f"{endpoint.url}/tokenize", json=body, timeout=aiohttp.ClientTimeout(total=_SECONDS)
        ) as answer:
            parsed = await answer.json() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        parsed = None
    tokens = parsed.get("tokens") if isinstance(parsed, dict) else None
    if isinstance(tokens, list) and all(isinstance(token, int) and token >= 0 for token in tokens):
        found = np.unique(np.array(tokens, np.int64))
        if len(found) >= 8:
            return found
    endpoint.notes.append(
        "the server has no /tokenize: token ids 3 to 99 are sent; --vocab-size N gives more"
    )
    return np.array(_FALLBACK, np.int64)


async def _json(session: aiohttp.ClientSession, url: str, *, optional: bool = False) -> Any:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_SECONDS)) as answer:
            status, text = answer.status, await answer.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if optional:
            return None
        raise KVCatchError(
            f"{shown(url)}: no answer ({type(error).__name__}).", "Is the engine running there?"
        ) from None
    if status == 200:
        try:
            return json.loads(text)
        except ValueError:
            pass
    if optional:
        return None
    hint = "Name the variable that holds the key with --api-key-env." if status in (401, 403) else (
        "Give the address of an OpenAI-compatible server."
    )  # fmt: skip
    raise KVCatchError(f"{shown(url)}: HTTP {status}, no JSON to use.", hint)

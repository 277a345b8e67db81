"""A running OpenAI-compatible server: log-probabilities of a prompt, greedy continuation, tokens of a text."""

from __future__ import annotations

import http.client
import json
import os
import re
import uuid
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvcatch.errors import KVCatchError

#: token -> log-probability: what a server tells about one position
Top = dict[int, float]
#: tried in turn until the server allows it: more bins give a higher bound; 20 is vLLM's default limit
_LIMITS = (64, 20, 5)
_MAX_BYTES = 512 * 1024**2


class Position(msgspec.Struct, frozen=True):
    """What the server says about one token: its log-probability, the likeliest token, and the top of the list."""

    token: int
    logprob: float
    best: int
    top: Top


class Continuation(msgspec.Struct, frozen=True):
    """A greedy answer: its text, and per generated token what the server saw."""

    text: str
    positions: tuple[Position, ...]


class Endpoint:
    """One server under one model name. Requests go one after the other: a batch of others changes rounding."""

    def __init__(self, url: str, timeout_seconds: float = 600.0, *, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise KVCatchError(f"{url}: not an http:// or https:// address.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._parts = urlsplit(self.url)
        self._timeout = timeout_seconds
        self._key = key or os.environ.get("OPENAI_API_KEY")
        self._connection: http.client.HTTPConnection | None = None
        card = self._card()
        self.model = str(card.get("id"))
        self.root = str(card.get("root") or card.get("id"))
        self.version = self._version()
        self.k = self._limit()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def tokens(self, text: str) -> list[int]:
        """The token ids of a text, by the server's own tokenizer."""
        return self._tokens({"prompt": text})

    def chat_tokens(self, messages: list[Any], arguments: dict[str, Any]) -> list[int]:
        """The token ids of a chat by the server's own template; arguments: more fields of ``/tokenize``."""
        return self._tokens({"messages": messages, **arguments})

    def _tokens(self, asked: dict[str, Any]) -> list[int]:
        answer = self._post("/tokenize", {"model": self.model, **asked})
        ids = answer.get("tokens")
        if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
            raise self._strange("/tokenize gave no list of token ids")
        return ids

    def score(self, ids: list[int]) -> list[Position]:
        """What the server expected at every position of a prompt but the first."""
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self.k}
        rows = self._choice(body).get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise self._strange("the answer has no prompt_logprobs for every token")
        try:
            return [_position(ids[at], rows[at]) for at in range(1, len(ids))]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._strange("prompt_logprobs have an unknown form") from None

    def generate(self, prompt: str | list[int], tokens: int, *, logprobs: bool = True) -> Continuation:
        """The greedy continuation of a prompt, to its natural end or ``tokens``."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if logprobs:
            body |= {"logprobs": self.k, "return_tokens_as_token_ids": True}
        choice = self._choice(body)
        text = choice.get("text")
        if not isinstance(text, str):
            raise self._strange("the answer has no text")
        if not logprobs:
            return Continuation(text, ())
        try:
            rows = choice["logprobs"]["top_logprobs"]
            names = choice["logprobs"]["tokens"]
            positions = tuple(_generated(name, row) for name, row in zip(names, rows, strict=True))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._strange("logprobs have an unknown form") from None
        return Continuation(text, positions)

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        # A salt of its own: every pass finds the same (empty) prefix cache, whatever ran before.
        answer = self._post("/v1/completions", {"model": self.model, "cache_salt": self.salt, **body})
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self._strange("the answer has no choices")
        return choices[0]

    salt: str = "kvcatch"

    def new_pass(self) -> None:
        """Forget what the prefix cache holds of earlier passes."""
        self.salt = uuid.uuid4().hex

    def _card(self) -> dict[str, Any]:
        cards = self._request("GET", "/v1/models", None).get("data")
        if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict):
            raise self._strange("/v1/models lists no model")
        return cards[0]

    def _version(self) -> str | None:
        try:
            found = self._request("GET", "/version", None).get("version")
        except KVCatchError:
            return None
        return found if isinstance(found, str) else None

    def _limit(self) -> int:
        """The most log-probabilities a position that this server returns, of those tried."""
        for limit in _LIMITS:
            body = {"model": self.model, "prompt": "one two", "max_tokens": 1, "prompt_logprobs": limit}
            try:
                self._post("/v1/completions", body)
            except _RefusedError:
                continue
            return limit
        raise KVCatchError(
            f"{self.url} refuses prompt_logprobs.",
            "Quality needs a server that returns them: vLLM with its defaults does.",
        )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, json.dumps(body).encode())

    def _request(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            connection = self._connected()
            connection.request(method, self._parts.path + path, body, headers)
            response = connection.getresponse()
            raw = response.read(_MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            what = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
            raise KVCatchError(
                f"{self.url}{path}: {what}.", "Is the server running there? Look at its log."
            ) from None
        if response.status == 400:
            raise _RefusedError(self.url, path, raw)
        if not 200 <= response.status < 300:
            raise KVCatchError(f"{self.url}{path}: HTTP {response.status}.", _hint(response.status))
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise self._strange(f"{path} answered something that is not a JSON object")
        return answer

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            https = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
            self._connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        return self._connection

    def _strange(self, what: str) -> KVCatchError:
        return KVCatchError(f"{self.url}: {what}.", "Is this vLLM's OpenAI-compatible server?")


class _RefusedError(KVCatchError):
    """HTTP 400. Servers quote prompts in their messages, so only the parameter's name is taken over."""

    def __init__(self, url: str, path: str, raw: bytes) -> None:
        found = re.search(rb'"param(?:eter)?"\s*:\s*"([A-Za-z_]{1,40})"', raw)
        which = f" (parameter {found.group(1).decode()})" if found else ""
        super().__init__(
            f"{url}{path}: HTTP 400{which}.", "Is the document longer than the server's max_model_len?"
        )


def _hint(status: int) -> str:
    if status in (401, 403):
        return "Set OPENAI_API_KEY to the server's key."
    return "Is this an OpenAI-compatible server?" if status == 404 else "Look at the server's log."


def _position(token: int, row: dict[str, dict[str, float]]) -> Position:
    top = {int(name): float(entry["logprob"]) for name, entry in row.items()}
    best = next((int(name) for name, entry in row.items() if entry.get("rank") == 1), None)
    return Position(token, top[token], max(top, key=lambda t: (top[t], -t)) if best is None else best, top)


def _generated(name: str, row: dict[str, float]) -> Position:
    top = {_token_id(text): float(value) for text, value in row.items()}
    token = _token_id(name)
    return Position(token, top[token], max(top, key=lambda t: (top[t], -t)), top)


def _token_id(name: str) -> int:
    head, _, number = name.partition("token_id:")
    if head or not number:
        raise ValueError(name)
    return int(number)

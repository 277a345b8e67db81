"""A request's body: parsed once, defensively, into what the gateway decides on. Never quoted in errors or logs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcatch.gateway.refusal import Refusal

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
)
ROUTES = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)

#: a body nested deeper than this is refused; real requests stay below 20
MAX_DEPTH = 64
#: prompts in one request, and choices per prompt
MAX_PROMPTS = 4096
MAX_CHOICES = 1024
#: what vLLM generates for /v1/completions when the request does not say
COMPLETION_DEFAULT = 16
#: a number that no engine serves; larger ones are malformed
MAX_TOKENS = 1 << 40

_OUTPUT_FIELDS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    EMBEDDINGS: (),
}
_ID = re.compile(r"[\w.:~@=+-]{1,128}", re.ASCII)


@dataclass(slots=True)
class Ask:
    """One request as the gateway sees it.

    document: the decoded body; changed only through the methods here and in ``truncate``.
    output_tokens: what it asks for, None when it leaves that to the engine. choices: answers per prompt.
    changed: what the gateway altered, for response headers.
    """

    route: str
    document: dict[str, Any]
    model: str
    stream: bool
    output_tokens: int | None
    choices: int
    prompts: list[Any]
    prompt_logprobs: bool
    prompt_tokens: list[int] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; 0 before counting."""
        return max(self.prompt_tokens, default=0)

    @property
    def total_prompt(self) -> int:
        """Tokens of all prompts together."""
        return sum(self.prompt_tokens)

    @property
    def generates(self) -> bool:
        """False for embeddings: they hold blocks for one step only."""
        return self.route != EMBEDDINGS

    def set_output(self, tokens: int) -> None:
        """Ask the engine for at most ``tokens`` output tokens."""
        names = _OUTPUT_FIELDS[self.route]
        for name in names:
            if self.document.get(name) is not None:
                self.document[name] = tokens
        if all(self.document.get(name) is None for name in names):
            self.document[names[0]] = tokens
        least = self.document.get("min_tokens")
        if isinstance(least, int) and least > tokens:
            self.document["min_tokens"] = tokens
        self.output_tokens = tokens
        self.changed["x-kvcatch-max-tokens"] = str(tokens)

    def encode(self) -> bytes:
        """The body for the engine: one meaning for every parser, duplicate keys gone."""
        return msgspec.json.encode(self.document)


def parse(route: str, body: bytes) -> Ask:
    """Decode and check the shape of what the gateway reads. Raises Refusal (400).

    Everything else in the document passes to the engine, which is its judge.
    """
    try:
        body.decode("utf-8")  # msgspec checks only the strings it meets
        document = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise _malformed("The body is not UTF-8.") from None
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise _malformed("The body is not valid JSON.") from None
    if not isinstance(document, dict):
        raise _malformed("The body must be a JSON object.")
    if _deeper(document, MAX_DEPTH):
        raise _malformed(f"The body is nested deeper than {MAX_DEPTH} levels.")
    model = document.get("model", "")
    if not isinstance(model, str | None) or len(model or "") > 512:
        raise _malformed("model must be a short string.")
    stream = document.get("stream")
    if not isinstance(stream, bool | None):
        raise _malformed("stream must be true or false.")
    xargs = document.get("vllm_xargs")
    if not isinstance(xargs, dict | None):
        raise _malformed("vllm_xargs must be an object.")
    output: int | None = None
    for name in _OUTPUT_FIELDS[route]:
        asked = _count(document, name, 0, MAX_TOKENS)
        output = asked if output is None else output
    if route == COMPLETIONS and output is None:
        output = COMPLETION_DEFAULT
    if route == EMBEDDINGS:
        output = 0
    choices = max(_count(document, name, 1, MAX_CHOICES) or 1 for name in ("n", "best_of"))
    prompts = _prompts(route, document)
    shown = document.get("logprobs")
    echoed = bool(document.get("echo")) and shown is not None and shown is not False  # 0 asks for them too
    wanted = document.get("prompt_logprobs")
    return Ask(
        route=route,
        document=document,
        model=model or "",
        stream=bool(stream),
        output_tokens=output,
        choices=choices,
        prompts=prompts,
        prompt_logprobs=echoed or wanted is not None,
    )


def clean_request_id(value: str | None) -> str | None:
    """The client's ``X-Request-Id`` when it is a plain short word, else None."""
    return value if value is not None and _ID.fullmatch(value) else None


def _malformed(message: str) -> Refusal:
    return Refusal(400, "malformed", message, code="invalid_request")


def _count(document: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _malformed(f"{name} must be a whole number from {low} to {high}.")
    document[name] = value
    return value


def _prompts(route: str, document: dict[str, Any]) -> list[Any]:
    """The prompts as given: chat messages, text or token ids, one entry each."""
    if route == CHAT:
        messages = document.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _malformed("messages must be a list with at least one message.")
        if not all(isinstance(message, dict) for message in messages):
            raise _malformed("Every message must be an object.")
        return [messages]
    name = "prompt" if route == COMPLETIONS else "input"
    value = document.get(name)
    if route == COMPLETIONS and value is None and document.get("prompt_embeds") is not None:
        raise Refusal(400, "unsupported", "prompt_embeds cannot be counted; send it to the engine itself.")
    if isinstance(value, str):
        return [value]
    if route == RESPONSES:
        if isinstance(value, list) and value:
            return [value]
        raise _malformed("input must be text or a list of items.")
    if isinstance(value, list) and value:
        if all(_is_token(token) for token in value):
            return [value]
        if len(value) > MAX_PROMPTS:
            raise _malformed(f"{name} holds more than {MAX_PROMPTS} prompts.")
        if all(isinstance(one, str) for one in value):
            return value
        if all(isinstance(one, list) and one and all(map(_is_token, one)) for one in value):
            return value
    if isinstance(value, list) and value and route == EMBEDDINGS:
        raise _malformed("input must be text, token ids, or a list of either.")
    if route == EMBEDDINGS and isinstance(document.get("messages"), list):
        raise Refusal(400, "unsupported", "Embeddings of messages cannot be counted here; send text.")
    raise _malformed(f"{name} must be text, token ids, or a list of either, and not empty.")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than ``levels``; without recursion."""
    row = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for one in row:
            if isinstance(one, dict):
                inner += [child for child in one.values() if isinstance(child, dict | list)]
            elif isinstance(one, list):
                inner += [child for child in one if isinstance(child, dict | list)]
        if not inner:
            return False
        row = inner
    return True

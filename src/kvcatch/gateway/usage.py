"""How many tokens an answer had, read from a side copy; the bytes that pass are never touched."""

from __future__ import annotations

import msgspec

#: an event longer than this is not searched for usage
MAX_EVENT = 1 << 20


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def output(self) -> int | None:
        """Output tokens by either API's name; embeddings have none."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        if self.output_tokens is not None:
            return self.output_tokens
        return 0 if self.prompt_tokens is not None else None


class _Nested(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Nested | None = None  # the last event of /v1/responses


def output_of(document: bytes) -> int | None:
    """Output tokens that a JSON answer or event states, None when it does not."""
    try:
        answer = msgspec.json.decode(document, type=_Answer)
    except msgspec.MsgspecError:
        return None
    usage = answer.usage or (answer.response.usage if answer.response is not None else None)
    return usage.output if usage is not None else None


class StreamMeter:
    """Reads a stream of server-sent events as it passes.

    events: data events so far, at least one token each for an engine that sends every token at once.
    output_tokens: what the stream itself stated last, None when it did not.
    """

    def __init__(self) -> None:
        self.events = 0
        self.output_tokens: int | None = None
        self.done = False
        self._rest = b""
        self._skipping = False

    def feed(self, chunk: bytes) -> None:
        """Take in some bytes, cut anywhere."""
        if b"\n" not in chunk:
            self._keep(self._rest + chunk)
            return
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
                self.events += 1
            elif line.startswith(b"data:"):
                self._event(line[5:].strip())
        self._rest = b""
        self._keep(rest)

    def _keep(self, rest: bytes) -> None:
        if len(rest) > MAX_EVENT:
            self._skipping, rest = True, b""
        self._rest = rest

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        self.events += 1
        if b'"usage"' in data:
            found = output_of(data)
            if found is not None:
                self.output_tokens = found

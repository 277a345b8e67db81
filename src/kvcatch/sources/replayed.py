"""What ``kvcatch replay`` writes: one JSON line for the run, one for each request, one for its end.

There is nothing in it that was sent or answered: lengths, times and counts only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.results import Result

KIND = "kvcatch-replay"
SCHEMA_VERSION = 1
#: names of requests that only warm the engine up begin so
WARM_UP = "kvcatch-warm-up-"


class Head(Result, frozen=True):
    """How a run was made. config: what the engine says of its cache; url: without credentials."""

    kind: str = KIND
    schema_version: int = SCHEMA_VERSION
    kvcatch_version: str = ""
    trace: str = ""
    url: str = ""
    model: str | None = None
    engine_version: str | None = None
    seed: int = 0
    speed: float = 1.0
    requests: int = 0
    start_unix_seconds: float = 0.0
    config: dict[str, str] = msgspec.field(default_factory=dict)


class Answer(Result, frozen=True):
    """One request. Seconds are counted from the start of the run; None is unknown or did not happen.

    due_seconds: when the workload has it arrive; sent_seconds: when it was sent; held_seconds: how long it waited for an
    answer that it quotes, None when it quotes none. status: ok | refused (HTTP error) |
    failed (connection) | interrupted.
    """

    index: int
    request_id: str
    tenant: str
    due_seconds: float
    sent_seconds: float
    prompt_tokens: int
    status: str
    held_seconds: float | None = None
    first_seconds: float | None = None
    finished_seconds: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    http_status: int | None = None
    error: str | None = None

    @property
    def lateness_seconds(self) -> float:
        """How much later than due it was sent through the sender's fault."""
        return self.sent_seconds - self.due_seconds - (self.held_seconds or 0.0)

    @property
    def ttft_seconds(self) -> float | None:
        """From sending to the first token."""
        return None if self.first_seconds is None else self.first_seconds - self.sent_seconds


class Tail(Result, frozen=True):
    """How a run ended. counters: growth of the engine's own counters over it, whatever caused it."""

    end: bool = True
    interrupted: bool = False
    duration_seconds: float = 0.0
    unanswered_quotes: int = 0
    counters: dict[str, float] = msgspec.field(default_factory=dict)


class Replayed(msgspec.Struct, frozen=True):
    """One results file. tail is None when the run was killed."""

    target: str
    head: Head
    answers: tuple[Answer, ...]
    tail: Tail | None


def read_replayed(target: str | Path) -> Replayed | None:
    """A results file, None when the file is something else. Raises KVCatchError for a damaged or newer one."""
    path = Path(target)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        first = file.readline(1 << 20)
        try:
            head: Any = json.loads(first)
        except ValueError:
            return None
        if not isinstance(head, dict) or head.get("kind") != KIND:
            return None
        if head.get("schema_version") != SCHEMA_VERSION:
            raise KVCatchError(
                f"{target}: results of version {head.get('schema_version')!r}, this kvcatch reads {SCHEMA_VERSION}.",
                "Use the kvcatch that wrote it.",
            )
        answers: list[Answer] = []
        tail: Tail | None = None
        try:
            described = msgspec.convert(head, Head)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the run was killed while it wrote this line
                if line.startswith(b'{"end"'):
                    tail = msgspec.json.decode(line, type=Tail)
                elif line.strip():
                    answers.append(msgspec.json.decode(line, type=Answer))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise KVCatchError(f"{target}: {error}.", "The file is damaged; replay again.") from None
    answers.sort(key=lambda answer: answer.index)
    return Replayed(str(target), described, tuple(answers), tail)

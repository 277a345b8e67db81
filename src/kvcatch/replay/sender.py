"""The sender: every request at its own time, whatever the engine does with the ones before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import msgspec

from kvcatch.replay.endpoint import Endpoint
from kvcatch.sources.replayed import Answer

#: characters of a server's own words that are kept
_WORDS = 160


@dataclass(frozen=True)
class Job:
    """One request to send. prompt: called when it is sent, gives the token ids as a JSON list.

    due_seconds: from the start. extra: more fields of the body. after: indices of jobs whose answers the prompt quotes;
    it cannot be sent before they have ended, as nobody can quote what was not said yet.
    """

    index: int
    request_id: str
    tenant: str
    due_seconds: float
    prompt_tokens: int
    output_tokens: int
    prompt: Callable[[], bytes]
    extra: dict[str, Any]
    after: tuple[int, ...] = ()


class Watcher(Protocol):
    """Told what happens while it happens, in the sender's own thread; seconds from the start."""

    def sent(self, job: Job, seconds: float) -> None:
        """A request goes out."""

    def token(self, job: Job, count: int) -> None:
        """So many tokens have come back in all."""

    def ended(self, job: Job, answer: Answer, output: list[int] | None) -> None:
        """A request ended; output: its token ids where the server tells them."""


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


async def send(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    jobs: Sequence[Job],
    *,
    watcher: Watcher,
    stop: asyncio.Event,
    want_tokens: bool = False,
    origin: float | None = None,
) -> float:
    """Send all jobs in order of ``due_seconds`` and wait for their ends; returns how long it took, in seconds.

    Args:
        session: of ``open_session``.
        endpoint: where to.
        jobs: in order of ``due_seconds``.
        watcher: is told of every request.
        stop: when it is set, nothing more is sent and what is in flight is given up.
        want_tokens: ask for the ids of generated tokens.
        origin: the loop's time that ``due_seconds`` count from; default: now.
    """
    loop = asyncio.get_running_loop()
    start = loop.time() if origin is None else origin
    tasks: set[asyncio.Task[None]] = set()
    asked = {job.index for job in jobs}
    ends = {index: asyncio.Event() for job in jobs for index in job.after if index in asked}
    halted = asyncio.ensure_future(stop.wait())
    try:
        for job in jobs:
            delay = start + job.due_seconds - loop.time()
            if delay > 0:
                await asyncio.wait({halted}, timeout=delay)
            if stop.is_set():
                break
            task = asyncio.create_task(_one(session, endpoint, job, watcher, start, want_tokens, ends))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if delay <= 0:
                await asyncio.sleep(0)  # a burst must not keep the answers of earlier ones waiting
        while tasks and not stop.is_set():
            await asyncio.wait({*tasks, halted}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        halted.cancel()
        left = list(tasks)
        for task in left:
            task.cancel()
        failures = [one for one in await asyncio.gather(*left, return_exceptions=True) if one is not None]
    for failure in failures:
        if isinstance(failure, Exception):
            raise failure
    return loop.time() - start


async def _one(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    job: Job,
    watcher: Watcher,
    start: float,
    want: bool,
    ends: dict[int, asyncio.Event],
) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        for index in job.after:
            if index in ends:
                await ends[index].wait()
        held = loop.time() - begun
        await _ask(session, endpoint, job, watcher, start, want, held)
    finally:
        if job.index in ends:
            ends[job.index].set()


async def _ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    job: Job,
    watcher: Watcher,
    start: float,
    want: bool,
    held: float,
) -> None:
    loop = asyncio.get_running_loop()
    fields = {
        "model": endpoint.model, "max_tokens": job.output_tokens, "min_tokens": job.output_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **job.extra,
    }  # fmt: skip
    if want:
        fields["return_token_ids"] = True
    body = b'{"prompt":' + job.prompt() + b"," + json.dumps(fields).encode()[1:]
    headers = {"Content-Type": "application/json", "X-Request-Id": job.request_id}
    sent = loop.time() - start
    watcher.sent(job, sent)
    seen = _Seen(watcher, job)
    status, http_status, error = "ok", None, None
    try:
        async with session.post(f"{endpoint.url}/v1/completions", data=body, headers=headers) as answer:
            http_status = answer.status
            if answer.status != 200:
                status, error = "refused", _said(await answer.content.read(4096))
            else:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        seen.take(line[6:], loop.time() - start)
                if seen.error is not None:
                    status, error = "refused", seen.error
                elif not seen.finish_reason:
                    status, error = "failed", "the answer stopped before its end"
    except asyncio.CancelledError:
        status = "interrupted"
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, msgspec.DecodeError) as failure:
        status, error = "failed", type(failure).__name__
    watcher.ended(
        job,
        Answer(
            index=job.index,
            request_id=job.request_id,
            tenant=job.tenant,
            due_seconds=job.due_seconds,
            sent_seconds=sent,
            held_seconds=held if job.after else None,
            prompt_tokens=job.prompt_tokens,
            status=status,
            first_seconds=seen.first,
            finished_seconds=loop.time() - start if status == "ok" else None,
            cached_tokens=seen.cached,
            output_tokens=seen.output if status == "ok" else None,
            finish_reason=seen.finish_reason,
            http_status=http_status,
            error=error,
        ),
        seen.tokens if want and status == "ok" and seen.told else None,
    )


class _Seen:
    """What has come back of one answer."""

    def __init__(self, watcher: Watcher, job: Job) -> None:
        self._watcher = watcher
        self._job = job
        self.first: float | None = None
        self.cached: int | None = None
        self.output: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.tokens: list[int] = []
        self.told = False
        self._chunks = 0

    def take(self, payload: bytes, seconds: float) -> None:
        chunk = _decode(payload)
        if chunk.error is not None:
            self.error = _said(msgspec.json.encode(chunk.error))
        for choice in chunk.choices:
            if self.first is None:
                self.first = seconds
            self.finish_reason = choice.finish_reason or self.finish_reason
            self._chunks += 1
            if choice.token_ids is not None:
                self.told = True
                self.tokens += choice.token_ids
        if chunk.choices:
            self._watcher.token(self._job, max(self._chunks, len(self.tokens)))
        if chunk.usage is not None:
            self.output = chunk.usage.completion_tokens
            cached = (chunk.usage.prompt_tokens_details or {}).get("cached_tokens")
            self.cached = cached if isinstance(cached, int) else None


def _said(body: bytes) -> str:
    """A server's refusal in its own words, shortened; all that it can quote was made up here."""
    try:
        parsed = json.loads(body)
        inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
        text = inner.get("message", "") if isinstance(inner, dict) else inner
    except ValueError:
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:_WORDS]

"""The process of a mirror: sends copies to the candidate, compares both engines, writes the numbers.

Reads one line of JSON after the other on stdin: a ``Setup``, then a ``Task`` each, after which ``COMPARE`` asks for the
comparison of the same request; answers each but the first with one ``Told``. Ends with its input.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.gateway.body import CHAT
from kvcatch.gateway.usage import StreamMeter, output_of
from kvcatch.quality.endpoint import Endpoint, Position
from kvcatch.quality.shadow import Judge, Pair, pair
from kvcatch.quality.verdict import Limits
from kvcatch.sources.replayed import Answer, Tail

#: tokens of a prompt that are compared (log-probabilities take memory outside the pool), and that are continued
SCORED, CONTINUED = 512, 16
#: seconds for one answer of the candidate
TIMEOUT = 30.0
#: failures of the candidate in a row that stop the mirror
FAILURES = 5
UPSTREAM, CANDIDATE, PAIRS = "upstream.jsonl", "candidate.jsonl", "pairs.jsonl"


class Setup(msgspec.Struct, frozen=True):
    """What holds for all copies. began: ``time.monotonic`` of the start; both processes have the same clock."""

    url: str
    folder: str
    limits: Limits
    timeout: float
    began: float
    key: str | None = None


class Task(msgspec.Struct, frozen=True, tag="copy"):
    """One answered request. name: the hash that stands for it; engine: who answered it; times of ``time.monotonic``."""

    name: str
    route: str
    body: bytes
    stream: bool
    model: str
    prompt: Any
    arguments: dict[str, Any]
    prompt_tokens: int
    engine: str
    sent: float
    first: float | None
    finished: float
    output: int | None


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    """Compare both engines on the request that was copied last."""


COMPARE = Compare()


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of it. failure: the type of an error; stopped, words: why nothing more is to be copied."""

    outcome: str = ""
    failure: str = ""
    stopped: str = ""
    words: str = ""


class Worker:
    """Copies and compares for one mirror."""

    def __init__(self, setup: Setup) -> None:
        self._url, self._key, self._timeout = setup.url, setup.key, setup.timeout
        self._began = setup.began
        self._judge = Judge(setup.limits)
        self._ends: dict[str, Endpoint] = {}
        self._folder = setup.folder
        self._index = self._failures = 0
        self._task: Task | None = None

    def do(self, what: Task | Compare) -> Told:
        """Copy a request, or compare the last one. Never raises."""
        try:
            if isinstance(what, Task):
                self._task = what
                return self._copied(what)
            assert self._task is not None
            return self._compared(self._task)
        except OSError as error:
            return Told("", "", "files", f"its results cannot be written: {error.strerror}")
        except Exception as error:  # noqa: BLE001 (the mirror goes on, and clients see nothing)
            # Whatever is wrong with one answer must not end the mirror; its words may quote a prompt.
            return self._failed(type(error).__name__)

    def close(self) -> None:
        """Write the ends of the files."""
        tail = Tail(duration_seconds=time.monotonic() - self._began)
        with contextlib.suppress(OSError):
            for name in (UPSTREAM, CANDIDATE):
                self._write(name, tail)
        for end in self._ends.values():
            end.close()

    def _failed(self, failure: str = "") -> Told:
        self._failures += 1
        if self._failures < FAILURES:
            return Told("failed", failure)
        return Told("failed", failure, "errors", f"the candidate failed {FAILURES} times in a row")

    def _copied(self, task: Task) -> Told:
        index, self._index = self._index, self._index + 1
        copied = self._copy(task, index)
        since = self._began
        self._write(
            UPSTREAM,
            Answer(
                index=index, request_id=task.name, tenant="", due_seconds=task.sent - since,
                sent_seconds=task.sent - since, prompt_tokens=task.prompt_tokens, status="ok",
                first_seconds=None if task.first is None else task.first - since,
                finished_seconds=task.finished - since, output_tokens=task.output, http_status=200,
            ),
        )  # fmt: skip
        self._write(CANDIDATE, copied)
        if copied.status != "ok":
            return self._failed()
        self._failures = 0
        return Told("copied")

    def _compared(self, task: Task) -> Told:
        one = self._compare(task)
        if isinstance(one, Told):
            return one
        self._write(PAIRS, one)
        before = self._judge.verdict
        self._judge.add(one)
        if before != "fail" and self._judge.verdict == "fail":
            words = f"the candidate answers differently, {self._judge.requests} requests compared"
            return Told("compared", "", "verdict", words)
        return Told("compared")

    def _copy(self, task: Task, index: int) -> Answer:
        """The same request to the candidate, timed as its client's was; the answer is read and forgotten."""
        parts = urlsplit(self._url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout)
        wanted = {"Content-Type": "application/json", "X-Request-Id": task.name}
        if self._key:
            wanted["Authorization"] = f"Bearer {self._key}"
        sent = time.monotonic()
        first: float | None = None
        tokens: int | None = None
        status, code = "failed", None
        try:
            connection.request("POST", parts.path + task.route, task.body, wanted)
            response = connection.getresponse()
            code = response.status
            meter, whole = StreamMeter(), b""
            while chunk := response.read1(1 << 16):
                first = first or time.monotonic()
                if time.monotonic() - sent > self._timeout:
                    raise TimeoutError
                if task.stream:
                    meter.feed(chunk)
                elif len(whole) < 4 << 20:
                    whole += chunk
            tokens = meter.output_tokens if task.stream else output_of(whole)
            whole_stream = not task.stream or meter.done
            status = "ok" if code == 200 and whole_stream else "refused" if code != 200 else "failed"
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        end = time.monotonic()
        since = self._began
        return Answer(
            index=index, request_id=task.name, tenant="", due_seconds=sent - since, sent_seconds=sent - since,
            prompt_tokens=task.prompt_tokens, status=status,
            first_seconds=first - since if first is not None and task.stream else None,
            finished_seconds=end - since, output_tokens=tokens, http_status=code,
        )  # fmt: skip

    def _compare(self, task: Task) -> Pair | Told:
        """What both engines expect of the prompt, and how both go on; or why that could not be asked."""
        try:
            base = self._end(task.engine)
        except KVCatchError:
            return Told("baseline-failed")
        try:
            other = self._end(self._url)
        except KVCatchError:
            return self._failed()
        if (task.model or base.model) != base.model:
            return Told("unsupported")
        k = min(base.k, other.k)
        base.k = other.k = k
        try:
            ids = self._ids(base, task)[:SCORED]
            if len(ids) < 2:
                return Told("unsupported")
            first = _asked(base, ids)
        except KVCatchError:
            # The upstream's trouble is not the candidate's.
            return Told("baseline-failed")
        try:
            second = _asked(other, ids)
        except KVCatchError:
            return self._failed()
        return pair(task.name, k, (first[0], second[0]), (first[1], second[1]))

    def _end(self, url: str) -> Endpoint:
        if url not in self._ends:
            self._ends[url] = Endpoint(url, self._timeout, key=self._key)
        return self._ends[url]

    def _ids(self, base: Endpoint, task: Task) -> list[int]:
        if task.route == CHAT:
            return base.chat_tokens(task.prompt, task.arguments)
        return base.tokens(task.prompt) if isinstance(task.prompt, str) else list(task.prompt)

    def _write(self, name: str, row: msgspec.Struct) -> None:
        with open(os.path.join(self._folder, name), "ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")


def _asked(end: Endpoint, ids: list[int]) -> tuple[list[Position], tuple[Position, ...]]:
    end.new_pass()
    return end.score(ids), end.generate(ids, CONTINUED).positions


def main() -> None:
    """Serve the gateway that started this process, until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's; it closes the pipe
    os.nice(10)  # clients first
    lines, answers = sys.stdin.buffer, sys.stdout.buffer
    worker = Worker(msgspec.json.decode(lines.readline(), type=Setup))
    decode = msgspec.json.Decoder(Task | Compare).decode
    for line in lines:
        answers.write(msgspec.json.encode(worker.do(decode(line))) + b"\n")
        answers.flush()
    worker.close()


if __name__ == "__main__":
    main()

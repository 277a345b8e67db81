"""A copy of some requests goes to a candidate engine; clients neither wait for it nor see it.

Copies, comparisons and their files are the work of a process of its own (``mirror_worker``): reading a thousand
log-probabilities holds an interpreter's lock for milliseconds. The client's path does one thing: it puts a request that
was answered into a short queue, or drops it. Kept are numbers, never what was sent or answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from kvcatch import __version__
from kvcatch.capture import tags
from kvcatch.errors import KVCatchError
from kvcatch.gateway import mirror_worker
from kvcatch.gateway.body import CHAT, COMPLETIONS, Ask
from kvcatch.gateway.counting import template_arguments
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.mirror_worker import (
    CANDIDATE,
    COMPARE,
    PAIRS,
    TIMEOUT,
    UPSTREAM,
    Compare,
    Setup,
    Task,
    Told,
)
from kvcatch.quality.shadow import PairsHead
from kvcatch.quality.verdict import Limits
from kvcatch.sources.replayed import Head

logger = logging.getLogger("kvcatch.gateway")

#: requests that wait for the candidate, and their largest body: what a mirror can hold in memory
QUEUE, BODY = 16, 256 << 10


@dataclass(frozen=True)
class Job:
    """A request that its client has got an answer to. Times are of ``time.monotonic``."""

    request_id: str
    route: str
    body: bytes
    ask: Ask
    engine: Engine
    sent: float
    first: float | None
    finished: float
    output: int | None


class _Worker:
    """The worker's process."""

    def __init__(self, setup: Setup) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", mirror_worker.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._back = self.process.stdin, self.process.stdout
        self._say(setup)

    def _say(self, what: msgspec.Struct) -> None:
        self._to.write(msgspec.json.encode(what) + b"\n")
        self._to.flush()

    def told(self, what: Task | Compare) -> Told:
        """Give it something to do and wait. Raises OSError or EOFError when it has ended."""
        self._say(what)
        line = self._back.readline()
        if not line:
            raise EOFError
        return msgspec.json.decode(line, type=Told)

    def end(self, seconds: float) -> None:
        """Let it write the ends of its files; kill it when it does not end."""
        with contextlib.suppress(OSError):
            self._to.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._back.close()


class Mirror:
    """Copies requests to one candidate.

    share: of the requests, above 0 up to 1; chosen by a hash of the request id, so that every gateway and every run
    chooses the same. idle: whether an upstream can take a comparison now. count: told every outcome by its name.
    """

    def __init__(
        self,
        url: str,
        share: float,
        folder: str,
        *,
        idle: Callable[[Engine], bool],
        count: Callable[[str], None],
        key: str | None = None,
        limits: Limits | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self.url, self.share, self.folder = url.rstrip("/").removesuffix("/v1"), share, folder
        self.stopped = ""  # why no more is copied, "" = copying
        self._idle, self._count = idle, count
        self._setup = Setup(self.url, folder, limits or Limits(), timeout, time.monotonic(), key)
        self._queue: queue.Queue[Job | None] = queue.Queue(QUEUE)
        self._thread: threading.Thread | None = None
        self._worker: _Worker | None = None
        self._ending = threading.Event()

    # ---- the client's side: nothing here waits -----------------------------------------------------------

    def offer(self, flight: Flight, body: bytes, response: web.StreamResponse | None) -> None:
        """Copy this answered request if it is chosen. Never waits, never raises."""
        if self.stopped or not chosen(flight.request_id, self.share):
            return
        ask, engine = flight.ask, flight.engine
        if ask is None or engine is None or response is None or response.status != 200:
            return
        if flight.route not in (CHAT, COMPLETIONS) or len(ask.prompts) != 1 or ask.choices != 1:
            self._count("unsupported")
            return
        if len(body) > BODY:
            self._count("too-large")
            return
        first = flight.first_at if ask.stream else None
        job = Job(
            flight.request_id, flight.route, body, ask, engine, flight.sent_at, first, time.monotonic(),
            flight.output,
        )  # fmt: skip
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self._count("dropped")

    # ---- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the files and begin. Raises KVCatchError when the folder cannot be written or holds results."""
        start = time.time()
        heads: dict[str, msgspec.Struct] = {
            name: Head(
                kvcatch_version=__version__,
                trace="mirror",
                url=name.partition(".")[0],
                start_unix_seconds=start,
            )
            for name in (UPSTREAM, CANDIDATE)
        }
        heads[PAIRS] = PairsHead(kvcatch_version=__version__, candidate=urlsplit(self.url).netloc)
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            for name, head in heads.items():
                descriptor = os.open(
                    os.path.join(self.folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
                )
                with os.fdopen(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(head) + b"\n")
        except FileExistsError:
            raise KVCatchError(
                f"{self.folder} holds results of a mirror.", "Name another folder with --mirror-dir."
            ) from None
        except OSError as error:
            raise KVCatchError(
                f"--mirror-dir {self.folder}: {error.strerror}.", "Name another folder."
            ) from None
        self._worker = _Worker(self._setup)
        self._thread = threading.Thread(
            target=self._run, args=(self._worker,), name="kvcatch-mirror", daemon=True
        )
        self._thread.start()
        self._count("started")

    def close(self) -> None:
        """End; a comparison that is under way is given up after two seconds."""
        self._ending.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread sees _ending after the job it is at
        if self._thread is not None:
            self._thread.join(2.0)
        if self._worker is not None:
            self._worker.end(1.0)

    def _run(self, worker: _Worker) -> None:
        """Hand one job after the other to the worker, until the end."""
        while not self._ending.is_set():
            job = self._queue.get()
            if job is None:
                return
            if self.stopped:
                continue
            try:
                if self._done(worker.told(self._task(job))) == "copied":
                    if self._idle(job.engine):
                        self._done(worker.told(COMPARE))
                    else:
                        self._count("busy")
            except (OSError, EOFError, msgspec.MsgspecError):
                if not self._ending.is_set():
                    self._stop("errors", "its process has ended")

    def _task(self, job: Job) -> Task:
        return Task(
            name=hashed(job.request_id), route=job.route, body=job.body, stream=job.ask.stream, model=job.ask.model,
            prompt=job.ask.prompts[0],
            arguments=template_arguments(job.ask.document) if job.route == CHAT else {},
            prompt_tokens=job.ask.longest_prompt, engine=job.engine.url, sent=job.sent, first=job.first,
            finished=job.finished, output=job.output,
        )  # fmt: skip

    def _done(self, told: Told) -> str:
        """Pass on what became of a request; its outcome."""
        if told.outcome:
            self._count(told.outcome)
        if told.failure:
            logger.warning("mirror: %s", told.failure)
        if told.stopped:
            self._stop(told.stopped, told.words)
        return told.outcome

    def _stop(self, reason: str, words: str) -> None:
        self.stopped = reason
        self._count(f"stopped-{reason}")
        logger.warning("mirror stopped, no more requests are copied: %s", words)


def chosen(request_id: str, share: float) -> bool:
    """Whether a request is among those copied: the same answer for the same id everywhere."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"kvcatch-mirror").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def hashed(request_id: str) -> str:
    """What stands for a request in the results: 16 hex digits of a keyed hash."""
    return f"{tags.hash_secret(request_id):016x}"

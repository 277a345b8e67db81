"""A copy of some requests goes to a candidate engine; clients neither wait for it nor see it.

One thread of its own with connections of its own. The client's path does one thing: it puts a request that was
answered into a short queue, or drops it. Kept are numbers, never what was sent or answered.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from kvcatch import __version__
from kvcatch.capture import tags
from kvcatch.errors import KVCatchError
from kvcatch.gateway.body import CHAT, COMPLETIONS, Ask
from kvcatch.gateway.counting import template_arguments
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.usage import StreamMeter, output_of
from kvcatch.quality.endpoint import Endpoint, Position
from kvcatch.quality.shadow import Judge, Pair, PairsHead, pair
from kvcatch.quality.verdict import Limits
from kvcatch.sources.replayed import Answer, Head, Tail

logger = logging.getLogger("kvcatch.gateway")

#: requests that wait for the candidate, and their largest body: what a mirror can hold in memory
QUEUE, BODY = 16, 256 << 10
#: tokens of a prompt that are compared (log-probabilities take memory outside the pool), and that are continued
SCORED, CONTINUED = 512, 16
#: seconds for one answer of the candidate
TIMEOUT = 30.0
#: failures of the candidate in a row that stop the mirror
FAILURES = 5
UPSTREAM, CANDIDATE, PAIRS = "upstream.jsonl", "candidate.jsonl", "pairs.jsonl"


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
        self.judge = Judge(limits or Limits())
        self._idle, self._count, self._key, self._timeout = idle, count, key, timeout
        self._queue: queue.Queue[Job | None] = queue.Queue(QUEUE)
        self._thread = threading.Thread(target=self._run, name="kvcatch-mirror", daemon=True)
        self._ends: dict[str, Endpoint] = {}
        self._files: dict[str, BinaryIO] = {}
        self._began = time.monotonic()
        self._index = self._failures = 0
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
        """Open the files and begin. Raises KVCatchError when the folder cannot be written or holds results."""
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            for name in (UPSTREAM, CANDIDATE, PAIRS):
                descriptor = os.open(
                    os.path.join(self.folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
                )
                self._files[name] = os.fdopen(descriptor, "wb", buffering=0)
        except FileExistsError:
            raise KVCatchError(
                f"{self.folder} holds results of a mirror.", "Name another folder with --mirror-dir."
            ) from None
        except OSError as error:
            raise KVCatchError(
                f"--mirror-dir {self.folder}: {error.strerror}.", "Name another folder."
            ) from None
        start = time.time()
        for name in (UPSTREAM, CANDIDATE):
            self._write(name, Head(kvcatch_version=__version__, trace="mirror", url=name.partition(".")[0],
                                   start_unix_seconds=start))  # fmt: skip
        self._write(PAIRS, PairsHead(kvcatch_version=__version__, candidate=urlsplit(self.url).netloc))
        self._count("started")
        self._thread.start()

    def close(self) -> None:
        """End; a comparison that is under way is given up after two seconds."""
        self._ending.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread sees _ending after the job it is at
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._ending.is_set():
            job = self._queue.get()
            if job is None:
                break
            if self.stopped:
                continue
            try:
                self._mirror(job)
            except OSError as error:
                self._stop("files", f"its results cannot be written: {error.strerror}")
            except Exception as error:  # noqa: BLE001 (the mirror goes on, and clients see nothing)
                # Whatever is wrong with one answer must not end the thread; its words may quote a prompt.
                self._count("failed")
                logger.warning("mirror: %s", type(error).__name__)
                self._failed()
        tail = Tail(duration_seconds=time.monotonic() - self._began)
        for name in (UPSTREAM, CANDIDATE):
            self._write(name, tail)
        for end in self._ends.values():
            end.close()
        for file in self._files.values():
            file.close()

    def _stop(self, reason: str, words: str) -> None:
        self.stopped = reason
        self._count(f"stopped-{reason}")
        logger.warning("mirror stopped, no more requests are copied: %s", words)

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES:
            self._stop("errors", f"the candidate failed {FAILURES} times in a row")

    # ---- one request ----------------------------------------------------------------------------------------

    def _mirror(self, job: Job) -> None:
        name = hashed(job.request_id)
        index, self._index = self._index, self._index + 1
        copied = self._copy(job, index, name)
        since = self._began
        self._write(
            UPSTREAM,
            Answer(
                index=index, request_id=name, tenant="", due_seconds=job.sent - since, sent_seconds=job.sent - since,
                prompt_tokens=job.ask.longest_prompt, status="ok",
                first_seconds=None if job.first is None else job.first - since,
                finished_seconds=job.finished - since, output_tokens=job.output, http_status=200,
            ),
        )  # fmt: skip
        self._write(CANDIDATE, copied)
        if copied.status != "ok":
            self._count("failed")
            self._failed()
            return
        self._failures = 0
        self._count("copied")
        if not self._idle(job.engine):
            self._count("busy")
            return
        one = self._compare(job, name)
        if one is None:
            return
        self._write(PAIRS, one)
        self._count("compared")
        before = self.judge.verdict
        self.judge.add(one)
        if before != "fail" and self.judge.verdict == "fail":
            self._stop(
                "verdict", f"the candidate answers differently, {self.judge.requests} requests compared"
            )

    def _copy(self, job: Job, index: int, name: str) -> Answer:
        """The same request to the candidate, timed as its client's was; the answer is read and forgotten."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout)
        wanted = {"Content-Type": "application/json", "X-Request-Id": name}
        if self._key:
            wanted["Authorization"] = f"Bearer {self._key}"
        sent = time.monotonic()
        first: float | None = None
        tokens: int | None = None
        status, code = "failed", None
        try:
            connection.request("POST", parts.path + job.route, job.body, wanted)
            response = connection.getresponse()
            code = response.status
            meter, whole = StreamMeter(), b""
            while chunk := response.read1(1 << 16):
                first = first or time.monotonic()
                if time.monotonic() - sent > self._timeout:
                    raise TimeoutError
                if job.ask.stream:
                    meter.feed(chunk)
                elif len(whole) < 4 << 20:
                    whole += chunk
            tokens = meter.output_tokens if job.ask.stream else output_of(whole)
            whole_stream = not job.ask.stream or meter.done
            status = "ok" if code == 200 and whole_stream else "refused" if code != 200 else "failed"
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        end = time.monotonic()
        since = self._began
        return Answer(
            index=index, request_id=name, tenant="", due_seconds=sent - since, sent_seconds=sent - since,
            prompt_tokens=job.ask.longest_prompt, status=status,
            first_seconds=first - since if first is not None and job.ask.stream else None,
            finished_seconds=end - since, output_tokens=tokens, http_status=code,
        )  # fmt: skip

    def _compare(self, job: Job, name: str) -> Pair | None:
        """What both engines expect of the prompt, and how both go on; None when it cannot be asked."""
        try:
            base = self._end(job.engine.url)
        except KVCatchError:
            self._count("baseline-failed")
            return None
        try:
            other = self._end(self.url)
        except KVCatchError:
            self._count("failed")
            self._failed()
            return None
        if (job.ask.model or base.model) != base.model:
            self._count("unsupported")
            return None
        k = min(base.k, other.k)
        base.k = other.k = k
        try:
            ids = self._ids(base, job)[:SCORED]
            if len(ids) < 2:
                self._count("unsupported")
                return None
            first = _asked(base, ids)
        except KVCatchError:
            # The upstream's trouble is not the candidate's.
            self._count("baseline-failed")
            return None
        try:
            second = _asked(other, ids)
        except KVCatchError:
            self._count("failed")
            self._failed()
            return None
        return pair(name, k, (first[0], second[0]), (first[1], second[1]))

    def _end(self, url: str) -> Endpoint:
        if url not in self._ends:
            self._ends[url] = Endpoint(url, self._timeout, key=self._key)
        return self._ends[url]

    def _ids(self, base: Endpoint, job: Job) -> list[int]:
        given: Any = job.ask.prompts[0]
        if job.route == CHAT:
            return base.chat_tokens(given, template_arguments(job.ask.document))
        return base.tokens(given) if isinstance(given, str) else list(given)

    def _write(self, name: str, row: msgspec.Struct) -> None:
        self._files[name].write(msgspec.json.encode(row) + b"\n")


def _asked(end: Endpoint, ids: list[int]) -> tuple[list[Position], tuple[Position, ...]]:
    end.new_pass()
    return end.score(ids), end.generate(ids, CONTINUED).positions


def chosen(request_id: str, share: float) -> bool:
    """Whether a request is among those copied: the same answer for the same id everywhere."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"kvcatch-mirror").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def hashed(request_id: str) -> str:
    """What stands for a request in the results: 16 hex digits of a keyed hash."""
    return f"{tags.hash_secret(request_id):016x}"

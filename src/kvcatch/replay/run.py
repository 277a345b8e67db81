"""A whole run: find the engine, warm it up, send the workload, write what came back."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import BinaryIO

import aiohttp
import msgspec
import numpy as np

from kvcatch import __version__
from kvcatch.errors import KVCatchError
from kvcatch.replay import endpoint as ends
from kvcatch.replay.endpoint import Endpoint
from kvcatch.replay.prompts import PromptBook
from kvcatch.replay.sender import Job, send
from kvcatch.sources.readings import Reading
from kvcatch.sources.replayed import WARM_UP, Answer, Head, Replayed, Tail
from kvcatch.workload import Workload, build

#: a tenant that can stand in a request id
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")
#: the engine's counters are read again until they stand still, at most so long
_SETTLE_SECONDS = 5.0
_TICK = 0.1


@dataclasses.dataclass(frozen=True)
class Options:
    """How to send. seed None: another one each time. warm_up: requests sent and forgotten before the start."""

    url: str
    model: str | None = None
    api_key: str | None = None
    speed: float = 1.0
    seed: int | None = None
    warm_up: int = 4
    vocab_size: int | None = None
    timeout_seconds: float = 600.0


@dataclasses.dataclass
class Progress:
    """How far a run is; ``seconds`` of ``span_seconds`` that the workload's arrivals take."""

    total: int
    span_seconds: float
    sent: int = 0
    ended: int = 0
    failed: int = 0
    seconds: float = 0.0


class _Log:
    """Writes each answer when it comes, counts, and lets the prompts learn from it."""

    def __init__(self, file: BinaryIO, progress: Progress, book: PromptBook) -> None:
        self._file = file
        self._progress = progress
        self._book = book
        self.answers: list[Answer] = []

    def write(self, row: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(row) + b"\n")

    def sent(self, job: Job, seconds: float) -> None:
        self._progress.sent += 1

    def token(self, job: Job, count: int) -> None:
        pass

    def ended(self, job: Job, answer: Answer, output: list[int] | None) -> None:
        self.answers.append(answer)
        self.write(answer)
        self._progress.ended += 1
        self._progress.failed += answer.status in ("refused", "failed")
        if output:
            self._book.learn(job.index, output)


class _Deaf:
    """Listens to the warm-up and keeps nothing but refusals."""

    def __init__(self) -> None:
        self.refused: Answer | None = None

    def sent(self, job: Job, seconds: float) -> None:
        pass

    def token(self, job: Job, count: int) -> None:
        pass

    def ended(self, job: Job, answer: Answer, output: list[int] | None) -> None:
        if answer.status != "ok":
            self.refused = answer


def replay(
    workload: Workload,
    options: Options,
    path: str,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Replayed:
    """Send a workload to an engine and write one line per request to ``path``.

    SIGINT ends it in order: nothing more is sent, what is in flight is given up and marked, the file is complete.

    Args:
        workload: what to ask.
        options: of whom, and how.
        path: of the results, a new file unless ``overwrite``.
        overwrite: replace a file that is there.
        progress: called some ten times a second.
        note: told what could not be done as asked.

    Raises:
        KVCatchError: the engine does not answer, the file exists, or a bad option.
    """
    if not options.speed > 0:
        raise KVCatchError(f"--speed {options.speed} is not positive.", "1 is the workload's own.")
    if not overwrite and os.path.exists(path):
        raise KVCatchError(f"{path} exists.", "Choose another name with -o, or add --force.")
    return asyncio.run(_replay(workload, options, path, progress, note))


async def _replay(
    workload: Workload,
    options: Options,
    path: str,
    progress: Callable[[Progress], None] | None,
    note: Callable[[str], None],
) -> Replayed:
    stop = asyncio.Event()
    with interruptible(stop):
        async with ends.open_session(options.api_key, options.timeout_seconds) as session:
            target = await ends.find(session, options.url, model=options.model, vocab_size=options.vocab_size)
            fits = fitting(workload, target)
            for said in target.notes:
                note(said)
            seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
            await warm_up(session, target, workload, options.warm_up, seed, stop)
            book = PromptBook(workload, target.alphabet, seed)
            jobs = jobs_of(workload, book, fits, options.speed)
            head = Head(
                kvcatch_version=__version__, trace=os.path.basename(workload.name), url=ends.shown(target.url), model=target.model,
                engine_version=target.engine_version, seed=seed, speed=options.speed, requests=len(jobs),
                start_unix_seconds=time.time(), config=target.config,
            )  # fmt: skip
            state = Progress(len(jobs), jobs[-1].due_seconds if jobs else 0.0)
            before = await ends.read(session, target.url)
            with open(path, "wb", buffering=0) as file:
                log = _Log(file, state, book)
                log.write(head)
                ticker = asyncio.create_task(_tick(state, progress)) if progress is not None else None
                duration = await send(
                    session, target, jobs, watcher=log, stop=stop, want_tokens=book.wants_answers
                )
                if ticker is not None:
                    ticker.cancel()
                after = await settled(session, target)
                tail = Tail(
                    interrupted=stop.is_set(), duration_seconds=duration, unanswered_quotes=book.unanswered,
                    counters=ends.growth(before, after),
                )  # fmt: skip
                log.write(tail)
    if progress is not None:
        progress(state)
    answers = tuple(sorted(log.answers, key=lambda answer: answer.index))
    return Replayed(path, head, answers, tail)


class interruptible:
    """While it is entered, the first SIGINT sets an event instead of raising; a second one raises."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()

        def first() -> None:
            self._stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        # Outside the main thread signals cannot be taken; then nobody asks us to.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGINT, first)

    def __exit__(self, *_: object) -> None:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)


def fitting(workload: Workload, target: Endpoint) -> list[int]:
    """Requests that the engine can take at all. Raises KVCatchError when there is none."""
    if target.max_model_len is None:
        return list(range(len(workload)))
    need = workload.prompt_tokens + np.maximum(workload.output_tokens, 1)
    fits = np.flatnonzero(need <= target.max_model_len).tolist()
    if not fits:
        raise KVCatchError(
            f"no request of {workload.name} fits into {target.max_model_len:,} tokens.",
            "Start the engine with a larger --max-model-len.",
        )
    left_out = len(workload) - len(fits)
    if left_out:
        target.notes.append(
            f"{left_out} requests are longer than the engine's {target.max_model_len:,} tokens and are left out"
        )
    return fits


def jobs_of(workload: Workload, book: PromptBook, fits: Sequence[int], speed: float = 1.0) -> list[Job]:
    """The requests at their times, with the tenant where a recorder on the other side reads it."""
    index = workload.tenant_index
    return [
        _job(
            number,
            workload.tenants[index[number]] if len(workload.tenants) else "",
            float(workload.arrival_seconds[number]) / speed,
            int(workload.prompt_tokens[number]),
            max(1, int(workload.output_tokens[number])),
            book,
        )
        for number in fits
    ]


def _job(number: int, tenant: str, due: float, prompt: int, output: int, book: PromptBook) -> Job:
    name, extra = f"r{number}", {}
    if tenant and _PLAIN.fullmatch(tenant):
        name = f"kvc~{tenant}~~{name}"
    elif tenant:
        extra = {"vllm_xargs": {"kvcatch_tenant": tenant}}
    return Job(
        number, name, tenant, due, prompt, output, lambda: book.json(number), extra, book.quotes(number)
    )


async def warm_up(
    session: aiohttp.ClientSession,
    target: Endpoint,
    workload: Workload,
    count: int,
    seed: int,
    stop: asyncio.Event,
) -> None:
    """Requests of a middling length, one after the other, that share nothing with the workload.

    Raises KVCatchError when the engine refuses them: then it would refuse all.
    """
    if count < 1:
        return
    prompt = int(np.median(workload.prompt_tokens))
    if target.max_model_len is not None:
        prompt = max(1, min(prompt, target.max_model_len - 8))
    rows = [{"arrival": 0.0, "prompt": prompt, "output": 4, "segments": [(n, prompt)]} for n in range(count)]
    book = PromptBook(build("warm-up", rows, grain=1), target.alphabet, seed + 1)
    for number in range(count):
        deaf = _Deaf()
        job = dataclasses.replace(_job(number, "", 0.0, prompt, 4, book), request_id=f"{WARM_UP}{number}")
        await send(session, target, [job], watcher=deaf, stop=stop)
        if deaf.refused is not None and not stop.is_set():
            raise KVCatchError(
                f"{ends.shown(target.url)} refused a request of {prompt} tokens: {deaf.refused.error}.",
                "It must serve /v1/completions with token ids as the prompt.",
            )


async def _tick(state: Progress, progress: Callable[[Progress], None]) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        state.seconds = loop.time() - start
        progress(state)
        await asyncio.sleep(_TICK)


async def settled(session: aiohttp.ClientSession, target: Endpoint) -> Reading | None:
    """The counters once they stand still: they are written after the last answer has left."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _SETTLE_SECONDS
    last = await ends.read(session, target.url)
    while last is not None and loop.time() < end:
        await asyncio.sleep(_TICK)
        now = await ends.read(session, target.url)
        if now is not None and not now.running and not any(ends.growth(last, now).values()):
            return now
        last = now
    return last

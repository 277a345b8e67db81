"""A load ladder: the same mix of requests at rising rates, every request's demand and latency seen from outside.

The pool itself is not asked: a ledger of what is in flight knows the demand exactly and at once. Blocks of prompts that
share a prefix are counted once, generated tokens when they come back.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import numpy as np

from kvcatch.analysis.watermark import Level, Observations, Unloaded, unloaded_line
from kvcatch.errors import KVCatchError
from kvcatch.replay import endpoint as ends
from kvcatch.replay.endpoint import Endpoint
from kvcatch.replay.prompts import PromptBook
from kvcatch.replay.run import Options, fitting, interruptible, jobs_of, settled, warm_up
from kvcatch.replay.sender import Job, send
from kvcatch.sources.replayed import Answer
from kvcatch.workload import Workload

#: rates of the rungs as shares of what the engine finished at most
RUNGS = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
#: requests sent one by one to see the engine without load
_ALONE = 12
#: share of a rung's requests that only bring the engine to its load
_WARM = 0.15
#: of a rung: requests, and how long it lasts in lifetimes of an unhindered request
_FEWEST, _MOST, _LIVES = 120, 400, 10
#: demand at which a rung is given up: further up there is nothing to learn, and the queue would take long to drain
_ENOUGH = 2.5


class Ledger:
    """Demand for blocks of everything in flight, over usable blocks. ``full`` is set when it is more than enough."""

    def __init__(self, workload: Workload, block_size: int, usable: int, full: asyncio.Event | None) -> None:
        self._full = full
        self._view = workload.blocks(block_size)
        self._size = block_size
        self._usable = usable
        self._shared: Counter[int] = Counter()
        self._extra: dict[int, int] = {}
        self.answers: list[Answer] = []
        self.committed: dict[int, float] = {}
        self.alone: dict[int, bool] = {}

    def _prompt(self, job: Job) -> list[int]:
        offsets = self._view.offsets
        blocks: list[int] = self._view.ids[offsets[job.index] : offsets[job.index + 1]].tolist()
        return blocks

    def sent(self, job: Job, seconds: float) -> None:
        self.alone[job.index] = not self._extra
        self._shared.update(self._prompt(job))
        self._extra[job.index] = 0
        self.committed[job.index] = self.demand
        if self._full is not None and self.demand > _ENOUGH:
            self._full.set()

    @property
    def demand(self) -> float:
        """Blocks wanted now, over usable ones."""
        return (len(self._shared) + sum(self._extra.values())) / self._usable

    def token(self, job: Job, count: int) -> None:
        whole = -(-job.prompt_tokens // self._size)
        # The last token that came back has no key and value yet.
        self._extra[job.index] = -(-(job.prompt_tokens + count - 1) // self._size) - whole

    def ended(self, job: Job, answer: Answer, output: list[int] | None) -> None:
        self._shared.subtract(self._prompt(job))
        for block in self._prompt(job):
            if self._shared[block] <= 0:
                del self._shared[block]
        self._extra.pop(job.index, None)
        self.answers.append(answer)


@dataclasses.dataclass
class Climbed:
    """What a ladder saw. rate: requests a second that the engine finished at most."""

    observations: Observations
    unloaded: Unloaded
    levels: tuple[Level, ...]
    rate: float
    endpoint: Endpoint


def climb(
    workload: Workload,
    options: Options,
    *,
    per_level: int | None = None,
    rungs: Sequence[float] = RUNGS,
    rates: Sequence[float] = (),
    num_blocks: int | None = None,
    block_size: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Climbed:
    """Measure an idle engine, find what it finishes at most, then climb.

    Args:
        workload: the mix; its requests are taken in turn, its arrivals are not used.
        options: of whom, and how.
        per_level: requests of each rung; None: what arrives while ten requests are served one after the other, at least 120.
        rungs: rates as shares of what the engine finishes at most.
        rates: requests a second instead of ``rungs``.
        num_blocks, block_size: of the pool, where the engine's metrics do not say.
        note: told how far it is.

    Raises:
        KVCatchError: the engine does not answer, or the size of its pool is not known; interrupted.
    """
    return asyncio.run(_climb(workload, options, per_level, rungs, rates, (num_blocks, block_size), note))


async def _climb(
    workload: Workload,
    options: Options,
    per_level: int | None,
    rungs: Sequence[float],
    rates: Sequence[float],
    pool: tuple[int | None, int | None],
    note: Callable[[str], None],
) -> Climbed:
    stop = asyncio.Event()
    seed = 0 if options.seed is None else options.seed
    rng = np.random.default_rng(seed)
    with interruptible(stop):
        async with ends.open_session(options.api_key, options.timeout_seconds) as session:
            target = await ends.find(session, options.url, model=options.model, vocab_size=options.vocab_size)
            usable, size = _pool(target, pool)
            mix = _mix(workload, target, usable, size)
            await warm_up(session, target, workload, options.warm_up, seed, stop)
            climber = _Climber(session, target, workload, mix, usable, size, rng, stop)
            note(f"{_ALONE} requests one after the other")
            alone, _ = await climber.rung(np.arange(_ALONE) * 0.0, one_by_one=True)
            line = _unloaded(alone)
            if not rates:
                burst = int(np.clip(4 * usable / max(1.0, climber.typical_blocks), 48, 256))
                note(f"{burst} requests at once")
                crowd, _ = await climber.rung(np.zeros(burst), endless=True)
                most = _throughput(crowd)
                rates = [share * most for share in rungs]
            else:
                most = float(max(rates))
            order = rng.permutation(len(rates))
            levels: list[Level] = []
            parts: list[Ledger] = []
            preempted: list[float] = []
            total = 0
            for place, number in enumerate(order.tolist(), 1):
                rate = float(rates[number])
                count = per_level or min(_MOST, max(_FEWEST, int(rate * _LIVES * _life(alone))))
                note(f"rung {place} of {len(rates)}: {rate:.2f} requests a second for {count / rate:.0f} s")
                seen, grown = await climber.rung(np.cumsum(rng.exponential(1 / rate, count)))
                level = _level(rate, seen, line, grown)
                levels.append(level)
                parts.append(seen)
                if grown:
                    preempted.append(level.committed_ratio_p95)
                total += grown or 0
            levels.sort(key=lambda level: level.requests_per_second)
    if stop.is_set():
        raise KVCatchError("interrupted before the ladder was climbed.", "Nothing was stored.", 130)
    rows = [row for seen in parts for row in _rows(seen)]
    table = np.array(rows, np.float64).reshape(-1, 4)
    lengths = [int(workload.prompt_tokens[number]) for number in mix]
    observations = Observations(
        committed=table[:, 0],
        ttft=table[:, 1],
        tokens=table[:, 2],
        idle=table[:, 3] > 0,
        largest_ratio=-(-max(lengths) // size) / usable,
        preempted_at=np.array(preempted),
        preemptions=total,
    )
    return Climbed(observations, line, tuple(levels), most, target)


class _Climber:
    """Sends rungs of one mix."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Endpoint, workload: Workload, mix: list[int], usable: int,
        size: int, rng: np.random.Generator, stop: asyncio.Event,
    ) -> None:  # fmt: skip
        self._session = session
        self._target = target
        self._workload = workload
        self._mix = mix
        self._usable = usable
        self._size = size
        self._rng = rng
        self._stop = stop
        self._next = 0
        tokens = workload.prompt_tokens[mix] + np.maximum(workload.output_tokens[mix], 1)
        self.typical_blocks = float((-(-tokens // size)).mean())

    async def rung(
        self, due: np.ndarray, *, one_by_one: bool = False, endless: bool = False
    ) -> tuple[Ledger, int | None]:
        """Send requests at these seconds; the ledger, and how many preemptions the engine counted meanwhile.

        ``endless``: all of them, however much the demand becomes.
        """
        chosen = [self._mix[(self._next + n) % len(self._mix)] for n in range(len(due))]
        self._next += len(due)
        # A request that comes again in one rung would hit itself; each rung has tokens of its own.
        book = PromptBook(self._workload, self._target.alphabet, int(self._rng.integers(1 << 31)))
        jobs = _numbered(jobs_of(self._workload, book, chosen), due)
        full = None if endless else asyncio.Event()
        ledger = Ledger(_rows_of(self._workload, chosen), self._size, self._usable, full)
        before = await ends.read(self._session, self._target.url)
        for batch in ([job] for job in jobs) if one_by_one else (jobs,):
            await self._until(
                full, send(self._session, self._target, batch, watcher=ledger, stop=full or self._stop)
            )
        if self._stop.is_set():
            raise KVCatchError("interrupted before the ladder was climbed.", "Nothing was stored.", 130)
        bad = [answer for answer in ledger.answers if answer.status in ("refused", "failed")]
        if len(bad) > len(jobs) // 10:
            raise KVCatchError(
                f"{ends.shown(self._target.url)} did not answer: {bad[0].error}.", "Look at the engine's log."
            )
        grown = ends.growth(before, await settled(self._session, self._target)).get("preemptions")
        return ledger, None if grown is None else int(grown)

    async def _until(self, full: asyncio.Event | None, sending: Coroutine[Any, Any, float]) -> None:
        """Wait for the sending; an interrupt of the whole ladder ends the rung too."""
        if full is None:
            await sending
            return
        halt = asyncio.ensure_future(self._stop.wait())
        halt.add_done_callback(lambda done: None if done.cancelled() else full.set())
        try:
            await sending
        finally:
            halt.cancel()


def _numbered(jobs: list[Job], due: np.ndarray) -> list[Job]:
    """The jobs of one rung, numbered from 0: a request may come several times."""
    return [
        dataclasses.replace(job, index=number, due_seconds=float(when), after=())
        for number, (job, when) in enumerate(zip(jobs, due, strict=True))
    ]


def _rows_of(workload: Workload, chosen: Sequence[int]) -> Workload:
    """A workload of these requests, in this order."""
    pieces = [np.arange(workload.offsets[n], workload.offsets[n + 1]) for n in chosen]
    take = np.concatenate(pieces)
    rows = np.array(chosen)
    return dataclasses.replace(
        workload,
        arrival_seconds=workload.arrival_seconds[rows],
        prompt_tokens=workload.prompt_tokens[rows],
        output_tokens=workload.output_tokens[rows],
        offsets=np.concatenate(([0], np.cumsum([len(piece) for piece in pieces]))),
        segment_ids=workload.segment_ids[take],
        segment_tokens=workload.segment_tokens[take],
        content_ids=None,
        tenant=workload.tenant_index[rows],
        made_ids=None,
        made_offsets=None,
    )


def _pool(target: Endpoint, given: tuple[int | None, int | None]) -> tuple[int, int]:
    """Usable blocks and tokens a block. Raises KVCatchError when nobody says."""
    reading = target.reading
    blocks = given[0] - 1 if given[0] else reading.usable_blocks if reading is not None else None
    size = given[1] or (reading.block_size if reading is not None else None)
    if not blocks or not size:
        raise KVCatchError(
            f"{ends.shown(target.url)} does not say how large its pool is.",
            "Give --num-blocks and --block-size.",
        )
    return blocks, size


def _mix(workload: Workload, target: Endpoint, usable: int, size: int) -> list[int]:
    """Requests that the engine can serve. Raises KVCatchError when there is none."""
    need = -(-(workload.prompt_tokens + np.maximum(workload.output_tokens, 1)) // size)
    mix = [number for number in fitting(workload, target) if need[number] <= usable]
    if not mix:
        raise KVCatchError(
            f"no request of {workload.name} fits into {usable} blocks.", "Choose shorter ones."
        )
    return mix


def _rows(seen: Ledger) -> list[tuple[float, float, float, float]]:
    """(demand, TTFT, uncached prompt tokens, alone) of the requests with a first token after the warm-up of the rung."""
    skip = int(len(seen.answers) * _WARM)
    return [
        (
            seen.committed[answer.index],
            answer.ttft_seconds,
            answer.prompt_tokens - (answer.cached_tokens or 0),
            seen.alone[answer.index],
        )
        for answer in seen.answers
        if answer.index >= skip and answer.ttft_seconds is not None
    ]


def _unloaded(seen: Ledger) -> Unloaded:
    rows = np.array(
        [
            (answer.ttft_seconds, answer.prompt_tokens - (answer.cached_tokens or 0))
            for answer in seen.answers
            if answer.ttft_seconds is not None
        ],
        np.float64,
    ).reshape(-1, 2)
    if len(rows) < _ALONE // 2:
        raise KVCatchError("the engine answered too few of the first requests.", "Look at the engine's log.")
    return unloaded_line(np.zeros(len(rows)), rows[:, 0], rows[:, 1], np.ones(len(rows), bool))


def _life(seen: Ledger) -> float:
    """Median seconds of one request alone."""
    return float(
        np.median([(answer.finished_seconds or 0.0) - answer.sent_seconds for answer in seen.answers])
    )


def _throughput(seen: Ledger) -> float:
    """Requests a second, from the first one sent to the last one answered: what a full engine finishes, or a bit less."""
    last = max(answer.finished_seconds or 0.0 for answer in seen.answers)
    return len(seen.answers) / last


def _level(rate: float, seen: Ledger, line: Unloaded, preemptions: int | None) -> Level:
    rows = np.array(_rows(seen), np.float64).reshape(-1, 4)
    slow = rows[:, 1] / line.seconds(rows[:, 2])
    return Level(
        requests_per_second=rate,
        requests=len(seen.answers),
        committed_ratio_mean=float(rows[:, 0].mean()) if len(rows) else 0.0,
        committed_ratio_p95=float(np.percentile(rows[:, 0], 95)) if len(rows) else 0.0,
        slowdown_p95=float(np.percentile(slow, 95)) if len(rows) else None,
        preemptions_per_request=None if preemptions is None else preemptions / max(1, len(seen.answers)),
    )

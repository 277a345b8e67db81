"""Who starts next: EASY backfilling on KV blocks under a peak check, with guards against starvation.

The governor knows requests as ``Job`` and running ones as ``Plan``; it never sees an engine, so the same
decisions can be replayed anywhere. Its caller reports starts, progress and departures, and asks ``choose``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcatch.policy.blocks import BlockTable, IntArray
from kvcatch.policy.lengths import OutputLengths
from kvcatch.policy.settings import Settings
from kvcatch.policy.timeline import Plan, Timeline
from kvcatch.policy.waiting import Job, VirtualTokens, WaitingLine

# Reasons, as they appear in records and on screens.
IN_ORDER = "in-order"  # the head starts, pool below the safe utilisation
ALONE = "alone"  # the head starts because nothing runs
FITS = "fits"  # the head starts above the safe utilisation
SHORT_FIRST = "short-first"  # started before a head that could start too
BACKFILLED = "backfilled"  # started before a blocked head without delaying it
NO_BLOCKS = "no-blocks"  # held: not enough free blocks now
PEAK = "peak"  # held: would meet more blocks than the pool has later
LONG_SHARE = "long-share"  # held: long requests hold their share while short ones wait
GUARD = "guard"  # held: the head has been passed or has waited enough
NEVER_FITS = "never-fits"  # rejected: more blocks than the pool has
VICTIM = "victim"  # preempted by the victim rule

#: shorter requests that may start before a head that fits too
FRONT_LIMIT = 4
#: candidates looked at, peak checks and prefix look-ups per step: they bound the time of a decision
MAX_CANDIDATES = 32
MAX_PROBES = 8
MAX_LOOKUPS = 4
#: of the pool, for long requests together while at least so many short ones wait
LONG_SHARE_OF_POOL = 0.5
SHORTS_WAITING = 8
#: slots of the timeline; longer horizons use wider slots
MAX_SLOTS = 8192


class Governor:
    """Decides starts for one pool.

    usable_blocks: all but the null block. reserve_blocks: kept free at admission (vLLM's own watermark).
    token_budget: tokens per step. chunk: tokens of one prefill per step, 0 = the whole budget. lag: steps a finished request keeps its blocks (async scheduling: 1).
    flat: requests may grow faster than one token per step, so plan each at its full size. pace: steps per token
    (pipeline stages).
    hits(job): last steps until which running requests hold the blocks that ``job`` would share, or None.
    """

    def __init__(
        self,
        settings: Settings,
        blocks: BlockTable,
        usable_blocks: int,
        token_budget: int,
        *,
        chunk: int = 0,
        reserve_blocks: int = 0,
        lag: int = 0,
        flat: bool = False,
        pace: int = 1,
        hits: Callable[[Job], IntArray | None] | None = None,
    ) -> None:
        self.settings = settings
        self.blocks = blocks
        self.usable = usable_blocks
        self.limit = usable_blocks - reserve_blocks
        self.safe_blocks = settings.safe_utilization * usable_blocks
        self.budget = token_budget
        self.chunk = chunk or token_budget
        self.backlog = 0  # prompt tokens of running requests not computed yet
        self.long_tokens = self._long_threshold()
        self.long_blocks = LONG_SHARE_OF_POOL * usable_blocks
        self.lag = lag
        self.flat = flat
        self.pace = pace
        self.line = WaitingLine(VirtualTokens())
        self.lengths = OutputLengths(settings.quantile)
        self._in_flight = 0  # running requests, with those started in this step
        self.timeline = Timeline(blocks, -(-blocks.max_tokens // MAX_SLOTS))
        self.running: dict[str, Job] = {}
        self.reason = IN_ORDER
        self.step = 0
        self._longs: dict[str, Job] = {}
        self._now = 0.0
        self._hits = hits
        self._due: dict[int, list[Job]] = {}
        self._foreign = 0
        self._handed_over = 0
        self._reservation: Plan | None = None
        self._reserved_for: Job | None = None
        self._queue: list[Job] | None = None
        self._probes = 0
        self._looked: dict[str, IntArray | None] = {}

    # ---- life of a job -------------------------------------------------------------------------------

    def bound(self, job: Job, generated: int) -> int:
        """KV tokens at most: the last sampled token never gets a slot."""
        output = self.lengths.bound(job.tenant, job.prompt_tokens, generated, job.max_output)
        return min(max(job.prompt_tokens + output - 1, job.tokens), self.blocks.max_tokens)

    def enqueue(self, job: Job) -> None:
        """A job waits; its key must be set."""
        job.size = self.blocks[job.tokens]
        job.long = job.tokens > self.long_tokens
        job.total = self.bound(job, job.tokens - job.prompt_tokens)
        self.line.add(job)

    def take(self, job: Job) -> None:
        """The caller starts ``job`` in this step: count it at once, so that the next choice sees it."""
        head = self.line.first()
        if head is not job and head is not None:
            job.passed = head
            head.passes += 1
            head.front += self.reason == SHORT_FIRST
        self.line.remove(job)
        if job.long:
            self._longs[job.request_id] = job
        job.plan = self._candidate_plan(job, self._looked.get(job.request_id))
        self.timeline.add(job.plan)
        self.backlog += job.tokens

    def untake(self, job: Job) -> None:
        """The engine skipped ``job`` after all (LoRA limit, grammar, ...); it waits again at ``job.key``."""
        self._drop_plan(job)
        self._longs.pop(job.request_id, None)
        self.backlog -= job.tokens
        if job.passed is not None:
            job.passed.passes -= 1
            job.passed = None
        self.line.add(job)

    def admit(self, job: Job, computed: int, shared: IntArray | None) -> None:
        """After the step: ``job`` runs with ``computed`` tokens; others hold its blocks until ``shared``."""
        self._drop_plan(job)
        job.passed = None
        job.blocked_since = None
        self.running[job.request_id] = job
        if job.long:
            self._longs[job.request_id] = job
        self._plan(job, computed, shared)

    def replan(self, job: Job, computed: int, shared: IntArray | None) -> None:
        """A prefill moved on, or a bound was outlived: plan from where it really is."""
        self._drop_plan(job)
        if computed >= job.tokens:
            job.total = max(self.bound(job, computed + 1 - job.prompt_tokens), computed)
        self._plan(job, computed, shared)

    def stall(self, job: Job) -> None:
        """A running job did not advance in this step: everything it will do comes one step later."""
        plan = job.plan
        if self.pace == 1 and plan is not None and not plan.end - plan.tail <= self.step <= plan.end:
            self.timeline.add(plan, -1)
            plan.start += 1
            self.timeline.add(plan)
            self._due.setdefault(plan.end, []).append(job)

    def leave(self, request_id: str, kept_blocks: int = 0) -> Job | None:
        """A running job is gone (finished, aborted or preempted); others go on holding ``kept_blocks`` of its own.

        When it leaves as planned, the plans of those others count these blocks from the next step on.
        """
        job = self.running.pop(request_id, None)
        self._longs.pop(request_id, None)
        if job is not None:
            if job.plan is not None and job.plan.end == self.step:
                self._handed_over += kept_blocks
            self._drop_plan(job)
        return job

    def overdue(self) -> list[Job]:
        """Running jobs whose plan ended with the step before, although they still run."""
        late = self._due.pop(self.step - 1, ())
        return [job for job in late if job.plan is not None and job.plan.end == self.step - 1]

    def _drop_plan(self, job: Job) -> None:
        if job.plan is not None:
            self.timeline.add(job.plan, -1)
            job.plan = None

    def _plan(self, job: Job, computed: int, shared: IntArray | None) -> None:
        left = job.tokens - computed
        steps = self._prefill_steps(left, 0) if left > 0 else 0
        first = job.tokens if left > 0 else computed
        total = max(first, job.total)
        job.plan = Plan(self.step, first, total, steps + self._after(first, total), self.flat)
        if shared is not None and len(shared):
            job.plan.credit = self._credit(job.plan, shared)
        self.timeline.add(job.plan)
        self._due.setdefault(job.plan.end, []).append(job)

    def _candidate_plan(self, job: Job, shared: IntArray | None) -> Plan:
        if self.settings.quantile is not None:
            job.total = self.bound(job, job.tokens - job.prompt_tokens)
        steps = self._prefill_steps(job.tokens, job.tokens)
        tail = steps - 1 + self._after(job.tokens, job.total)
        plan = Plan(self.step, job.tokens, job.total, tail, self.flat)
        if shared is not None and len(shared):
            plan.credit = self._credit(plan, shared)
        return plan

    def _after(self, first: int, total: int) -> int:
        """Steps beyond one per token: pipeline stages, and batches in flight when it ends."""
        return (self.pace - 1) * max(0, total - first) + self.lag

    def _prefill_steps(self, tokens: int, more: int, decodes: int | None = None) -> int:
        """Steps until ``tokens`` are computed: prefills go one after the other, decodes come first."""
        decodes = len(self.running) if decodes is None else decodes
        together = -(-(self.backlog + more) // max(1, self.budget - decodes))
        return max(1, together, -(-tokens // self.chunk))

    def _credit(self, plan: Plan, shared: IntArray) -> IntArray:
        """Per slot, how many of the shared blocks a running request still holds by its own plan."""
        width = self.timeline.width
        slots = plan.end // width - plan.start // width + 1
        last_steps = (plan.start // width + 1 + np.arange(slots, dtype=np.int64)) * width - 1
        credit: IntArray = len(shared) - np.searchsorted(np.sort(shared), last_steps, side="left")
        return credit

    # ---- a step ----------------------------------------------------------------------------------------

    def begin(self, step: int, now: float, active_blocks: int, unheld: int = 0) -> None:
        """A step starts with ``active_blocks`` in use.

        unheld: blocks that plans of prefilling jobs count but that are not allocated yet. Blocks in use that
        no plan explains (orphans of shared prefixes, remote loads) are taken as held for good.
        """
        self.step, self._now = step, now
        self.timeline.advance(step - 1)
        explained = self.timeline.at(step - 1) - unheld + self._handed_over
        self._foreign = max(0, active_blocks - explained)
        self._handed_over = 0
        self._queue = None
        self._probes = MAX_PROBES
        self._looked.clear()

    def end(self) -> None:
        """The step's choices are made."""
        self._reserve(None)

    @property
    def planned_blocks(self) -> int:
        """Blocks in use in this step if everything advances as planned."""
        return self.timeline.at(self.step) + self._foreign

    def choose(self, active_blocks: int, running: int) -> Job | None:
        """The job to start now, None to start nothing; ``reason`` says why."""
        self._in_flight = running
        head = self.line.first()
        if head is None:
            return None
        if running == 0:
            self.reason = ALONE
            return head
        free = self.limit - active_blocks
        need = head.size
        shared = None
        if active_blocks + need > self.safe_blocks or need > free:
            shared = self._lookup(head, spend=False)
            need -= 0 if shared is None else len(shared)
        fits = need <= free
        if fits and self.settings.peak:
            plan = self._candidate_plan(head, shared)
            allowed = self.limit - self._foreign
            fits = self.timeline.peak_with(plan) <= allowed
            if not fits and shared is None:
                shared = self._lookup(head, spend=False)
                fits = shared is not None and (
                    self.timeline.peak_with(self._candidate_plan(head, shared)) <= allowed
                )
            self.reason = PEAK
        else:
            self.reason = NO_BLOCKS
        if fits:
            if active_blocks + need <= self.safe_blocks:
                self.reason = IN_ORDER
                return head
            if not (head.long and self._longs_have_their_share(head)):
                self._reserve(None)
                return self._shorter(head, need, free) or self._start(head, FITS)
            self.reason = LONG_SHARE
        return self._backfill(head, need, free)

    def _long_threshold(self) -> int:
        """Prompts above a quarter of the context or a sixteenth of the pool, whichever is less, are long."""
        full = int(np.searchsorted(self.blocks.values, self.usable // 16, side="right")) - 1
        return max(1, min(self.blocks.max_tokens // 4, full))

    def _longs_have_their_share(self, head: Job) -> bool:
        """Whether short requests wait while long ones would hold more than half of the pool."""
        if not self._longs or self.line.shorts < SHORTS_WAITING:
            return False
        held = sum(self.blocks[job.total] for job in self._longs.values())
        return held + self.blocks[head.total] > self.long_blocks

    def _start(self, job: Job, reason: str) -> Job:
        self.reason = reason
        return job

    def _shorter(self, head: Job, need: int, free: int) -> Job | None:
        """A shorter job that may go first because the head still fits beside it, now and later."""
        if head.front >= FRONT_LIMIT:
            return None
        for job in self._candidates():
            if job.priority > head.priority or job.size >= head.size:
                continue
            if job.size + need > free:
                break
            if self.settings.peak:
                if self._probes <= 0:
                    break
                # The head's prefill will queue behind this one's.
                self.backlog += job.tokens
                reserved = self._candidate_plan(head, self._looked.get(head.request_id))
                self.backlog -= job.tokens
                self.timeline.add(reserved)
                allowed = self._peak_allows(job)
                self.timeline.add(reserved, -1)
                if not allowed:
                    continue
            return self._start(job, SHORT_FIRST)
        return None

    def _backfill(self, head: Job, need: int, free: int) -> Job | None:
        """A job that may pass the blocked head: it fits now and leaves the head's reservation whole."""
        blocked = self.reason
        if head.blocked_since is None:
            head.blocked_since = self._now
        waited = self._now - head.blocked_since
        if head.passes >= self.settings.max_bypass or waited > self.settings.max_wait:
            self.reason = GUARD
            return None
        extra = self._hold_place(head, need)
        for job in self._candidates():
            if job.size > free:
                continue
            if self.settings.peak:
                if self._probes <= 0:
                    break
                if self._prefills_into(head, job) or self._slows(head, job) or not self._peak_allows(job):
                    continue
            elif extra is not None:
                ends = self._candidate_plan(job, None).end
                shadow = head.promised_step
                if not (shadow is not None and ends < shadow) and self.blocks[job.total] > extra:
                    continue
            return self._start(job, BACKFILLED)
        self.reason = blocked
        return None

    def _prefills_into(self, head: Job, job: Job) -> bool:
        """Whether the job's prefill would still take the step budget when the head is due."""
        place = self._reservation
        if place is None or self._reserved_for is not head:
            return False
        return self.step + self._prefill_steps(job.tokens, job.tokens) > place.start

    def _slows(self, head: Job, job: Job) -> bool:
        """Whether one more decode leaves so little step budget that the head's prefill outlasts its place."""
        place = self._reservation
        if place is None or self._reserved_for is not head:
            return False
        planned = self._prefill_steps(head.tokens, head.tokens)
        slower = self._prefill_steps(head.tokens, head.tokens, self._in_flight + 1)
        return slower > planned and self._candidate_plan(job, None).end >= place.start

    def _hold_place(self, head: Job, need: int) -> int | None:
        """Fix the head's shadow step; with the peak check, reserve its whole curve from there."""
        allowed = self.limit - self._foreign
        if self.settings.peak:
            if self._reserved_for is not head:
                self._reserve(None)
                plan = self._candidate_plan(head, None)
                if self.reason == LONG_SHARE:
                    plan.start = 1 + min(job.plan.end for job in self._longs.values() if job.plan)
                shadow = self.timeline.shadow(plan, allowed)
                if shadow is not None:
                    plan.start = shadow
                    self._reserve(plan, head)
                    if head.promised_step is None:
                        head.promised_step = shadow
            return None
        shadow = self.timeline.first_below(self.step, allowed - need)
        if shadow is None:
            return None
        head.promised_step = shadow
        return allowed - need - self.timeline.at(shadow)

    def _reserve(self, plan: Plan | None, head: Job | None = None) -> None:
        if self._reservation is not None:
            self.timeline.add(self._reservation, -1)
        self._reservation, self._reserved_for = plan, head
        if plan is not None:
            self.timeline.add(plan)

    def _peak_allows(self, job: Job) -> bool:
        self._probes -= 1
        allowed = self.limit - self._foreign
        plan = self._candidate_plan(job, None)
        if self.timeline.peak_with(plan) <= allowed:
            return True
        shared = self._lookup(job, spend=True)
        if shared is None:
            return False
        return self.timeline.peak_with(self._candidate_plan(job, shared)) <= allowed

    def _lookup(self, job: Job, spend: bool) -> IntArray | None:
        if self._hits is None:
            return None
        if job.request_id not in self._looked:
            if spend and len(self._looked) >= MAX_LOOKUPS:
                return None
            shared = self._hits(job)
            self._looked[job.request_id] = shared if shared is not None and len(shared) else None
        return self._looked[job.request_id]

    def _candidates(self) -> list[Job]:
        """Jobs still worth a look in this step: what failed once in a step cannot fit later in it."""
        if self._queue is None:
            self._queue = self.line.candidates(self._now, self.settings.aging, MAX_CANDIDATES)
        waiting = self.line
        head = waiting.first()
        return [
            job
            for job in self._queue
            if job.request_id in waiting and job is not head and job.refused_step != self.step - 1
        ]

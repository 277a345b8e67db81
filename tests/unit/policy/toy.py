"""A few lines that behave like an engine step: decodes first, chunked prefills with what is left, then starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcatch.policy.blocks import BlockTable
from kvcatch.policy.governor import Governor
from kvcatch.policy.settings import Settings
from kvcatch.policy.waiting import Job


@dataclass
class Ask:
    """A request: when it comes, its prompt, what it may and what it will generate."""

    at: int
    prompt: int
    max_output: int
    output: int


@dataclass
class Toy:
    """Runs asks through a governor; ``overflow`` counts steps that would have needed a preemption."""

    asks: list[Ask]
    settings: Settings
    usable: int = 24
    block: int = 4
    budget: int = 32
    seconds_per_step: float = 0.02
    governor: Governor = field(init=False)
    computed: dict[str, int] = field(default_factory=dict)
    generated: dict[str, int] = field(default_factory=dict)
    started: dict[str, int] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    promised: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    starved: list[int] = field(
        default_factory=list
    )  # steps in which the budget ended before the queue was asked
    overflow: int = 0
    foreign: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        longest = max(ask.prompt + ask.max_output for ask in self.asks)
        table = BlockTable.uniform(self.block, longest)
        self.governor = Governor(self.settings, table, self.usable, self.budget)

    def run(self, limit: int = 5000) -> Toy:
        while len(self.ended) < len(self.asks):
            self.step += 1
            assert self.step < limit, "no progress"
            self._step()
        return self

    def _active(self) -> int:
        return sum(-(-tokens // self.block) for tokens in self.computed.values())

    def _step(self) -> None:
        governor = self.governor
        for number, ask in enumerate(self.asks):
            if ask.at == self.step:
                job = Job(str(number), ask.prompt, 0, 0, ask.prompt, ask.max_output)
                job.key, job.queued_at = (
                    governor.line.next_key(front=False),
                    self.step * self.seconds_per_step,
                )
                governor.enqueue(job)
        unheld = sum(
            governor.blocks[job.tokens] - governor.blocks[self.computed[name]]
            for name, job in governor.running.items()
            if self.computed[name] < job.tokens
        )
        governor.begin(self.step, self.step * self.seconds_per_step, self._active(), unheld)
        self.foreign = max(self.foreign, governor._foreign)
        for job in governor.overdue():
            governor.replan(job, self.computed[job.request_id], None)
        budget, moved = self.budget, set()
        for name, job in governor.running.items():
            count = min(budget, max(1, job.tokens - self.computed[name]))
            if count:
                self.computed[name] += count
                budget -= count
                moved.add(name)
        new = []
        while budget > 0:
            job = governor.choose(self._active(), len(self.computed))
            if job is None:
                break
            if self.usable - self._active() < -(-job.tokens // self.block):
                job.refused_step = self.step
                break
            governor.take(job)
            self.reasons.append(governor.reason)
            self.started[job.request_id] = self.step
            count = min(budget, job.tokens)
            self.computed[job.request_id] = count
            budget -= count
            new.append(job)
        else:
            self.starved.append(self.step)
        governor.end()
        for job in governor.line:
            if job.promised_step is not None:
                self.promised.setdefault(job.request_id, job.promised_step)
        self._after(new, moved)

    def _after(self, new: list[Job], moved: set[str]) -> None:
        governor = self.governor
        self.overflow += self._active() > self.usable
        prefilling = [
            job for job in [*governor.running.values(), *new] if self.computed[job.request_id] < job.tokens
        ]
        governor.backlog = sum(job.tokens - self.computed[job.request_id] for job in prefilling)
        for job in new:
            governor.admit(job, self.computed[job.request_id], None)
        for name, job in governor.running.items():
            if job in new:
                continue
            if job in prefilling or (name in moved and self.computed[name] == job.tokens):
                governor.replan(job, self.computed[name], None)
            elif name not in moved:
                governor.stall(job)
        for name, job in list(governor.running.items()):
            if self.computed[name] >= job.tokens and (name in moved or job in new):
                self.generated[name] = self.generated.get(name, 0) + 1
                if self.generated[name] >= self.asks[int(name)].output:
                    self.ended[name] = self.step
                    del self.computed[name]
                    governor.leave(name)
                    governor.lengths.observe("", job.prompt_tokens, self.generated[name])

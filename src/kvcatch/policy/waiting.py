"""Waiting requests in two orders at once: the engine's own, and shortest first within class and tenant."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvcatch.policy.timeline import Plan


@dataclass(slots=True, eq=False)
class Job:
    """One request as the policy sees it; sizes in tokens and blocks, times in seconds of the caller's clock.

    tokens: to compute before the first new token (prompt, plus what a preempted request had generated).
    total: KV tokens it will hold at most, by the bound in use. size: blocks at ``tokens``.
    """

    request_id: str
    tokens: int
    total: int
    size: int
    prompt_tokens: int
    max_output: int
    priority: int = 0
    tenant: str = ""
    long: bool = False
    queued_at: float = 0.0
    key: tuple[Any, ...] = ()
    passes: int = 0  # requests that started before it while it was the blocked head
    front: int = 0  # of these: while it could have started itself
    blocked_since: float | None = None
    promised_step: int | None = None  # the shadow step fixed when it became the blocked head
    refused_step: int = -2  # the engine refused to start it at this step
    passed: Job | None = None  # the head this job was started before
    plan: Plan | None = None
    request: Any = field(default=None, repr=False)


class VirtualTokens:
    """Served tokens per tenant, input 1 and output 2 each (VTC, Sheng et al., OSDI 2024, arXiv 2401.00588).

    A tenant that comes back is lifted to the least counter among those present, so idling earns no credit.
    """

    INPUT, OUTPUT = 1, 2

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._present: dict[str, int] = {}

    def arrive(self, tenant: str) -> None:
        """One more request of this tenant is in the system."""
        count = self._present.get(tenant, 0)
        if count == 0:
            floor = min((self._served[name] for name in self._present), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
        self._present[tenant] = count + 1

    def leave(self, tenant: str) -> None:
        """A request of this tenant is gone."""
        count = self._present.get(tenant, 0) - 1
        if count > 0:
            self._present[tenant] = count
            return
        self._present.pop(tenant, None)
        if len(self._served) > 4 * len(self._present) + 1024:
            floor = min((self._served[name] for name in self._present), default=0)
            self._served = {k: v for k, v in self._served.items() if k in self._present or v > floor}

    def serve(self, tenant: str, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charge served tokens."""
        charge = self.INPUT * input_tokens + self.OUTPUT * output_tokens
        self._served[tenant] = self._served.get(tenant, 0) + charge

    def __getitem__(self, tenant: str) -> int:
        return self._served.get(tenant, 0)


class WaitingLine:
    """Sorted lists: insertion and removal cost a bisection and a memory move, reading a front nothing."""

    def __init__(self, virtual: VirtualTokens | None = None) -> None:
        self.virtual = virtual or VirtualTokens()
        self._jobs: dict[str, Job] = {}
        self._order: list[tuple[tuple[Any, ...], str]] = []
        self._groups: dict[tuple[int, bool, str], list[tuple[int, tuple[Any, ...], str]]] = {}
        self._arrivals: dict[tuple[int, bool], list[tuple[tuple[Any, ...], str]]] = {}
        self._first = 0
        self._last = 0
        self.shorts = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        jobs = self._jobs
        return iter([jobs[request_id] for _, request_id in self._order])

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def get(self, request_id: str) -> Job | None:
        """The waiting job of this request, None when it does not wait here."""
        return self._jobs.get(request_id)

    def next_key(self, front: bool) -> tuple[int]:
        """The key of a new last (or first) place in arrival order."""
        if front:
            self._first -= 1
            return (self._first,)
        self._last += 1
        return (self._last,)

    def add(self, job: Job) -> None:
        """Put a job in its place by ``job.key``."""
        self._jobs[job.request_id] = job
        self.shorts += not job.long
        entry = (job.key, job.request_id)
        for order in (self._order, self._arrivals.setdefault((job.priority, job.long), [])):
            if not order or order[-1] < entry:
                order.append(entry)
            else:
                insort(order, entry)
        group = self._groups.setdefault((job.priority, job.long, job.tenant), [])
        insort(group, (job.size, job.key, job.request_id))

    def remove(self, job: Job) -> None:
        """Take a job out; it must be in."""
        del self._jobs[job.request_id]
        self.shorts -= not job.long
        for order in (self._order, self._arrivals[job.priority, job.long]):
            del order[bisect_left(order, (job.key, job.request_id))]
        if not self._arrivals[job.priority, job.long]:
            del self._arrivals[job.priority, job.long]
        group = self._groups[job.priority, job.long, job.tenant]
        del group[bisect_left(group, (job.size, job.key, job.request_id))]
        if not group:
            del self._groups[job.priority, job.long, job.tenant]

    def first(self) -> Job | None:
        """The head in the engine's own order."""
        return self._jobs[self._order[0][1]] if self._order else None

    def candidates(self, now: float, aging: float, most: int) -> list[Job]:
        """At most ``most`` jobs behind the head, best first.

        Class by class; short before long; then the starved tier (waiting longer than ``aging`` seconds, oldest
        first), then the tenant served least, then the fewest blocks, then arrival.
        """
        jobs, virtual = self._jobs, self.virtual
        seen = {self._order[0][1]} if self._order else set()
        found: list[Job] = []
        kinds = sorted({group[:2] for group in self._groups})
        for kind in kinds:
            for _, request_id in self._arrivals[kind][: most // 2]:
                job = jobs[request_id]
                if now - job.queued_at < aging:
                    break
                if request_id not in seen:
                    seen.add(request_id)
                    found.append(job)
            tenants = [group for group in self._groups if group[:2] == kind]
            for group in sorted(tenants, key=lambda group: virtual[group[2]]):
                if len(found) >= most:
                    return found[:most]
                front = self._groups[group][:most]
                found += [jobs[request_id] for _, _, request_id in front if request_id not in seen]
        return found[:most]

"""Which running request gives up its blocks when the pool is full: request-level eviction policies.

A policy is one method, ``score(view) -> float``: the request with the lowest score is preempted first.
It sees numbers only, never the engine, so the same policy runs in the simulator and in the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Runner(NamedTuple):
    """What a policy may know about one running request."""

    request_id: str
    priority: int  # vLLM's: lower is more important
    position: int  # 0 = longest running
    held_blocks: int
    freed_blocks: int  # blocks that really return to the pool: shared ones do not
    computed_tokens: int
    recompute_tokens: int  # tokens that would have to be computed again
    remaining_tokens: int  # output tokens still to come, by the bound in use
    preemptions: int


class RequestEviction(Protocol):
    """Scores running requests; the lowest score is preempted first."""

    name: str

    def score(self, view: Runner) -> float:
        """Smaller = preempt sooner. Pure: the same view gives the same score."""
        ...


#: a request preempted this often is not chosen again while another choice exists
IMMUNE_AFTER = 2
#: a request this close to its end is spared: it frees its blocks by itself
NEARLY_DONE_TOKENS = 16


class RecomputeLoss:
    """Tokens to compute again per block freed; nearly finished and often preempted requests last."""

    name = "recompute-loss"

    def score(self, view: Runner) -> float:
        loss = view.recompute_tokens / max(1, view.freed_blocks)
        if view.remaining_tokens <= NEARLY_DONE_TOKENS:
            loss += 1e9
        if view.preemptions >= IMMUNE_AFTER:
            loss += 2e9
        return loss


class PriorityPosition:
    """Coarse priority and position: the least important request first, among equals the youngest."""

    name = "priority-position"

    def score(self, view: Runner) -> float:
        return -view.priority * 1e6 - view.position


class Newest:
    """What vLLM does with ``--scheduling-policy fcfs``: the last of the running list."""

    name = "newest"

    def score(self, view: Runner) -> float:
        return -view.position


EVICTIONS: dict[str, type[RequestEviction]] = {
    policy.name: policy for policy in (RecomputeLoss, PriorityPosition, Newest)
}


def victims(policy: RequestEviction, running: Iterable[Runner], needed_blocks: int) -> list[str]:
    """Request ids to preempt, first to go first, until ``needed_blocks`` are freed; never all of them."""
    ranked = sorted(running, key=lambda view: (policy.score(view), -view.position))
    chosen: list[str] = []
    freed = 0
    for view in ranked[:-1]:
        if freed >= needed_blocks:
            break
        chosen.append(view.request_id)
        freed += view.freed_blocks
    return chosen

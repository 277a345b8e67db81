"""The waiting queue behind ``Scheduler.waiting``: stock's contents, our order while a step is scheduled.

``schedule()`` asks the queue three things in turn: is there anything (``bool``), who is first (``peek``), and
once the blocks are allocated or the request is skipped, take it out (``pop``). One choice answers all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvcatch.control.pilot import Pilot


class GovernedLine:
    """A waiting queue whose front is chosen by the pilot while ``schedule()`` runs.

    Outside ``schedule()``, in observe mode and after a failure it is exactly vLLM's own queue.
    """

    def __init__(self, pilot: Pilot) -> None:
        self._pilot = pilot
        self._line = pilot.governor.line

    def add_request(self, request: Any) -> None:
        """Behind everybody (fcfs) or by priority and arrival."""
        self._pilot.enqueue(request, front=False)

    def prepend_request(self, request: Any) -> None:
        """In front of everybody: a preempted or skipped request (fcfs)."""
        self._pilot.enqueue(request, front=True)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """One after the other to the front, as a deque's ``extendleft`` does."""
        for request in requests:
            self._pilot.enqueue(request, front=True)

    def peek_request(self) -> Any:
        """The request to try next. IndexError when there is none."""
        job = self._pilot.pick()
        if job is None:
            raise IndexError("peek from an empty queue")
        return job.request

    def pop_request(self) -> Any:
        """Take out what ``peek_request`` returned."""
        job = self._pilot.pick()
        if job is None:
            raise IndexError("pop from an empty queue")
        self._pilot.take(job)
        return job.request

    def remove_request(self, request: Any) -> None:
        """Take out one request; ValueError when it is not here, as vLLM's own queues do."""
        if not self._pilot.remove(request):
            raise ValueError(f"{request.request_id} is not in the waiting queue")

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out those that are here."""
        for request in list(requests):
            self._pilot.remove(request)

    def __bool__(self) -> bool:
        """False also when nothing may start now, while ``schedule()`` runs."""
        return self._pilot.pick() is not None if self._pilot.live else len(self) > 0

    def __len__(self) -> int:
        return len(self._line) + len(self._pilot.rejected)

    def __iter__(self) -> Iterator[Any]:
        """In the engine's own order."""
        return iter([*(job.request for job in self._line), *self._pilot.rejected.values()])

"""Many runs of one simulation, side by side: threads, processes, or a Ray cluster, with the same code."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from kvcatch.errors import KVCatchError, missing_extra

S = TypeVar("S")
C = TypeVar("C")
R = TypeVar("R")

Progress = Callable[[int, int], None]
#: what every run of a worker process shares; set once when it starts
_shared: Any = None


@dataclass(frozen=True)
class Workers:
    """Who runs. kind: threads (the kernels leave the interpreter) | processes | ray; jobs: at a time on this machine.

    address: of a Ray cluster, ``local`` for one that is started here, ``auto`` for the one that runs here.
    """

    kind: str = "threads"
    jobs: int = 1
    address: str = ""


def run_all(
    evaluate: Callable[[S, C], R],
    shared: S,
    cells: Sequence[C],
    workers: Workers,
    progress: Progress | None = None,
) -> list[R]:
    """``evaluate(shared, cell)`` of every cell, in the order of the cells.

    Args:
        evaluate: a function of a module, so that another process finds it.
        shared: what all of them read; sent once to each process or machine.
        cells: what differs.
        workers: who runs.
        progress: told how many of how many are done.

    Raises:
        KVCatchError: from ``evaluate``, unknown workers, or no cluster at that address.
    """
    if workers.kind == "ray":
        ended = _on_ray(evaluate, shared, cells, workers.address)
    elif workers.kind in ("threads", "processes"):
        ended = _here(evaluate, shared, cells, workers)
    else:
        raise KVCatchError(f"no workers called {workers.kind!r}.", "Use threads, processes or ray.")
    results: dict[int, R] = {}
    for place, result in ended:
        results[place] = result
        if progress is not None:
            progress(len(results), len(cells))
    return [results[place] for place in range(len(cells))]


def _here(
    evaluate: Callable[[S, C], R], shared: S, cells: Sequence[C], workers: Workers
) -> Iterator[tuple[int, R]]:
    jobs = max(1, min(workers.jobs, len(cells)))
    if workers.kind == "threads":
        with ThreadPoolExecutor(jobs) as pool:
            waiting = {pool.submit(evaluate, shared, cell): place for place, cell in enumerate(cells)}
            yield from _as_they_end(waiting)
        return
    # Started afresh: a fork of a process with threads may hold a lock that nobody will ever let go.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_keep, initargs=(shared,)) as processes:
        waiting = {processes.submit(_with_kept, evaluate, cell): place for place, cell in enumerate(cells)}
        yield from _as_they_end(waiting)


def _as_they_end(waiting: dict[Any, int]) -> Iterator[tuple[int, Any]]:
    left = set(waiting)
    try:
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                yield waiting[future], future.result()
    finally:
        for future in left:
            future.cancel()


def _keep(shared: Any) -> None:
    global _shared
    _shared = shared


def _with_kept(evaluate: Callable[[Any, C], R], cell: C) -> R:
    return evaluate(_shared, cell)


def _on_ray(
    evaluate: Callable[[S, C], R], shared: S, cells: Sequence[C], address: str
) -> Iterator[tuple[int, R]]:
    try:
        import ray
    except ModuleNotFoundError:
        raise missing_extra("ray", "ray") from None
    mine = not ray.is_initialized()
    if mine:
        try:
            ray.init(
                address=None if address == "local" else address, log_to_driver=False, include_dashboard=False
            ) if address == "local" else ray.init(address=address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise KVCatchError(
                f"no Ray cluster at {address}: {str(error).splitlines()[0]}.",
                "Give its address, auto for the one of this machine, or local to start one.",
            ) from None
    try:
        kept = ray.put(shared)
        remote = ray.remote(evaluate)
        waiting = {remote.remote(kept, cell): place for place, cell in enumerate(cells)}
        left = list(waiting)
        while left:
            done, left = ray.wait(left)
            for reference in done:
                yield waiting[reference], _fetched(ray, reference)
    finally:
        if mine:
            ray.shutdown()


def _fetched(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, KVCatchError):
            raise error.cause from None
        raise

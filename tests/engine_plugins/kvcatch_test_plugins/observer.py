"""An observer that walks the engine's own state after every step and shares no code with the recorder.

KVCATCH_TEST_OBSERVER=FOLDER switches it on; every engine core then appends JSON lines to
``FOLDER/observer-<pid>-<n>.jsonl`` with one ``write`` a line, so that the file survives ``kill -9``. Lines:

``{"k": "i", ...}``  once per scheduler: class, number of blocks, block sizes, limits.
``{"k": "s", ...}``  after the n-th ``schedule()``: what was scheduled, preempted, refused and evicted since the last one.
``{"k": "u", ...}``  after the n-th ``update_from_output()``: the state of every block, queue and request.

The n-th update answers the n-th schedule: the engine processes its batches in order.
"""

from __future__ import annotations

import functools
import json
import os
import time
import zlib
from array import array
from collections.abc import Iterable
from typing import Any

#: schedulers seen so far in this process
_count = 0


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may run more than once in a process."""
    folder = os.environ.get("KVCATCH_TEST_OBSERVER")
    if not folder:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(Scheduler, "_kvcatch_test_observed", False):
        return
    Scheduler._kvcatch_test_observed = True
    _wrap(Scheduler, folder)


def _wrap(cls: Any, folder: str) -> None:
    init, schedule, update = cls.__init__, cls.schedule, cls.update_from_output

    @functools.wraps(init)
    def wrapped_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._kvcatch_test_observer = Observer(self, folder)

    @functools.wraps(schedule)
    def wrapped_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        self._kvcatch_test_observer.scheduled(output)
        return output

    @functools.wraps(update)
    def wrapped_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        self._kvcatch_test_observer.updated()
        return result

    cls.__init__, cls.schedule, cls.update_from_output = wrapped_init, wrapped_schedule, wrapped_update


def checksum(block_ids: Iterable[int]) -> int:
    """CRC-32 of block numbers as 32-bit words in their order."""
    return zlib.crc32(array("I", block_ids).tobytes())


class Observer:
    """Watches one scheduler."""

    def __init__(self, scheduler: Any, folder: str) -> None:
        global _count
        self.scheduler = scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self.schedules = self.updates = 0
        #: highest token position ever scheduled per request
        self.high: dict[str, int] = {}
        #: requests that were scheduled and had not ended at the last update, with their first token's time
        self.watched: dict[str, Any] = {}
        self.first: dict[str, int] = {}
        self.refused: list[str] = []
        self.evicted = 0
        path = os.path.join(folder, f"observer-{os.getpid()}-{_count}.jsonl")
        _count += 1
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._watch_refusals()
        self._watch_evictions()
        parallel = scheduler.vllm_config.parallel_config
        self._write(
            {
                "k": "i",
                "pid": os.getpid(),
                "scheduler": type(scheduler).__name__,
                "blocks": len(self.pool.blocks),
                "block_sizes": [manager.block_size for manager in self.managers],
                "kinds": [type(manager).__name__ for manager in self.managers],
                "max_running": scheduler.max_num_running_reqs,
                "max_tokens": scheduler.max_num_scheduled_tokens,
                "dp_rank": getattr(parallel, "data_parallel_index", parallel.data_parallel_rank),
            }
        )

    def _write(self, row: dict[str, Any]) -> None:
        os.write(self.file, json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def _watch_refusals(self) -> None:
        """Note the waiting requests that the block pool had no room for."""
        manager = self.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate(request, *args, **kwargs)
            if blocks is None and request.status.name != "RUNNING":
                self.refused.append(request.request_id)
            return blocks

        manager.allocate_slots = allocate_slots

    def _watch_evictions(self) -> None:
        evict = self.pool._maybe_evict_cached_block

        def maybe_evict(block: Any) -> Any:
            evicted = evict(block)
            self.evicted += bool(evicted)
            return evicted

        self.pool._maybe_evict_cached_block = maybe_evict

    def scheduled(self, output: Any) -> None:
        """After ``schedule()``: counts, and the token positions computed for a second time."""
        requests = self.scheduler.requests
        again = 0
        tokens: dict[str, int] = output.num_scheduled_tokens
        for request_id, count in tokens.items():
            self.watched[request_id] = requests[request_id]
            end = requests[request_id].num_computed_tokens
            high = self.high.get(request_id, 0)
            again += max(0, min(end, high) - (end - count))
            self.high[request_id] = max(high, end)
        for request_id in output.finished_req_ids:
            self.high.pop(request_id, None)
        self._write(
            {
                "k": "s",
                "n": self.schedules,
                "ns": time.monotonic_ns(),
                "tokens": tokens,
                "new": {
                    new.req_id: [new.num_computed_tokens, requests[new.req_id].num_tokens]
                    for new in output.scheduled_new_reqs
                },
                "resumed": len(getattr(output.scheduled_cached_reqs, "resumed_req_ids", ())),
                "preempted": sorted(output.preempted_req_ids or ()),
                "refused": self.refused,
                "evicted": self.evicted,
                "again": again,
                "running": len(self.scheduler.running),
                "waiting": self._waiting_count(),
                "deferred": self._deferred_count(),
            }
        )
        self.schedules += 1
        self.refused.clear()
        self.evicted = 0

    def updated(self) -> None:
        """After ``update_from_output()``: every block, both queues, every request."""
        referenced = hashed = neither = 0
        for block in self.pool.blocks:
            if block.is_null:
                continue
            if block.ref_cnt > 0:
                referenced += 1
            elif block.block_hash is not None:
                hashed += 1
            else:
                neither += 1
        first, done = self._progress()
        owners: dict[str, list[list[int]]] = {}
        for group, manager in enumerate(self.managers):
            for request_id, blocks in manager.req_to_blocks.items():
                ids = [block.block_id for block in blocks if not block.is_null]
                if ids:
                    owners.setdefault(request_id, [[] for _ in self.managers])[group] = ids
        self._write(
            {
                "k": "u",
                "n": self.updates,
                "ns": time.monotonic_ns(),
                "referenced": referenced,
                "hashed": hashed,
                "neither": neither,
                "free": self.pool.get_num_free_blocks(),
                "owned": len({i for groups in owners.values() for ids in groups for i in ids}),
                "held": self._held_tokens(),
                "owners": {
                    request_id: [[len(ids), checksum(ids)] for ids in groups]
                    for request_id, groups in owners.items()
                },
                "running": [request.request_id for request in self.scheduler.running],
                "waiting": self._waiting_ids(),
                "deferred": self._deferred_count(),
                "first": first,
                "done": done,
                "requests": {
                    request.request_id: [
                        request.num_computed_tokens,
                        request.num_tokens,
                        getattr(request, "num_output_placeholders", 0),
                        request.num_preemptions,
                    ]
                    for request in self.scheduler.requests.values()
                },
            }
        )
        self.updates += 1

    def _progress(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Requests that got their first token: seconds since their arrival; that ended: tokens, seconds per token."""
        now = time.monotonic_ns()
        first: dict[str, float] = {}
        done: dict[str, list[float]] = {}
        for request_id, request in list(self.watched.items()):
            if request_id not in self.first and request.num_output_tokens:
                self.first[request_id] = now
                first[request_id] = time.time() - request.arrival_time
            if request.is_finished():
                del self.watched[request_id]
                start = self.first.pop(request_id, None)
                if start is not None:
                    tokens = request.num_output_tokens
                    done[request_id] = [tokens, (now - start) / 1e9 / max(1, tokens - 1)]
        return first, done

    def _held_tokens(self) -> int:
        """Tokens in the blocks of all requests, a block shared by several counted once (its fullest view)."""
        held: dict[int, int] = {}
        for manager in self.managers:
            size = manager.block_size
            for request_id, blocks in manager.req_to_blocks.items():
                request = self.scheduler.requests.get(request_id)
                if request is None:
                    continue
                for index, block in enumerate(blocks):
                    if block.is_null:
                        continue
                    tokens = min(size, max(0, request.num_computed_tokens - index * size))
                    held[block.block_id] = max(held.get(block.block_id, 0), tokens)
        return sum(held.values())

    def _queues(self) -> list[Any]:
        names = ("waiting", "skipped_waiting", "kv_holding_waiting")
        return [queue for name in names if (queue := getattr(self.scheduler, name, None)) is not None]

    def _waiting_ids(self) -> list[str]:
        return sorted({request.request_id for queue in self._queues() for request in queue})

    def _waiting_count(self) -> int:
        return sum(len(queue) for queue in self._queues())

    def _deferred_count(self) -> int:
        """Waiting requests that wait for something else than room; unknown (0) on releases without the queue."""
        deferred = getattr(self.scheduler, "deferred_waiting", None)
        if deferred is None:
            deferred = getattr(self.scheduler, "skipped_waiting", ())
        return len(deferred)

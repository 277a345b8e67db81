"""Drives the embedded engine with the recorder on, and looks at the engine after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcatch.capture.options import Options
from kvcatch.capture.recorder import Recorder
from kvcatch.capture.ring import RingWriter
from kvcatch.simulator.embedded import Scheduler, sample
from kvcatch.simulator.requests import Request, RequestStatus, hash_of

BLOCK = 16


@dataclass
class Seen:
    """The engine after one step, walked block by block."""

    active: int
    cached: int
    free: int
    running: set[str]
    waiting: set[str]
    blocks: dict[str, list[int]]
    computed: dict[str, int]
    tokens: dict[str, int]
    held_tokens: int


def info(num_blocks: int) -> dict[str, Any]:
    """The least a ring must say."""
    group = {"kind": "full", "layers": 2, "block_size": BLOCK, "page_bytes": 4096}
    return {"engine": "embedded", "num_blocks": num_blocks, "block_size": BLOCK, "groups": [group]}


def look(scheduler: Scheduler) -> Seen:
    """Walk every block and queue."""
    pool = scheduler.kv_cache_manager.block_pool
    real = [block for block in pool.blocks if not block.is_null]
    active = [block for block in real if block.ref_cnt > 0]
    held = {
        key: [block.block_id for block in blocks]
        for key, blocks in scheduler.kv_cache_manager.manager.req_to_blocks.items()
        if blocks
    }
    # Tokens held: every active block is full but for the tails that requests have not reached yet.
    slack = sum(len(ids) * BLOCK - scheduler.requests[key].num_computed_tokens for key, ids in held.items())
    return Seen(
        active=len(active),
        cached=sum(block.ref_cnt == 0 and block.block_hash is not None for block in real),
        free=sum(block.ref_cnt == 0 and block.block_hash is None for block in real),
        running={request.request_id for request in scheduler.running},
        waiting={request.request_id for request in scheduler.waiting},
        blocks=held,
        computed={key: request.num_computed_tokens for key, request in scheduler.requests.items()},
        tokens={key: request.num_tokens for key, request in scheduler.requests.items()},
        held_tokens=len(active) * BLOCK - slack,
    )


class Behind(Scheduler):
    """With the call that an engine core makes once a step is with its workers."""

    def get_grammar_bitmask(self, output: Any) -> None:
        """No grammar here."""


class EmbeddedRun:
    """A random workload of ``requests`` requests over ``num_blocks`` blocks; behind: hooks may work behind the model call."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        requests: int = 60,
        num_blocks: int = 70,
        ring_bytes: int = 1 << 20,
        behind: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.scheduler = (Behind if behind else Scheduler)(
            num_blocks, BLOCK, max_num_seqs=12, max_num_batched_tokens=256
        )
        self.path = str(folder / "run.core0.kvring")
        self.ring = RingWriter(self.path, ring_bytes, info(num_blocks))
        options = Options({"KVCATCH_DIR": str(folder)})
        self.recorder = Recorder(self.scheduler, self.ring, [("full", BLOCK)], options, behind=behind)
        self.recorder.attach()
        self.left = requests
        self.made: list[Request] = []
        self.preemptions = self.recomputed = 0
        self.high: dict[str, int] = {}

    def request(self) -> Request:
        """Prompts share one of four heads."""
        number = len(self.made)
        prompt = self.rng.randrange(1, 400)
        head = self.rng.randrange(4)
        shared = self.rng.randrange(0, 12)
        hashes = [
            hash_of(head, i) if i < shared else hash_of("own", number, i) for i in range(prompt // BLOCK)
        ]
        tenant = {"kvcatch_tenant": f"tenant-{number % 3}"}
        request = Request(
            f"cmpl-r{number}-0-{number:08x}", prompt, self.rng.randrange(1, 120), hashes, extra_args=tenant
        )
        self.made.append(request)
        self.left -= 1
        return request

    def steps(self) -> Any:
        """Yields what the engine looks like after each step."""
        scheduler = self.scheduler
        while self.left or scheduler.has_unfinished_requests():
            while self.left and (self.rng.random() < 0.5 or not scheduler.has_unfinished_requests()):
                scheduler.add_request(self.request())
            if self.rng.random() < 0.01 and scheduler.requests:
                victim = self.rng.choice(sorted(scheduler.requests))
                scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            output = scheduler.schedule()
            if isinstance(scheduler, Behind):
                scheduler.get_grammar_bitmask(output)
            self.preemptions += len(output.preempted_req_ids)
            self._count_recomputed(output)
            scheduler.update_from_output(output, sample(scheduler, output))
            yield look(scheduler)

    def _count_recomputed(self, output: Any) -> None:
        """Token positions scheduled below the highest position the request had reached before."""
        for key, tokens in output.num_scheduled_tokens.items():
            end = self.scheduler.requests[key].num_computed_tokens
            high = self.high.get(key, 0)
            self.recomputed += max(0, min(end, high) - (end - tokens))
            self.high[key] = max(high, end)

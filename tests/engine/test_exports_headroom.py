"""Headroom beside running requests, against the real ``Scheduler``: K start and finish undisturbed, K + 1 do not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from simulator_oracle import Settings, real_answer, real_request, real_scheduler

from kvcatch.analysis.future import fits_beside, running_requests
from kvcatch.analysis.headroom import blocks_for
from kvcatch.events import EngineInfo
from kvcatch.results import RequestView

# The engine's libraries warn about each other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")
BLOCK, POOL = 16, 201


def info() -> EngineInfo:
    return EngineInfo(num_blocks=POOL, block_size=BLOCK, max_num_seqs=64, max_model_len=39 * BLOCK)


def step(scheduler: Any, salt: int) -> int:
    output = scheduler.schedule()
    scheduler.update_from_output(output, real_answer(scheduler, output, salt))
    return len(output.preempted_req_ids or ())


class World:
    """A scheduler in some state, that can be brought there again."""

    def __init__(self, folder: Path, seed: int) -> None:
        chosen = Settings(
            num_blocks=POOL, block_size=BLOCK, max_num_seqs=64, max_num_batched_tokens=65536, watermark=0.0,
            requests=0, max_model_len=39 * BLOCK,
        )  # fmt: skip
        self.rng = random.Random(seed)
        self.scheduler = real_scheduler(chosen, folder)
        self.salt = 0
        for index in range(self.rng.randrange(1, 7)):
            self.add(str(index), self.rng.randrange(20, 200), self.rng.randrange(60, 300))
        for _ in range(self.rng.randrange(1, 50)):
            self.salt += 1
            step(self.scheduler, self.salt)

    def add(self, name: str, prompt: int, output: int) -> None:
        # Random ids: nothing is shared, as headroom assumes.
        tokens = [self.rng.randrange(10**6) for _ in range(prompt)]
        self.scheduler.add_request(real_request(name, tokens, output, BLOCK))

    @property
    def free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def views(self) -> list[RequestView]:
        return [
            RequestView(
                request_id=request.request_id, engine_request_id=request.request_id, status="running",
                prompt_tokens=request.num_prompt_tokens, output_tokens=request.num_output_tokens,
                max_tokens=request.max_tokens, shared_blocks=0,
            )
            for request in self.scheduler.running
        ]  # fmt: skip

    def disturbed(self, count: int, prompt: int, output: int) -> bool:
        """Send ``count`` at once and run to the end: was anybody preempted, did one wait?"""
        for index in range(count):
            self.add(str(1000 + index), prompt, output)
        self.salt += 1
        preempted = step(self.scheduler, self.salt)
        waited = bool(self.scheduler.waiting)
        while self.scheduler.requests:
            self.salt += 1
            preempted += step(self.scheduler, self.salt)
        return waited or preempted > 0


def predicted(world: World, prompt: int, output: int, delay: int) -> int:
    running = running_requests(info(), world.views())
    assert running is not None
    return fits_beside(
        running,
        lambda tokens: blocks_for(tokens, info()) or 0,
        world.free,
        POOL - 1,
        (prompt, output),
        info(),
        delay,
    )


def size(seed: int) -> tuple[int, int]:
    rng = random.Random(1000 + seed)
    return rng.randrange(10, 250), rng.randrange(20, 250)


@pytest.mark.parametrize("seed", range(24))
def test_so_many_are_never_disturbed(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    assert not world.scheduler.waiting
    prompt, output = size(seed)
    count = predicted(world, prompt, output, delay=0)
    assert not world.disturbed(count, prompt, output)


def test_one_more_is_disturbed_in_nineteen_of_twenty_states(tmp_path: Path) -> None:
    outcomes = []
    for seed in range(24):
        world = World(tmp_path, seed)
        prompt, output = size(seed)
        count = predicted(world, prompt, output, delay=0)
        if len(world.scheduler.running) + count < 64:
            outcomes.append(world.disturbed(count + 1, prompt, output))
    assert len(outcomes) >= 20
    assert sum(outcomes) >= 0.95 * len(outcomes)


@pytest.mark.parametrize("seed", range(8))
def test_a_late_start_is_safe_too(tmp_path: Path, seed: int) -> None:
    """What was said still holds some steps later, when the requests arrive."""
    world = World(tmp_path, seed)
    prompt, output = size(seed)
    count = predicted(world, prompt, output, delay=32)
    for _ in range(random.Random(seed).randrange(33)):
        world.salt += 1
        step(world.scheduler, world.salt)
    assert not world.disturbed(count, prompt, output)

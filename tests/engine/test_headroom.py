"""Headroom against the real ``Scheduler``: exactly so many more requests are admitted, and none is preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from simulator_oracle import Settings, real_answer, real_request, real_scheduler

from kvcatch.analysis.headroom import headroom
from kvcatch.events import EngineInfo
from kvcatch.results import Pool, Queues

# The engine's libraries warn about each other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")


def build(tmp_path: Path, seed: int) -> tuple[Any, EngineInfo, random.Random]:
    rng = random.Random(seed)
    chosen = Settings(
        num_blocks=rng.choice([40, 101, 333]),
        block_size=16,
        max_num_seqs=rng.choice([4, 16, 64]),
        # Whole prompts in one step: what is admitted has its blocks at once.
        max_num_batched_tokens=65536,
        watermark=rng.choice([0.0, 0.05, 0.3]),
        requests=0,
        max_model_len=39 * 16,
    )
    info = EngineInfo(
        num_blocks=chosen.num_blocks,
        block_size=16,
        max_num_seqs=chosen.max_num_seqs,
        max_model_len=chosen.max_model_len,
        watermark_free_ratio=chosen.watermark,
    )
    return real_scheduler(chosen, tmp_path), info, rng


def add(scheduler: Any, rng: random.Random, name: str, prompt: int, output: int) -> None:
    tokens = [rng.randrange(1000) for _ in range(prompt)]
    scheduler.add_request(real_request(name, tokens, output, 16))


def step(scheduler: Any, salt: int) -> Any:
    output = scheduler.schedule()
    scheduler.update_from_output(output, real_answer(scheduler, output, salt))
    return output


def predicted(scheduler: Any, info: EngineInfo, prompt: int, output: int) -> int:
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    pool = Pool(num_blocks=info.usable_blocks, active_blocks=info.usable_blocks - free, block_size=16)
    answer = headroom(
        info, pool, Queues(running=len(scheduler.running), waiting_for_blocks=0), prompt, output
    )
    assert answer.requests is not None
    return answer.requests


@pytest.mark.parametrize("seed", range(40))
def test_the_engine_admits_exactly_that_many_more(tmp_path, seed):
    scheduler, info, rng = build(tmp_path, seed)
    for index in range(rng.randrange(4)):
        add(scheduler, rng, str(index), rng.randrange(1, 200), 400)
    for salt in range(rng.randrange(1, 4)):
        step(scheduler, salt)
    if scheduler.waiting:
        assert predicted(scheduler, info, 1, 1) >= 0  # a queue: nothing to compare
        return
    prompt = rng.choice([1, 16, 17, 100, 160, 333])
    expected = predicted(scheduler, info, prompt, 1)
    before = len(scheduler.running)
    for index in range(expected + 3):
        add(scheduler, rng, str(1000 + index), prompt, 200)
    # Running requests take their next block before anyone is admitted; let it be one without that need.
    growing = sum(1 for request in scheduler.running if request.num_tokens % 16 == 1)
    admitted = len(scheduler.schedule().scheduled_new_reqs)
    if growing == 0:
        assert admitted == expected
    else:
        assert expected - growing <= admitted <= expected
    assert len(scheduler.running) == before + admitted


@pytest.mark.parametrize("seed", range(20))
def test_so_many_reach_full_length_without_preemption_and_one_more_does_not(tmp_path, seed):
    scheduler, info, rng = build(tmp_path, seed)
    prompt, output = rng.randrange(1, 300), rng.randrange(1, 200)
    count = predicted(scheduler, info, prompt, output)
    limited_by_blocks = count < (info.max_num_seqs or 0)

    def run(requests: int) -> tuple[int, bool]:
        engine, _, random_ids = build(tmp_path, seed)
        for index in range(requests):
            add(engine, random_ids, str(index), prompt, output)
        first = engine.schedule()
        together = len(first.scheduled_new_reqs) == requests
        engine.update_from_output(first, real_answer(engine, first, 0))
        preempted, salt = 0, 1
        while engine.requests:
            preempted += len(step(engine, salt).preempted_req_ids or ())
            salt += 1
        return preempted, together

    if count:
        assert run(count) == (0, True)
    if limited_by_blocks and prompt + output <= 39 * 16:
        preempted, together = run(count + 1)
        assert preempted > 0 or not together

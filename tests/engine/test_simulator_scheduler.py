"""Our embedded engine and the fast one decide exactly what vLLM's Scheduler decides, at every step."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import pytest

from engine.simulator_oracle import (
    free_order,
    plain,
    prompts,
    real_answer,
    real_request,
    real_scheduler,
    settings,
)
from kvcatch.simulator.batching import LOG_EVICTED
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.embedded import Scheduler, sample
from kvcatch.simulator.engine import EngineSettings, serve
from kvcatch.simulator.pool import REMOVED, STORED, serial_pool
from kvcatch.simulator.requests import Request, hash_of
from kvcatch.workload import build

SEEDS = 60

# The engine's own imports warn about its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")


def chain(tokens: list[int], block_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1].hex() if hashes else ""
        hashes.append(hash_of(parent, *tokens[start : start + block_size]))
    return hashes


def drive(seed, folder):
    """Both engines side by side; returns steps and preemptions."""
    chosen = settings(seed)
    real = real_scheduler(chosen, folder)
    ours = Scheduler(
        chosen.num_blocks,
        chosen.block_size,
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_model_len=chosen.max_model_len,
        watermark=chosen.watermark,
    )
    rng = random.Random(seed + 2)
    waiting = list(enumerate(prompts(seed, chosen)))
    steps = preemptions = 0
    arrivals: list[int] = []
    decided: list[tuple[int, ...]] = []
    while waiting or real.has_unfinished_requests():
        fewest = 0 if real.has_unfinished_requests() else 1  # no idle steps
        for _ in range(min(len(waiting), max(fewest, rng.choice([0, 1, 3, 8])))):
            i, (tokens, output_tokens) = waiting.pop(0)
            arrivals.append(steps)
            real.add_request(real_request(str(i), tokens, output_tokens, chosen.block_size))
            ours.add_request(Request(str(i), len(tokens), output_tokens, chain(tokens, chosen.block_size)))
        expected, actual = real.schedule(), ours.schedule()
        assert plain(actual) == plain(expected), f"seed {seed} step {steps}"
        preemptions += len(expected.preempted_req_ids or ())
        decided.append(
            (
                len(real.running),
                len(real.waiting),
                real.kv_cache_manager.block_pool.get_num_free_blocks(),
                expected.total_num_scheduled_tokens,
                len(expected.preempted_req_ids or ()),
            )
        )
        real.update_from_output(expected, real_answer(real, expected, seed))
        ours.update_from_output(actual, sample(ours, actual))
        real_pool, our_pool = real.kv_cache_manager.block_pool, ours.kv_cache_manager.block_pool
        assert free_order(our_pool) == free_order(real_pool), f"seed {seed} step {steps}"
        assert [r.request_id for r in ours.running] == [r.request_id for r in real.running]
        assert [r.request_id for r in ours.waiting] == [r.request_id for r in real.waiting]
        steps += 1
    assert [b.ref_cnt for b in our_pool.blocks[1:]] == [b.ref_cnt for b in real_pool.blocks[1:]]
    fast = serve(
        workload(prompts(seed, chosen), arrivals),
        EngineSettings(
            num_blocks=chosen.num_blocks,
            block_size=chosen.block_size,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_model_len=chosen.max_model_len,
            watermark=chosen.watermark,
            # Steps of one second: a request that arrives at second n is there for step n.
            cost=StepCost(fixed=1.0, per_prefill_token=0.0, per_decode=0.0),
        ),
        log_steps=steps + 1,
    )
    assert [tuple(row[:5]) for row in fast.log.tolist()] == decided, f"seed {seed}"
    assert int(fast.log[-1, LOG_EVICTED]) == our_pool.num_removed
    return steps, preemptions


def workload(made, arrivals):
    """The same prompts for the simulator."""
    rows = [
        {"arrival": at, "prompt": len(tokens), "output": n, "segments": [(t, 1) for t in tokens]}
        for at, (tokens, n) in zip(arrivals, made, strict=True)
    ]
    return build("real", rows, grain=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def test_same_decisions_at_every_step(folder):
    steps = preemptions = 0
    for seed in range(SEEDS):
        done = drive(seed, folder)
        steps += done[0]
        preemptions += done[1]
    # The workloads must be hard enough to prove something.
    assert steps >= 10_000
    assert preemptions >= 500


def test_priority_scheduling_decides_the_same_at_every_step(folder):
    """Victims are taken from anywhere, also from what the step had scheduled already."""
    steps = preemptions = overtaken = 0
    for seed in range(200, 240):
        chosen = dataclasses.replace(settings(seed), policy="priority")
        rng = random.Random(seed + 2)
        real = real_scheduler(chosen, folder)
        waiting = list(enumerate(prompts(seed, chosen)))
        ranks = [rng.choice([0, 0, 1, 5]) for _ in waiting]
        arrivals, decided = [], []
        while waiting or real.has_unfinished_requests():
            fewest = 0 if real.has_unfinished_requests() else 1
            for _ in range(min(len(waiting), max(fewest, rng.choice([0, 1, 3, 8])))):
                i, (tokens, output_tokens) = waiting.pop(0)
                arrivals.append(len(decided))
                real.add_request(real_request(str(i), tokens, output_tokens, chosen.block_size, ranks[i]))
            output = real.schedule()
            preempted = output.preempted_req_ids or ()
            overtaken += any(int(r.req_id) < i - 1 for r in output.scheduled_new_reqs)
            free = real.kv_cache_manager.block_pool.get_num_free_blocks()
            decided.append(
                (
                    len(real.running),
                    len(real.waiting),
                    free,
                    output.total_num_scheduled_tokens,
                    len(preempted),
                )
            )
            preemptions += len(preempted)
            real.update_from_output(output, real_answer(real, output, seed))
        rows = [
            {"arrival": at, "prompt": len(tokens), "output": n, "segments": [(t, 1) for t in tokens], "tenant": rank}
            for at, (tokens, n), rank in zip(arrivals, prompts(seed, chosen), ranks, strict=True)
        ]  # fmt: skip
        asked = build("ranked", rows, grain=1)
        fast = serve(
            asked,
            EngineSettings(
                num_blocks=chosen.num_blocks, block_size=chosen.block_size, max_num_seqs=chosen.max_num_seqs,
                max_num_batched_tokens=chosen.max_num_batched_tokens, max_model_len=chosen.max_model_len,
                watermark=chosen.watermark, priorities={name: int(name) for name in asked.tenants},
                cost=StepCost(fixed=1.0, per_prefill_token=0.0, per_decode=0.0),
            ),
            log_steps=len(decided) + 1,
        )  # fmt: skip
        assert [tuple(row[:5]) for row in fast.log.tolist()] == decided, f"seed {seed}"
        steps += len(decided)
    assert steps >= 5_000
    assert preemptions >= 300
    assert overtaken >= 40


def test_request_hashes_are_not_guessable_from_ids():
    assert hash_of(1, 2) != hash_of(12)
    assert len(hash_of(1)) == hashlib.sha256().digest_size


def test_fast_pool_serves_serial_requests_as_the_engine_does(folder):
    for seed in range(100, 110):
        chosen = settings(seed)
        made = prompts(seed, chosen)
        scheduler = real_scheduler(chosen, folder)
        expected = []
        for i, (tokens, output_tokens) in enumerate(made):
            request = real_request(str(i), tokens, output_tokens, chosen.block_size)
            scheduler.add_request(request)
            first = None
            while scheduler.has_unfinished_requests():
                output = scheduler.schedule()
                first = output.scheduled_new_reqs[0].num_computed_tokens if first is None else first
                scheduler.update_from_output(output, real_answer(scheduler, output, seed))
            expected.append(first // chosen.block_size)
        asked = workload(made, [0] * len(made))
        view = asked.blocks(chosen.block_size)
        hits, totals = serial_pool(
            view.ids, view.offsets, asked.prompt_tokens, asked.output_tokens, view.num_ids,
            chosen.num_blocks, chosen.block_size, False,
        )  # fmt: skip
        assert hits.tolist() == expected, f"seed {seed}"
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        cached = sum(block.block_hash is not None for block in blocks)
        assert int(totals[STORED] - totals[REMOVED]) == cached

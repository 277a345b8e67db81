"""Async scheduling: our engines decide what vLLM's ``AsyncScheduler`` decides in vLLM's own loop, at the same times."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.simulator_oracle import free_order, plain
from engine.support.engine_loop import EngineLoop, settings_of, trace_of
from engine.support.sched_modelfree import STEP_SECONDS, Setup, Spec, tiny_model, workload
from kvcatch.capture.hooks import Hooks
from kvcatch.control.rehearsal import GovernedAsyncScheduler, GovernedScheduler
from kvcatch.policy.settings import Settings
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.embedded import Scheduler
from kvcatch.simulator.stepwise import Stepwise, scheduler_arguments, stock

pytestmark = pytest.mark.filterwarnings("ignore")
#: sums of these are exact in floating point, so that both clocks can be compared bit by bit
PER_TOKEN = 2.0**-8
COST = StepCost(fixed=1.0, per_prefill_token=PER_TOKEN, per_decode=PER_TOKEN)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def drawn(seed: int, asynchronous: bool = True) -> tuple[list[Spec], Setup]:
    """Pools from roomy to tight, small budgets and few seats, early stops, shared heads, whole blocks."""
    rng = random.Random(seed)
    setup = Setup(
        num_blocks=rng.choice([65, 73, 97]), max_num_seqs=rng.choice([6, 64, 64]), budget=rng.choice([64, 256, 1024]),
        watermark=rng.choice([0.0, 0.0, 0.05]), caching=seed % 2 == 1, asynchronous=asynchronous,
    )  # fmt: skip
    specs = []
    for spec in workload(seed, 120, rng.choice([1.0, 2.0]), loose=rng.choice([2, 3])):
        output = spec.output * 2  # so that running requests grow into each other
        prompt = -(-spec.prompt // 32) * 32 if rng.random() < 0.3 else spec.prompt
        shared = rng.choice([0, prompt // 2, prompt - 1, prompt])
        specs.append(
            replace(spec, prompt=prompt, output=output, prefix=rng.randrange(-1, 3), prefix_tokens=shared)
        )
    return specs, setup


def look(scheduler: Any, decided: Any) -> tuple[Any, ...]:
    """Everything that a step decided, and every block that is free, in order."""
    waiting = [request.request_id for request in scheduler.waiting]
    running = [request.request_id for request in scheduler.running]
    return plain(decided), running, waiting, free_order(scheduler.kv_cache_manager.block_pool)


def ours(specs: list[Spec], setup: Setup, build: Any, scheduler: str = "stock") -> tuple[Stepwise, list[Any]]:
    trace = trace_of(specs, setup.block_size)
    run = Stepwise(trace, settings_of(setup, scheduler, COST), trace.blocks(setup.block_size), build)
    seen: list[Any] = []

    def noting(schedule: Any) -> Any:
        def noted() -> Any:
            decided = schedule()
            if decided.num_scheduled_tokens:
                seen.append((run.now, look(run.scheduler, decided)))
            return decided

        return noted

    Hooks().add(run.scheduler, "schedule", noting)
    while run.step():
        pass
    return run, seen


def compare(loop: EngineLoop, run: Stepwise, seen: list[Any]) -> None:
    first = next((k for k, (a, b) in enumerate(zip(seen, loop.seen, strict=False)) if a != b), None)
    assert first is None, f"batch {first}: {seen[first]} for {loop.seen[first]}"
    assert len(seen) == len(loop.seen)
    served, everybody = run.served(), range(len(loop.specs))
    for found, expected in (
        (served.scheduled, loop.scheduled),
        (served.first_token, loop.first_token),
        (served.finished, loop.finished),
    ):
        assert found.tolist() == [expected[i] for i in everybody]
    assert served.preemptions.tolist() == [request.num_preemptions for request in loop.requests]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_same_decisions_at_the_same_times(model: str, asynchronous: bool) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

    cls = AsyncScheduler if asynchronous else SyncScheduler
    batches = preemptions = hits = stopped = 0
    for seed in range(16 if asynchronous else 4):
        specs, setup = drawn(seed, asynchronous)
        loop = EngineLoop(cls, specs, setup, model, look=look, fixed=1.0, per_token=PER_TOKEN).go()
        run, seen = ours(specs, setup, stock)
        compare(loop, run, seen)
        batches += len(seen)
        preemptions += int(run.totals[1])
        hits += int((run.served().cached_tokens > 0).sum())
        stopped += sum(spec.output < spec.max_tokens for spec in specs)
    # The workloads must be hard enough to prove something.
    assert batches > 10_000 if asynchronous else batches > 1000
    assert preemptions > 300 if asynchronous else preemptions > 30
    assert hits > 300 if asynchronous else hits > 30
    assert stopped > 100


@pytest.mark.parametrize("mode", ["observe", "backfill", "backfill+peak"])
def test_the_plugin_decides_the_same(monkeypatch: pytest.MonkeyPatch, model: str, mode: str) -> None:
    from kvcatch.control.scheduler import KVCatchAsyncScheduler

    monkeypatch.setenv("KVCATCH_SCHEDULER_MODE", mode)
    overtaken = 0
    for seed in range(100, 106):
        specs, setup = drawn(seed)
        loop = EngineLoop(KVCatchAsyncScheduler, specs, setup, model, look=look, per_token=PER_TOKEN).go()

        def governed(chosen: Any, longest: int, clock: Any, first: int = specs[0].arrival) -> Scheduler:
            return GovernedAsyncScheduler(
                Settings(mode=mode), lambda: (clock() + first) * STEP_SECONDS, **scheduler_arguments(chosen, longest)
            )  # fmt: skip

        run, seen = ours(specs, setup, governed, mode)
        compare(loop, run, seen)
        starts = run.served().scheduled
        overtaken += int((np.diff(starts) < 0).sum())
    assert (overtaken == 0) == (mode == "observe")


def test_the_plugins_class_goes_with_the_engine() -> None:
    """Two batches in flight: a finished request keeps its blocks a step longer, and the policy counts them."""
    arguments = {"num_blocks": 10, "block_size": 16, "max_model_len": 100}
    assert GovernedAsyncScheduler(Settings(), lambda: 0.0, **arguments).pilot.governor.lag == 1
    assert GovernedScheduler(Settings(), lambda: 0.0, **arguments).pilot.governor.lag == 0

"""The plain engine simulation gives what the fast one gives, which is judged by vLLM's own scheduler."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcatch.control.rehearsal import GovernedScheduler, serve_governed
from kvcatch.errors import KVCatchError
from kvcatch.policy.settings import Settings
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.engine import EngineSettings, serve, simulate_engine
from kvcatch.simulator.stepwise import serve_stepwise
from kvcatch.workload import Workload, build

#: sums of these are exact in floating point, so that both engines' times can be compared bit by bit
COST = StepCost(
    fixed=0.25, per_prefill_token=2**-10, per_decode=2**-6, per_context_token=2**-14, per_attention=2**-18
)


def workload(seed: int, requests: int = 60, loose: int = 1) -> Workload:
    rng = random.Random(seed)
    now, rows = 0.0, []
    for number in range(requests):
        now += rng.choice([0, 0.25, 0.5, 2, 8])
        prompt = rng.randrange(200, 400) if rng.random() < 0.2 else rng.randrange(5, 80)
        segments: list[tuple[object, int]] = []
        left, shared = prompt, rng.random() < 0.5
        while left:
            size = min(16, left)
            name: object = (
                ("head", len(segments)) if shared and len(segments) < 3 else (number, len(segments))
            )
            segments.append((name, size))
            left -= size
        output = rng.randrange(1, 60)
        rows.append(
            {"arrival": now, "prompt": prompt, "output": output, "segments": segments, "max_tokens": output * loose}
        )  # fmt: skip
    return build("made up", rows, grain=16)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_stock_equals_the_fast_engine(seed: int, ahead: bool) -> None:
    settings = EngineSettings(
        num_blocks=[41, 61, 200][seed % 3], max_num_seqs=[4, 32][seed % 2], max_num_batched_tokens=[64, 512][seed // 6 % 2],
        watermark=[0.0, 0.05][seed % 2], enable_prefix_caching=seed % 4 != 3, cost=COST,
        async_scheduling=ahead,
    )  # fmt: skip
    trace = workload(seed, loose=1 + seed // 12)
    fast, plain = serve(trace, settings), serve_stepwise(trace, settings, trace.blocks(16))
    for name in ("scheduled", "first_token", "finished", "cached_tokens", "preemptions", "recomputed_tokens"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(fast, name), name)
    np.testing.assert_array_equal(plain.totals, fast.totals)


def test_some_of_these_runs_preempt_and_hit() -> None:
    """So that equality above is not about nothing."""
    trace = workload(0)
    fast = serve(trace, EngineSettings(num_blocks=41, max_num_seqs=32, cost=COST))
    assert fast.preemptions.sum() > 0
    assert fast.cached_tokens.sum() > 0


def test_a_request_stops_before_its_limit() -> None:
    """One request, 3 of at most 30 tokens, alone: a prefill step and two decodes."""
    rows = [{"arrival": 0, "prompt": 16, "output": 3, "segments": [("a", 16)], "max_tokens": 30}]
    trace = build("one", rows, grain=16)
    cost = StepCost(fixed=1.0, per_prefill_token=0.0, per_decode=0.0)
    done = serve_stepwise(trace, EngineSettings(num_blocks=10, cost=cost), trace.blocks(16))
    assert (done.first_token[0], done.finished[0], done.totals[0]) == (1, 3, 3)


def test_strict_mode_never_preempts() -> None:
    """Stock preempts on this trace; how much sooner the short ones start is judged in the engine tests."""
    trace = workload(5, 200, loose=2)
    settings = EngineSettings(num_blocks=41, max_num_seqs=32, cost=COST)
    stock = simulate_engine(trace, settings, server=serve_governed)
    governed = simulate_engine(
        trace,
        EngineSettings(num_blocks=41, max_num_seqs=32, cost=COST, scheduler="backfill+peak"),
        server=serve_governed,
    )
    assert stock.preemptions > 0
    assert (governed.preemptions, governed.scheduler) == (0, "backfill+peak")
    assert governed.rejected_requests == stock.rejected_requests == 0


def test_observe_is_stock() -> None:
    trace = workload(7)
    settings = EngineSettings(num_blocks=41, cost=COST, scheduler="observe")
    watched = serve_governed(trace, settings, trace.blocks(16))
    alone = serve(trace, EngineSettings(num_blocks=41, cost=COST))
    np.testing.assert_array_equal(watched.finished, alone.finished)


def test_what_cannot_be_run_is_said() -> None:
    trace = workload(1)
    view = trace.blocks(16)
    with pytest.raises(KVCatchError, match="no scheduler 'magic'"):
        serve_governed(trace, EngineSettings(num_blocks=41, scheduler="magic"), view)
    with pytest.raises(KVCatchError, match="first come first served"):
        serve_governed(trace, EngineSettings(num_blocks=41, scheduler="backfill", priorities={"": 1}), view)


def test_a_failing_policy_does_not_pass_for_a_result() -> None:
    """In an engine the plugin steps aside; a simulation of something else would mislead."""
    engine = GovernedScheduler(Settings(), lambda: 0.0, num_blocks=10, block_size=16, max_model_len=100)
    engine.pilot.step_aside(ValueError("injected"))
    with pytest.raises(RuntimeError, match="policy failed"):
        engine.schedule()

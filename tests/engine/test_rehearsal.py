"""kvcatch's scheduler on the simulated engine starts, at every step, what the plugin starts on vLLM's ``Scheduler``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.support.engine_loop import settings_of, trace_of, with_prefixes
from engine.support.sched_modelfree import (
    STEP_SECONDS,
    Outcome,
    Run,
    Setup,
    Spec,
    p95,
    tiny_model,
    ttft_p95,
    workload,
)
from kvcatch.capture.hooks import Hooks
from kvcatch.capture.options import Options
from kvcatch.capture.recorder import Recorder
from kvcatch.capture.ring import RingWriter
from kvcatch.control.rehearsal import GovernedScheduler, serve_governed
from kvcatch.policy.settings import Settings
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.engine import EngineSettings, serve
from kvcatch.simulator.stepwise import Stepwise, scheduler_arguments
from kvcatch.sources.captured import workload_of
from kvcatch.store.capture import ReplayCapture

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def real(monkeypatch: pytest.MonkeyPatch, mode: str, specs: list[Spec], setup: Setup, model: str) -> Outcome:
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvcatch.control.scheduler import KVCatchScheduler

    monkeypatch.setenv("KVCATCH_SCHEDULER_MODE", "observe" if mode == "stock" else mode)
    return Run(Scheduler if mode == "stock" else KVCatchScheduler, specs, setup, model, trace=True).go()


def rehearsed(specs: list[Spec], setup: Setup, mode: str) -> tuple[list[tuple[Any, ...]], Stepwise]:
    """(what was scheduled, free blocks) of every step, with the plugin's clock."""

    def governed(chosen: EngineSettings, longest: int, clock: Any) -> GovernedScheduler:
        return GovernedScheduler(
            Settings(mode=mode),
            lambda: (clock() + specs[0].arrival) * STEP_SECONDS,
            **scheduler_arguments(chosen, longest),
        )

    trace = trace_of(specs, setup.block_size)
    run = Stepwise(trace, settings_of(setup, mode), trace.blocks(setup.block_size), governed)
    steps: list[tuple[Any, ...]] = []
    pool = run.scheduler.kv_cache_manager.block_pool

    def noting(schedule: Any) -> Any:
        def noted() -> Any:
            decided = schedule()
            steps.append(
                (
                    int(run.now) + specs[0].arrival,
                    tuple(decided.num_scheduled_tokens.items()),
                    pool.get_num_free_blocks(),
                )
            )
            return decided

        return noted

    Hooks().add(run.scheduler, "schedule", noting)
    while run.step():
        pass
    return steps, run


@pytest.mark.parametrize("mode", ["observe", "backfill", "backfill+peak"])
@pytest.mark.parametrize("seed", range(4))
def test_step_by_step_as_the_plugin(
    monkeypatch: pytest.MonkeyPatch, model: str, mode: str, seed: int
) -> None:
    setup = Setup(num_blocks=[65, 97][seed % 2], caching=seed >= 2, watermark=[0.0, 0.02][seed % 2])
    specs = workload(seed, 250, [0.95, 1.5][seed % 2], loose=[1, 2][seed % 2])
    if setup.caching:
        specs = with_prefixes(specs)
    outcome = real(monkeypatch, mode, specs, setup, model)
    steps, run = rehearsed(specs, setup, mode)
    steps = [step for step in steps if step[1]]
    assert steps == [
        step for step in outcome.trace if step[1]
    ]  # empty steps only tell the workers who finished
    assert len(steps) > 500
    assert int(run.totals[1]) == outcome.preemptions
    if mode == "backfill+peak":
        assert outcome.preemptions == 0


def recorded(outcome_of: Run, path: Path) -> None:
    """Run with the recorder on; a step is 2**-7 s, so that seconds are exact."""
    scheduler, setup = outcome_of.scheduler, outcome_of.setup
    info = {
        "engine": "vllm", "num_blocks": setup.num_blocks, "block_size": setup.block_size, "pid": 1,
        "max_num_seqs": setup.max_num_seqs, "max_num_batched_tokens": setup.budget, "max_model_len": setup.max_model_len,
    }  # fmt: skip
    ring = RingWriter(str(path), 64 << 20, info)

    def clock() -> int:
        return 1_700_000_000_000_000_000 + outcome_of.now * 7_812_500

    recorder = Recorder(
        scheduler, ring, [("full", setup.block_size)], Options({"KVCATCH_DIR": str(path.parent)}), mono=clock, wall=clock
    )  # fmt: skip
    recorder.attach()
    outcome_of.go()
    recorder.detach()
    ring.close()


@pytest.mark.parametrize("seed", range(3))
def test_what_a_recording_promises_comes_true(
    monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path, seed: int
) -> None:
    """A run in observe mode is recorded and simulated with backfill+peak; then the plugin really runs so.

    The shorts' TTFT p95 and the preemptions that it saves agree within 10 %. Both sides count in steps.
    """
    from kvcatch.control.scheduler import KVCatchScheduler

    setup, specs = Setup(num_blocks=97), workload(10 + seed, 300, 1.1, loose=2)
    monkeypatch.setenv("KVCATCH_SCHEDULER_MODE", "observe")
    watched = Run(KVCatchScheduler, specs, setup, model)
    recorded(watched, tmp_path / "x.kvring")
    governed = real(monkeypatch, "backfill+peak", specs, setup, model)

    capture = ReplayCapture.open(str(tmp_path / "x.kvring"))
    trace, _ = workload_of(capture)
    capture.close()
    assert len(trace) == len(specs)
    view = trace.blocks(setup.block_size)
    cost = StepCost(fixed=2**-7, per_prefill_token=0.0, per_decode=0.0)

    def predicted(scheduler: str) -> tuple[float, int]:
        chosen = EngineSettings(
            num_blocks=setup.num_blocks, block_size=setup.block_size, max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.budget, max_model_len=setup.max_model_len, enable_prefix_caching=False,
            scheduler=scheduler, cost=cost,
        )  # fmt: skip
        served = serve_governed(trace, chosen, view)
        waits = np.round((served.first_token - trace.arrival_seconds) * 2**7).astype(int) - 1
        short = [int(wait) for wait, prompt in zip(waits, trace.prompt_tokens, strict=True) if prompt < 800]
        return p95(short), int(served.preemptions.sum())

    stock, plugin = predicted("stock"), predicted("backfill+peak")
    assert stock[0] == pytest.approx(ttft_p95(watched.outcome, specs, long=False), rel=0.02)
    truth = ttft_p95(watched.outcome, specs, long=False) - ttft_p95(governed, specs, long=False)
    assert truth > 0  # the plugin does help here
    assert stock[0] - plugin[0] == pytest.approx(truth, rel=0.1)
    saved = watched.outcome.preemptions - governed.preemptions
    assert stock[1] - plugin[1] == pytest.approx(saved, rel=0.1)


def test_the_fast_engine_is_stock_too(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """What the plugin is compared with: vLLM's own scheduler on the same requests."""
    setup, specs = Setup(), workload(3, 250, 1.1)
    outcome = real(monkeypatch, "stock", specs, setup, model)
    trace = trace_of(specs, setup.block_size)
    served = serve(trace, settings_of(setup))
    waits = served.first_token - trace.arrival_seconds - 1  # vLLM's driver counts the step before, not after
    assert waits.astype(int).tolist() == outcome.ttft
    assert int(served.preemptions.sum()) == outcome.preemptions > 0

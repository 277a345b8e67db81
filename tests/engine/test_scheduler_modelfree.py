"""The plugin on vLLM's real Scheduler without a model: same as stock where promised, better where it matters."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.support import env
from engine.support import sched_modelfree as free
from engine.support.sched_modelfree import Outcome, Run, Setup, Spec, flood, ttft_p95, workload

# The engine's own imports warn about its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return free.tiny_model(tmp_path_factory.mktemp("sched-model"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {**env.BASE, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KVCATCH_DIR", str(tmp_path))


def classes(asynchronous: bool = False) -> tuple[type, type]:
    """(stock, ours)."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvcatch.control.scheduler import KVCatchAsyncScheduler, KVCatchScheduler

    return (AsyncScheduler, KVCatchAsyncScheduler) if asynchronous else (Scheduler, KVCatchScheduler)


def intact(outcome: Outcome, specs: list[Spec], setup: Setup) -> None:
    """Every request ended exactly once, the pool is whole, and the plugin is still in charge."""
    assert sorted(outcome.finished) == list(range(len(specs)))
    assert outcome.free_at_end == setup.num_blocks - 1
    assert outcome.queue_at_end == 0
    pilot = outcome.scheduler._kvcatch
    assert not pilot.failed
    assert not pilot.governor.running
    assert not pilot.rejected


@pytest.mark.parametrize("seed", range(50))
def test_observe_is_step_identical_to_stock(seed: int, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCATCH_SCHEDULER_MODE", "observe")
    setup = Setup(
        asynchronous=seed % 2 == 1,
        caching=seed % 3 == 1,
        policy="priority" if seed % 5 == 4 else "fcfs",
        sliding=seed % 7 == 6,
    )
    rng = random.Random(seed)
    specs = [
        replace(
            spec,
            priority=rng.randrange(3),
            prefix=rng.randrange(-1, 2),
            prefix_tokens=min(64, spec.prompt // 2),
        )
        for spec in workload(seed, 40, 1.2, loose=1 + seed % 3)
    ]
    stock, ours = classes(setup.asynchronous)
    expected = Run(stock, specs, setup, model, trace=True).go()
    found = Run(ours, specs, setup, model, trace=True).go()
    assert found.trace == expected.trace
    assert found.preemptions == expected.preemptions
    intact(found, specs, setup)


@pytest.mark.parametrize("seed", range(8))
def test_below_the_safe_utilisation_every_step_equals_stock(seed: int, model: str) -> None:
    setup = Setup(num_blocks=361, asynchronous=seed % 2 == 1, caching=seed % 4 == 3)
    # A load made for 64 blocks on a pool of 360: it never gets tight.
    specs = workload(seed, 80, 1.5)
    stock, ours = classes(setup.asynchronous)
    expected = Run(stock, specs, setup, model, trace=True).go()
    assert 0.3 < expected.peak_used < 0.85
    assert Run(ours, specs, setup, model, trace=True).go().trace == expected.trace


def test_the_stored_watermark_moves_the_switch_point(model: str, tmp_path: Path) -> None:
    """The first step in which a short overtakes a long comes when the pool passes the stored value."""
    setup = Setup(num_blocks=151, budget=512)
    # Pairs of a long (10 blocks) and a short (1 block) come every 8 steps and nobody leaves: +8 % per pair.
    specs = [Spec(8 * pair, prompt, 100, 100, long=prompt > 100) for pair in range(8) for prompt in (310, 20)]
    first: dict[float, float] = {}
    for safe in (0.2, 0.5):
        text = json.dumps({"schema_version": 1, "safe_utilization_ratio": safe})
        (tmp_path / "watermark.json").write_text(text)
        run = Run(classes()[1], specs, setup, model)
        pool = run.scheduler.kv_cache_manager.block_pool
        before = 0.0
        while not any(reason == "short-first" for *_, reason in run.outcome.decisions):
            before = 1 - pool.get_num_free_blocks() / 150
            run.step()
            assert run.now < 64
        first[safe] = before
    # Tight means: blocks in use plus the head's 10 of 150 pass the value.
    assert 0.2 - 0.1 <= first[0.2] <= 0.2 + 0.08
    assert 0.5 - 0.1 <= first[0.5] <= 0.5 + 0.08


SETUPS = [
    Setup(),
    Setup(asynchronous=True),
    Setup(policy="priority"),
    Setup(caching=True),
    Setup(caching=True, asynchronous=True, v2_runner=True),
    Setup(sliding=True, num_blocks=121),
    Setup(watermark=0.05),
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: "-".join(
    name for name, on in (
        ("async", setup.asynchronous), (setup.policy, True), ("caching", setup.caching),
        ("v2", setup.v2_runner), ("sliding", setup.sliding), ("watermark", setup.watermark > 0),
    ) if on
))  # fmt: skip
@pytest.mark.parametrize("mode", ["backfill", "backfill+peak", "quantile"])
def test_every_request_ends_once_whatever_happens(
    setup: Setup, mode: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts at every state, requests that are not ready when asked, early stops, shared prefixes."""
    monkeypatch.setenv("KVCATCH_SCHEDULER_MODE", "backfill+peak" if mode == "quantile" else mode)
    monkeypatch.setenv("KVCATCH_SCHEDULER_BOUND", "0.9" if mode == "quantile" else "max")
    rng = random.Random(17)
    specs = [
        replace(
            spec, priority=rng.randrange(3), prefix=rng.randrange(-1, 3), prefix_tokens=spec.prompt // 2,
            tenant=rng.choice(["", "a", "b"]),
        )
        for spec in workload(5, 150, 1.3, loose=2)
    ]  # fmt: skip
    aborts = {i: specs[i].arrival + rng.randrange(150) for i in range(0, 150, 9)}
    run = Run(classes(setup.asynchronous)[1], specs, setup, model, aborts=aborts)
    ready = run.scheduler._handle_blocked_waiting_request
    # The path of a grammar that compiles or a remote load: the engine takes the request out and puts it back.
    run.scheduler._handle_blocked_waiting_request = lambda r: rng.random() > 0.15 and ready(r)
    outcome = run.go()
    intact(outcome, specs, setup)
    if mode == "backfill+peak":
        assert outcome.preemptions == 0


def test_adapter_limits_lose_nobody(model: str) -> None:
    """One adapter at a time, three in use: the engine skips what may not run beside the others."""
    from types import SimpleNamespace

    from vllm.lora.request import LoRARequest

    setup, specs = Setup(), workload(6, 120, 1.2)
    run = Run(classes()[1], specs, setup, model)
    run.scheduler.lora_config = SimpleNamespace(max_loras=1)
    for index, request in enumerate(run.requests):
        if index % 4:
            request.lora_request = LoRARequest(f"adapter{index % 4}", index % 4, "/nonexistent")
    while run.coming or run.batches or run.scheduler.has_requests():
        run.step()
        used = {r.lora_request.lora_int_id for r in run.scheduler.running if r.lora_request}
        assert len(used) <= 1
        assert run.now < 20_000
    outcome = run.go()
    intact(outcome, specs, setup)
    assert outcome.preemptions == 0


def test_strict_mode_never_preempts_with_shared_prefixes_and_still_uses_the_sharing(model: str) -> None:
    """Twenty shared blocks per prompt: counted once, or the pool would hold four requests at a time."""
    setup = Setup(num_blocks=101, caching=True)
    specs = [Spec(i // 2, 660, 40, 40, prefix=0, prefix_tokens=640) for i in range(120)]
    run = Run(classes()[1], specs, setup, model)
    together = 0
    while run.coming or run.batches or run.scheduler.has_requests():
        run.step()
        together = max(together, len(run.scheduler.running))
    outcome = run.go()
    intact(outcome, specs, setup)
    assert outcome.preemptions == 0
    # Beside the shared 20, two blocks each in the end: (100 - 20) / 2 = 40, and more where ages differ.
    assert together >= 38


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_larger_than_the_pool_gets_an_error_and_the_others_go_on(
    asynchronous: bool, model: str
) -> None:
    setup = Setup(num_blocks=33, max_model_len=4096, asynchronous=asynchronous)
    specs = [
        Spec(0, 100, 20, 20),
        Spec(1, 1200, 20, 20, long=True),  # 38 blocks of 32: more than the 32 there are
        Spec(2, 100, 20, 20),
        Spec(3, 900, 400, 400, long=True),  # fits at first, needs 41 blocks in the end
        Spec(4, 100, 20, 20),
    ]
    outcome = Run(classes(asynchronous)[1], specs, setup, model, limit=3000).go()
    intact(outcome, specs, setup)
    assert sorted(outcome.errors) == [1, 3]
    assert ("1", "reject", "never-fits") in [decision[1:] for decision in outcome.decisions]
    with pytest.raises(AssertionError, match="no end"):
        Run(classes(asynchronous)[0], specs, setup, model, limit=3000).go()  # stock: hangs behind it


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_seed_of_the_benchmark_meets_its_goals(asynchronous: bool, model: str) -> None:
    stock, ours = classes(asynchronous)
    setup = Setup(asynchronous=asynchronous)
    for load in (0.7, 0.95, 1.5):
        specs = workload(12, 500, load)
        base = Run(stock, specs, setup, model).go()
        outcome = Run(ours, specs, setup, model).go()
        intact(outcome, specs, setup)
        assert base.preemptions > 10
        assert outcome.preemptions == 0
        assert ttft_p95(outcome, specs, long=False) <= 0.35 * ttft_p95(base, specs, long=False)
        assert ttft_p95(outcome, specs, long=True) <= 1.10 * ttft_p95(base, specs, long=True)
        assert outcome.steps <= 1.03 * base.steps


def test_a_flood_does_not_starve_the_long_request_and_naive_skip_ahead_does(model: str) -> None:
    stock, ours = classes()
    specs = flood(7, 400)
    first = {
        name: Run(cls, specs, Setup(), model).go().ttft[0]
        for name, cls in (("stock", stock), ("ours", ours), ("naive", free.naive_class(stock)))
    }
    assert first["stock"] is not None
    assert first["ours"] is not None
    assert first["naive"] is not None
    assert first["ours"] <= 1.1 * first["stock"]
    assert first["naive"] > 5 * first["stock"]


def test_hybrid_groups_are_counted_as_the_engine_counts_them(model: str) -> None:
    setup = Setup(sliding=True, num_blocks=201)
    run = Run(classes()[1], workload(1, 5, 0.5), setup, model)
    table = run.scheduler._kvcatch.governor.blocks
    manager = run.scheduler.kv_cache_manager
    for tokens in (1, 32, 33, 128, 500, 2000):
        asked = manager.coordinator.get_num_blocks_to_allocate(
            request_id="probe", num_tokens=tokens, new_computed_blocks=((), ()), num_encoder_tokens=0,
            total_computed_tokens=0, num_local_computed_tokens=0, num_tokens_main_model=tokens,
            apply_admission_cap=True,
        )  # fmt: skip
        assert table[tokens] == asked
    assert table[2000] < 2 * 63  # the window's blocks do not grow with the prompt


def test_an_engine_without_what_we_need_runs_stock_with_a_warning(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcatch.control import scheduler as module

    said: list[str] = []
    monkeypatch.setattr(module, "missing", lambda *_: ["Scheduler.running as a list"])
    monkeypatch.setattr(module.logger, "warning", lambda text, *rest, **_: said.append(text % rest))
    setup, specs = Setup(), workload(3, 60, 1.2)
    found = Run(classes()[1], specs, setup, model, trace=True).go()
    assert found.trace == Run(classes()[0], specs, setup, model, trace=True).go().trace
    assert found.scheduler._kvcatch is None
    assert said == ["kvcatch: scheduling as without the plugin, this vLLM lacks: Scheduler.running as a list"]


@pytest.mark.parametrize("method", ["choose", "begin", "admit", "take", "end"])
def test_a_fault_of_ours_never_reaches_the_engine(
    method: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcatch.policy.governor import Governor

    calls = 0
    original = getattr(Governor, method)

    def faulty(self: Governor, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise RuntimeError("planted")
        return original(self, *args)

    monkeypatch.setattr(Governor, method, faulty)
    specs = workload(3, 80, 1.2)
    outcome = Run(classes()[1], specs, Setup(), model).go()
    assert sorted(outcome.finished) == list(range(80))
    assert outcome.free_at_end == 64
    assert outcome.scheduler._kvcatch.failed


def test_a_watermark_that_cannot_be_reached_is_said(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcatch.control import scheduler as module

    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *rest, **_: said.append(text % rest))
    # 4 sequences of at most 64 blocks in a pool of 1,000: 26 %.
    free.build(classes()[1], Setup(num_blocks=1001, max_num_seqs=4), model)
    assert len(said) == 1
    assert "can never be passed: 4 sequences of at most 64 blocks in a pool of 1000" in said[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_wrong_class_for_the_engine_is_said(
    asynchronous: bool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcatch.control import scheduler as module

    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *rest, **_: said.append(text % rest))
    free.build(classes(not asynchronous)[1], Setup(asynchronous=asynchronous), model)
    right = "KVCatchAsyncScheduler" if asynchronous else "KVCatchScheduler"
    assert len(said) == 1
    assert f"name {right} in --scheduler-cls" in said[0]


def test_streaming_input_sessions_lose_nothing(model: str) -> None:
    """Sessions that stop, wait for more input while holding blocks, and go on, amid ordinary requests."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    run = Run(classes()[1], workload(9, 120, 1.2), Setup(), model)
    scheduler = run.scheduler

    def chunk(name: str, tokens: int, last: bool) -> Request:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        made = Request(
            request_id=name, prompt_token_ids=[5] * tokens, sampling_params=sampling, pooling_params=None,
            arrival_time=float(run.now), resumable=not last,
        )  # fmt: skip
        run.requests.append(made)
        run.specs.append(Spec(run.now, tokens, 4, 4))
        run.outcome.ttft.append(None)
        run.outcome.end.append(None)
        return made

    sent = 0
    first = chunk(str(len(run.requests)), 60, last=False)
    name = first.request_id
    scheduler.add_request(first)
    while run.coming or run.batches or scheduler.get_num_unfinished_requests() or sent < 3:
        run.step()
        if sent < 3 and scheduler.num_waiting_for_streaming_input:
            sent += 1
            update = Request(
                request_id=name, prompt_token_ids=[6] * 40, pooling_params=None, resumable=sent < 3,
                sampling_params=SamplingParams(max_tokens=4, ignore_eos=True),
            )  # fmt: skip
            scheduler.add_request(update)
        assert run.now < 5000
    assert not scheduler._kvcatch.failed
    if name in scheduler.requests:
        from vllm.v1.request import RequestStatus

        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 64
    assert set(range(120)) <= set(run.outcome.finished)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_protected_prefix_survives_a_flood_that_evicts_it_in_stock(
    asynchronous: bool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCATCH_PROTECT", "chat=0.4")
    setup = Setup(num_blocks=129, caching=True, asynchronous=asynchronous)

    def chat(at: int) -> Spec:
        return Spec(at, 1640, 5, 5, prefix=0, prefix_tokens=1600, tenant="chat")  # 50 blocks of 32

    # The second chat request proves the prefix; 60 unique prompts of 10 blocks then turn the pool over 4 times.
    specs = [
        chat(0),
        chat(40),
        *(Spec(60 + 4 * i, 310, 10, 10, tenant="batch") for i in range(60)),
        chat(400),
    ]
    stock, ours = classes(asynchronous)
    base = Run(stock, specs, setup, model).go()
    kept = Run(ours, specs, setup, model).go()
    intact(kept, specs, setup)
    assert base.hit_tokens[1] == kept.hit_tokens[1] == 1600
    assert base.hit_tokens[61 + 1] == 0
    assert kept.hit_tokens[61 + 1] == 1600
    # Nobody pays for it: what stock served at a step, we served at that step.
    assert kept.ttft[2:62] == base.ttft[2:62]


@pytest.mark.soak
def test_nothing_grows_over_an_hour_of_steps(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 requests, about 180,000 steps (an hour at 50 a second): tables stay bounded."""
    monkeypatch.setenv("KVCATCH_SCHEDULER_BOUND", "0.9")
    specs = [replace(spec, tenant=f"t{i % 500}") for i, spec in enumerate(workload(1, 20_000, 0.9, 2))]
    run = Run(classes()[1], specs, Setup(caching=True), model, limit=10**7)
    outcome = run.go()
    intact(outcome, specs, Setup())
    pilot = run.scheduler._kvcatch
    governor = pilot.governor
    assert len(governor._due) < 3000
    assert len(governor.timeline._sum) < 20_000
    assert not pilot._prefilling
    assert not pilot._preempted
    assert not pilot._shared
    assert not pilot._sharing._marks
    assert len(governor.line._groups) == len(governor.line._arrivals) == 0
    assert len(governor.lengths._recent) <= 1024


def test_held_and_decisions_are_there_for_the_recorder(model: str) -> None:
    run = Run(classes()[1], workload(7, 120, 1.5), Setup(), model)
    held = 0
    while run.coming or run.batches or run.scheduler.has_requests():
        run.step()
        assert 0 <= run.scheduler.kvcatch_held <= len(run.scheduler.waiting)
        assert len({step for step, *_ in run.scheduler.kvcatch_decisions}) <= 1
        held = max(held, run.scheduler.kvcatch_held)
    assert held > 10
    assert {"backfilled", "peak"} <= {reason for *_, reason in run.outcome.decisions}

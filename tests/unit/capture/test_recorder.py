"""The recorder on the embedded engine: what a reader rebuilds equals a walk of the engine at every step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import kvcatch
from kvcatch.capture.options import Options
from kvcatch.capture.poolwatch import PoolWatch
from kvcatch.capture.recorder import Recorder
from kvcatch.capture.ring import RingWriter
from kvcatch.simulator.drive import VirtualClock
from kvcatch.simulator.embedded import Scheduler, sample
from kvcatch.simulator.requests import Request, hash_of
from kvcatch.store.capture import ReplayCapture
from kvcatch.store.replay import Replay
from unit.capture.embedded_run import BLOCK, Behind, EmbeddedRun, info


def compare(run: EmbeddedRun) -> list[str]:
    """Runs to the end; returns the differences between the engine and the replay."""
    seen = list(run.steps())
    run.ring.close()
    rows = list(_frozen(Replay(run.path)))
    differences = []
    # A step that did nothing within 100 ms of a row writes none.
    if len(rows) < len(seen) - 2:
        differences.append(f"{len(rows)} rows of {len(seen)} steps")
    for row in rows:
        number = row.pop("step")
        truth = seen[number - 1]
        expected = {
            "active": truth.active, "cached": truth.cached, "free": truth.free, "running": truth.running,
            "waiting": truth.waiting, "blocks": truth.blocks, "computed": truth.computed,
            "tokens": truth.tokens, "held_tokens": truth.held_tokens,
        }  # fmt: skip
        differences += [
            f"step {number}: {key} {row[key]} != {value}"
            for key, value in expected.items()
            if row[key] != value
        ]
    return differences


def _frozen(replay: Replay):
    last = 0
    for step in replay:
        if step.step == last:
            continue  # a row between steps: an abort
        last = step.step
        yield {
            "step": step.step, "active": step.active_blocks, "cached": step.cached_blocks, "free": step.free_blocks,
            "running": step.running, "waiting": step.waiting,
            "blocks": {key: groups[0] for key, groups in step.blocks.items()},
            "computed": step.computed_tokens, "tokens": step.num_tokens, "held_tokens": step.held_tokens,
        }  # fmt: skip


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_equals_a_walk_of_the_engine(tmp_path: Path, seed: int, behind: bool) -> None:
    run = EmbeddedRun(tmp_path, seed=seed, behind=behind)
    assert compare(run) == []
    assert run.preemptions > 0
    capture = Replay(run.path).capture
    capture.refresh()
    assert capture.state.totals["preemptions"] == run.preemptions
    assert capture.state.totals["recomputed_tokens"] == run.recomputed
    assert capture.state.refs == {}


def test_a_dropped_free_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PoolWatch._free_blocks

    def forgets(self: PoolWatch, inner: object) -> object:
        hooked, calls = original(self, inner), [0]

        def free_blocks(blocks: object, *args: object) -> object:
            calls[0] += 1
            return inner(blocks, *args) if calls[0] == 20 else hooked(blocks, *args)

        return free_blocks

    monkeypatch.setattr(PoolWatch, "_free_blocks", forgets)
    assert any("cached" in difference for difference in compare(EmbeddedRun(tmp_path)))


def test_shared_blocks_counted_twice_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Recorder._resume

    def twice(self: Recorder, slot: object, cached: int) -> None:
        original(self, slot, cached)
        self.span_total += BLOCK

    monkeypatch.setattr(Recorder, "_resume", twice)
    assert any("held_tokens" in difference for difference in compare(EmbeddedRun(tmp_path)))


def test_requests_finish_with_their_numbers(tmp_path: Path) -> None:
    run = EmbeddedRun(tmp_path, seed=3)
    for _ in run.steps():
        pass
    run.ring.close()
    capture = Replay(run.path).capture
    capture.refresh()
    views = {view.engine_request_id: view for view in capture.requests()}
    assert len(views) == len(run.made)
    for number, request in enumerate(run.made):
        view = views[request.request_id]
        assert view.request_id == f"r{number}"
        assert view.tags["tenant"] == f"tenant-{number % 3}"
        assert view.prompt_tokens == request.num_prompt_tokens
        assert view.output_tokens == request.num_output_tokens
        assert view.num_preemptions == request.num_preemptions
        assert view.cached_tokens == request.num_cached_tokens
        assert view.finish_reason in ("length", "abort")


def test_hash_chains_are_whole_paths(tmp_path: Path) -> None:
    run = EmbeddedRun(tmp_path, seed=1)
    for _ in run.steps():
        pass
    run.recorder.chains.write(run.recorder.out, 1 << 20)
    run.recorder._flush(0)
    capture = Replay(run.path).capture
    capture.refresh()
    state = capture.state
    for request, made in zip(sorted(state.finished, key=lambda r: r.rid), run.made, strict=True):
        node, path = request.node, []
        while node:
            node, value = state.nodes[node]
            path.append(value)
        expected = [int.from_bytes(value[:8], "little") for value in made.block_hashes]
        assert path[::-1] == expected


def test_a_ring_that_wrapped_describes_everything_again(tmp_path: Path) -> None:
    run = EmbeddedRun(tmp_path, seed=2, requests=450, ring_bytes=4 * (4 << 16))
    seen = list(run.steps())
    assert run.ring.head > run.ring.words, "the ring must have wrapped for this test to mean anything"
    run.ring.close()
    replay = Replay(run.path)
    checked = last = 0
    for step in replay:
        between = step.step == last  # a row after an abort, between two steps
        last = step.step
        if replay.capture.state.partial or between:
            continue
        truth = seen[step.step - 1]
        assert step.active_blocks == truth.active
        if step.step % 10 == 0:
            checked += 1
            assert step.running == truth.running
            assert {key: groups[0] for key, groups in step.blocks.items()} == truth.blocks
            assert step.computed_tokens == truth.computed
    assert checked > 50
    totals = replay.capture.state.totals
    assert totals["preemptions"] == run.preemptions
    assert totals["recomputed_tokens"] == run.recomputed
    assert totals["steps"] == len(seen)
    assert replay.capture.loss.dropped_bytes > 0


def test_a_hook_that_raises_takes_itself_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = EmbeddedRun(tmp_path, seed=0)
    calls = [0]
    original = run.recorder._after_schedule

    def breaks(*args: object) -> None:
        calls[0] += 1
        if calls[0] == 30:
            raise RuntimeError("injected")
        original(*args)

    run.recorder._after_schedule = breaks  # type: ignore[method-assign]
    steps = sum(1 for _ in run.steps())
    assert steps > 60
    assert all(request.is_finished() for request in run.made)
    assert not run.recorder.active
    assert "schedule" not in vars(run.scheduler)
    assert [record.message for record in caplog.records] == [
        "kvcatch: a hook failed, capture is off; the engine is not affected"
    ]
    assert Replay(run.path).capture.loss.hook_errors == 1


def test_decisions_of_the_scheduler_are_recorded_when_they_change(tmp_path: Path) -> None:
    run = EmbeddedRun(tmp_path, seed=1)
    scheduler = run.scheduler
    scheduler.kvcatch_decisions, scheduler.kvcatch_held = [], 2  # type: ignore[attr-defined]
    run.recorder.governed = True
    told = []
    for number, _ in enumerate(run.steps()):
        waiting = [request.request_id for request in scheduler.waiting][:1]
        word = "held" if number % 2 else "passed"
        scheduler.kvcatch_decisions[:] = [(number, key, word, "short of blocks") for key in waiting]  # type: ignore[attr-defined]
        told += waiting
    run.ring.close()
    assert told
    events = [event for event in _events(run.path) if event["kind"] == "decision"]
    assert {event["decision"] for event in events} == {"held: short of blocks", "passed: short of blocks"}
    assert len(events) <= len(told)
    assert {event["held"] for event in _events(run.path) if event["kind"] == "sample" and event["step"]} == {
        2
    }


def _events(path: str):
    from kvcatch.store.dump import event_dicts
    from kvcatch.store.feeds import open_feed

    return event_dicts(open_feed(path), 0)


def test_an_engine_that_never_served_anything_has_a_pool_and_no_step(tmp_path: Path) -> None:
    run = EmbeddedRun(tmp_path, seed=0)
    run.ring.close()
    capture = kvcatch.open(run.path)
    snapshot = capture.snapshot()
    steps = capture.samples()["steps"].sum()
    capture.close()
    usable = run.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    assert (snapshot.pool.active_blocks, snapshot.pool.cached_blocks, snapshot.pool.free_blocks) == (
        0,
        0,
        usable,
    )
    assert steps == 0


def test_rates_begin_with_the_first_step_not_with_the_attach(tmp_path: Path) -> None:
    """Ten seconds idle, then steps: what is generated per second of work does not shrink by the wait."""
    clock = VirtualClock(time.monotonic_ns(), time.time_ns())
    scheduler = Scheduler(200, BLOCK, max_num_seqs=8, max_num_batched_tokens=512)
    ring = RingWriter(str(tmp_path / "r.core0.kvring"), 1 << 22, info(200))
    recorder = Recorder(
        scheduler, ring, [("full", BLOCK)], Options({"KVCATCH_DIR": str(tmp_path)}),
        mono=clock.monotonic_ns, wall=clock.time_ns,
    )  # fmt: skip
    recorder.attach()
    clock.advance_to(8.0)
    scheduler.add_request(Request("r", 15, 40, arrival_time=clock.time()))
    for _ in range(30):
        output = scheduler.schedule()
        clock.advance_to(clock.seconds + 0.01)
        scheduler.update_from_output(output, sample(scheduler, output))
    ring.close()
    capture = kvcatch.open(ring.path)
    rate = capture.snapshot().latency.output_tokens_per_second
    capture.close()
    # One token every 10 ms: 30 in the 0.29 s from the first row to the last.
    assert rate == pytest.approx(30 / 0.29, rel=0.05)


def test_blocks_of_the_step_that_is_being_computed_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.kvring"
    scheduler = Scheduler(65, BLOCK, max_num_seqs=8, max_num_batched_tokens=2048)
    ring = RingWriter(str(path), 1 << 22, info(65))
    recorder = Recorder(scheduler, ring, [("full", BLOCK)], Options({"KVCATCH_DIR": str(tmp_path)}))
    recorder.attach()
    for name, prompt in (("small", 20), ("large", 320)):
        request = Request(name, prompt, 50, [hash_of(name, k) for k in range(prompt // BLOCK)])
        scheduler.add_request(request)
        output = scheduler.schedule()
        capture = ReplayCapture.open(str(path))
        pool, views = capture.snapshot().pool, capture.snapshot().requests
        capture.close()
        # 20 and 320 tokens of 16-token blocks; the first request keeps its two while the second is computed.
        before, now = {"small": (0, 2), "large": (2, 20)}[name]
        assert (pool.active_blocks, pool.step_blocks) == (before, now)
        assert sum(view.num_blocks or 0 for view in views) == before + now
        scheduler.update_from_output(output, sample(scheduler, output))
    capture = ReplayCapture.open(str(path))
    assert (capture.snapshot().pool.active_blocks, capture.snapshot().pool.step_blocks) == (22, 0)
    capture.close()


def test_a_name_used_again_while_its_end_is_only_noted_is_another_request(tmp_path: Path) -> None:
    path = tmp_path / "x.kvring"
    scheduler = Behind(65, BLOCK, max_num_seqs=2, max_num_batched_tokens=2048)
    ring = RingWriter(str(path), 1 << 22, info(65))
    recorder = Recorder(
        scheduler, ring, [("full", BLOCK)], Options({"KVCATCH_DIR": str(tmp_path)}), behind=True
    )
    recorder.attach()

    def step() -> None:
        output = scheduler.schedule()
        scheduler.get_grammar_bitmask(output)
        scheduler.update_from_output(output, sample(scheduler, output))

    scheduler.add_request(Request("a", 20, 1, [hash_of("a", 0)]))
    scheduler.add_request(Request("b", 20, 50, [hash_of("b", 0)]))
    step()  # "a" ends with its only token; "b" runs on, so that this is only noted
    scheduler.add_request(
        Request("c", 20, 50, [hash_of("c", 0)])
    )  # takes the seat, so that the second "a" waits
    scheduler.add_request(Request("a", 40, 50, [hash_of("d", 0), hash_of("d", 1)]))
    step()
    step()
    capture = ReplayCapture.open(str(path))
    seen = {view.request_id: (view.prompt_tokens, view.status) for view in capture.snapshot().requests}
    assert seen == {"a": (40, "waiting"), "b": (20, "running"), "c": (20, "running")}
    assert (capture.state.totals["arrived"], capture.state.totals["finished"]) == (4, 1)
    capture.close()

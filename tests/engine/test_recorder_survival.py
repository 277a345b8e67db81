"""What the recorder does when the world is against it, on the real scheduler without a model.

The engine must go on, what was written must be readable and true, and losses must be said.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import kvcatch
from engine.support import env, modelfree, observed
from engine.support.cases import Run
from engine.support.modelfree import Case
from engine.support.processes import deadline_poll
from engine.support.top import kvcatch as run_kvcatch
from engine.support.top import top_json
from kvcatch.api import recorders
from kvcatch.errors import KVCatchError
from kvcatch.store.replay import Replay

#: seed of the kills' moments
MOMENTS = random.Random(7)
KILLS = [MOMENTS.randrange(20, 220) for _ in range(20)]
MANY = {
    "requests": 3500,
    "max_output": 16,
    "num_blocks": 260,
    "max_prompt": 420,
    "arrivals_per_step": 0.6,
}
FAULTS = {
    "a hook of the scheduler": "kvcatch.capture.recorder:Recorder._row:50",
    "a hook of the block pool": "kvcatch.capture.poolwatch:PoolWatch._taken:5",
    "the start of the recorder": "kvcatch.capture.plugin:_start_recorder",
    "the plugin function": "kvcatch.capture.plugin:check_version",
}


def cases(model: str) -> dict[str, Case]:
    """Everything that one forked process each can show."""
    plain = {"model": model, "requests": 100}
    table = {
        "drop-frees": Case(**plain | MANY, env={"KVCATCH_TEST_MUTANT": "drop-frees"}),
        "shared-twice": Case(**plain, env={"KVCATCH_TEST_MUTANT": "shared-twice"}),
        "blind-window": Case(
            **plain, layout="alternating", asynchronous=True, env={"KVCATCH_TEST_MUTANT": "blind-window"}
        ),
        "wrapped": Case(**plain | MANY, asynchronous=True, env={"KVCATCH_RING_BYTES": "1000000"}),
        "clock-back": Case(**plain, clock_jump=-7200.0),
        "clock-forth": Case(**plain, clock_jump=86400.0 * 30),
        "sampled": Case(**plain, env={"KVCATCH_SAMPLE_STEPS": "10", "KVCATCH_SAMPLE_INTERVAL": "3600"}),
    }
    for index, moment in enumerate(KILLS):
        # Long enough that a late killer still meets it alive.
        table[f"kill-{index}"] = Case(
            **plain | {"requests": 600}, asynchronous=index % 2 == 1, kill_after=moment, seed=index
        )
    for index, fault in enumerate(FAULTS.values()):
        table[f"fault-{index}"] = Case(**plain, env={"KVCATCH_TEST_FAULT": fault})
    return {name: modelfree.relabel(case, name) for name, case in table.items()}


@pytest.fixture(scope="session")
def survived(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], Run]:
    """All cases, run once one after the other."""
    done: dict[str, Run] = {}

    def of(name: str) -> Run:
        if not done:
            folder = tmp_path_factory.mktemp("survival")
            table = cases(str(tiny_model))
            statuses = modelfree.run_cases(list(table.values()), folder)
            for label, case in table.items():
                run = Run(case, folder / case.name)
                error = run.folder / "error.txt"
                assert statuses[case.name] == (-9 if case.kill_after else 0), error.read_text()
                done[label] = run
        return done[name]

    return of


def compared(run: Run, ring: Path | None = None) -> observed.Comparison:
    return observed.compare(run.seen, Replay(str(ring or run.ring)))


@pytest.mark.parametrize("mutant", ["drop-frees", "shared-twice", "blind-window"])
def test_a_wrong_hook_is_noticed(survived: Callable[[str], Run], mutant: str) -> None:
    run = survived(mutant)
    comparison = compared(run)
    assert comparison.wrong, "the comparison did not notice"
    expected = {"drop-frees": "cached", "shared-twice": "cached", "blind-window": "blocks of a request"}
    assert comparison.wrong[expected[mutant]]


@pytest.mark.parametrize("index", range(len(KILLS)))
def test_a_killed_engine_leaves_its_last_step(survived: Callable[[str], Run], index: int) -> None:
    run = survived(f"kill-{index}")
    seen = run.seen
    rows = [observed.Recorded.of(step, 1) for step in Replay(str(run.ring))]
    assert len(seen.updates) - rows[-1].step <= 1
    seen.updates = seen.updates[: rows[-1].step]
    comparison = observed.compare_rows(seen, rows)
    assert not comparison.wrong, str(comparison)

    capture = kvcatch.open(str(run.ring))
    assert capture.snapshot().state == "ended"
    capture.close()


def test_a_wrapped_ring_is_true_again_once_requests_are_described_anew(
    survived: Callable[[str], Run],
) -> None:
    run = survived("wrapped")
    seen = run.seen
    replay = Replay(str(run.ring))
    rows = []
    for step in replay:
        if not replay.capture.state.partial:
            rows.append(observed.Recorded.of(step, 1))
    # The oldest steps are gone, and not few; the younger ones are all there and right.
    first = rows[0].step
    assert 200 < first < len(seen.updates) - 200
    assert len(seen.updates) - rows[-1].step <= 2  # the last updates had nothing to do
    whole = [row for row in seen.updates if row["n"] + 1 > first]
    comparison = observed.compare_rows(observed.Observation(seen.info, seen.schedules, whole), rows[1:])
    assert not comparison.wrong, str(comparison)
    last = list(Replay(str(run.ring)))[-1]
    assert last.preemptions == seen.preemptions
    assert last.evicted_blocks == sum(row["evicted"] for row in seen.schedules) > 0
    capture = kvcatch.open(str(run.ring))
    assert capture.loss.dropped_bytes > 0
    capture.close()


@pytest.mark.parametrize("name", ["clock-back", "clock-forth"])
def test_a_stepped_wall_clock_changes_nothing(survived: Callable[[str], Run], name: str) -> None:
    run = survived(name)
    assert not compared(run).wrong, str(compared(run))
    capture = kvcatch.open(str(run.ring))
    samples = capture.samples()
    assert (samples["unix_ns"][1:] >= samples["unix_ns"][:-1]).all()
    took = (samples["unix_ns"][-1] - samples["unix_ns"][0]) / 1e9
    observed_seconds = (run.seen.updates[-1]["ns"] - run.seen.updates[0]["ns"]) / 1e9
    assert took == pytest.approx(observed_seconds, abs=1.0)
    for view in capture.requests():
        for seconds in (view.queue_seconds, view.ttft_seconds):
            assert seconds is None or 0 <= seconds <= took + 1
    capture.close()


def test_fewer_rows_lose_no_event(survived: Callable[[str], Run]) -> None:
    run = survived("sampled")
    steps = list(Replay(str(run.ring)))
    seen = run.seen
    assert len(steps) < len(seen.updates) / 5
    last = steps[-1]
    assert last.preemptions == seen.preemptions > 0
    assert last.recomputed == seen.recomputed > 0
    assert last.evicted_blocks == sum(row["evicted"] for row in seen.schedules)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_ours_turns_capture_off_and_nothing_else(
    survived: Callable[[str], Run], name: str
) -> None:
    run = survived(f"fault-{list(FAULTS).index(name)}")
    assert run.result["unfinished"] == 0
    said = [line for line in run.log.splitlines() if "[kvcatch]" in line and "recording to" not in line]
    assert len(said) == 1
    assert "injected fault" in run.log
    if "hook" in name:
        capture = kvcatch.open(str(run.ring))
        assert capture.loss.hook_errors == 1
        before = capture.snapshot().step or 0
        capture.close()
        seen = run.seen
        seen.updates = seen.updates[: before - 1]
        comparison = observed.compare(seen, Replay(str(run.ring)))
        assert not comparison.wrong, str(comparison)


def namespace(script: str) -> list[str]:
    """A command that runs the rest of its line in a mount namespace of its own after a shell script."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    return [*unshare, "sh", "-c", f'{script}\nexec "$@"', "sh"]


def test_a_recorder_directory_too_small_for_a_ring(tmp_path: Path, tiny_model: Path) -> None:
    case = Case(model=str(tiny_model), requests=40, label="small-disk")
    rings = tmp_path / case.name / "rings"
    other = tmp_path / "disk"
    other.mkdir()
    case = modelfree.relabel(case, "small-disk", KVCATCH_DIR=str(other))
    statuses = modelfree.run_cases(
        [case], tmp_path, command=namespace(f"mount -t tmpfs -o size=1m none {other}")
    )
    run = Run(case, tmp_path / case.name)
    assert statuses[case.name] == 0
    assert run.result["unfinished"] == 0
    assert run.log.count("no capture: [Errno 28] No space left on device") == 1
    assert not rings.exists()


def test_a_disk_that_fills_up_later(tmp_path: Path, tiny_model: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    case = Case(model=str(tiny_model), requests=100)
    case = modelfree.relabel(case, "full-disk", KVCATCH_DIR=str(disk), KVCATCH_RING_BYTES=str(8 << 20))
    kept = tmp_path / "kept"
    kept.mkdir()
    # A second process fills the disk as soon as the ring is there, and saves the ring when the run is over.
    script = f"""mount -t tmpfs -o size=12m none {disk}
(until ls {disk}/*.kvring >/dev/null 2>&1; do sleep 0.01; done
cat /dev/zero > {disk}/filler 2>/dev/null
until [ -s {tmp_path}/{case.name}/result.json ]; do sleep 0.01; done
df --output=avail {disk} > {kept}/avail
cp {disk}/*.kvring {kept}/) &"""
    statuses = modelfree.run_cases([case], tmp_path, command=namespace(script))
    run = Run(case, tmp_path / case.name)
    assert statuses[case.name] == 0
    assert run.result["unfinished"] == 0
    assert (kept / "avail").read_text().split()[1] == "0"
    (ring,) = kept.glob("*.kvring")
    comparison = compared(run, ring)
    assert not comparison.wrong, str(comparison)


def test_two_engines_in_one_directory(tmp_path: Path, tiny_model: Path) -> None:
    shared = str(tmp_path / "rings")
    table = [
        modelfree.relabel(
            Case(model=str(tiny_model), requests=100, seed=seed, asynchronous=seed == 1),
            f"engine{seed}",
            KVCATCH_DIR=shared,
        )
        for seed in (0, 1)
    ]
    running = [modelfree.start_cases([case], tmp_path) for case in table]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
    by_pid = {info.pid: info for info in recorders(shared)}
    assert len(by_pid) == 2
    for case in table:
        run = Run(case, tmp_path / case.name)
        comparison = compared(run, Path(by_pid[run.seen.info["pid"]].path))
        assert not comparison.wrong, str(comparison)


@pytest.fixture(scope="module")
def capture(survived: Callable[[str], Run], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .kvcap made from a finished run."""
    run = survived("sampled")
    path = tmp_path_factory.mktemp("damaged") / "whole.kvcap"
    status, said = run_drainer(run.ring, path)
    assert (status, said) == (0, "")
    return path


class TestDamagedFiles:
    """A ring and a capture file with holes, cuts and foreign bytes."""

    def test_a_capture_file_equals_its_ring(self, survived: Callable[[str], Run], capture: Path) -> None:
        ring = [observed.Recorded.of(step, 1) for step in Replay(str(survived("sampled").ring))]
        file = [observed.Recorded.of(step, 1) for step in Replay(str(capture))]
        assert file == ring

    @pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_a_cut_file_is_read_up_to_its_last_whole_chunk(
        self, capture: Path, tmp_path: Path, kept: float
    ) -> None:
        data = capture.read_bytes()
        cut = tmp_path / "cut.kvcap"
        cut.write_bytes(data[: int(len(data) * kept)])
        whole = [observed.Recorded.of(step, 1) for step in Replay(str(capture))]
        if kept < 0.1:
            with pytest.raises(KVCatchError):
                kvcatch.open(str(cut))
            return
        rows = [observed.Recorded.of(step, 1) for step in Replay(str(cut))]
        assert rows == whole[: len(rows)]
        opened = kvcatch.open(str(cut))
        assert any("byte" in warning for warning in opened.loss.warnings)
        opened.close()

    @pytest.mark.parametrize("suffix", ["kvring", "kvcap"])
    @pytest.mark.parametrize("seed", range(6))
    def test_flipped_bytes_never_crash_a_reader(
        self, survived: Callable[[str], Run], capture: Path, tmp_path: Path, suffix: str, seed: int
    ) -> None:
        rng = random.Random(seed)
        broken = tmp_path / f"x.core0.{suffix}"
        shutil.copy(survived("sampled").ring if suffix == "kvring" else capture, broken)
        with open(broken, "r+b") as file:
            size = broken.stat().st_size if suffix == "kvcap" else 600_000
            for _ in range(20):
                file.seek(rng.randrange(8, size))
                file.write(rng.randbytes(rng.choice([1, 4, 64])))
        try:
            opened = kvcatch.open(str(broken))
        except KVCatchError:
            return
        opened.snapshot()
        opened.requests()
        opened.samples()
        for _ in opened.events():
            pass
        opened.close()

    def test_foreign_and_newer_files_are_refused_by_name(self, capture: Path, tmp_path: Path) -> None:
        foreign = tmp_path / "notes.kvcap"
        foreign.write_text("shopping list")
        done = run_kvcatch("top", "--once", str(foreign))
        assert done.returncode == 2
        assert "notes.kvcap" in done.stderr


def run_drainer(ring: Path, output: Path, command: list[str] | None = None) -> tuple[int, str]:
    """Drain one dead ring into a file. Returns the exit status and what was said on stderr."""
    run_id = ring.name.split(".core")[0]
    line = [env.PYTHON, "-m", "kvcatch.store.drain", "--dir", str(ring.parent), "--run", run_id]
    process = subprocess.Popen(
        [*(command or []), *line, "-o", str(output)],
        env=env.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    # It names the file once it has it; then it waits for further engines until it is told to stop.
    assert process.stdout.readline().strip() == str(output)
    process.terminate()
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def test_a_capture_file_on_a_full_disk(survived: Callable[[str], Run], tmp_path: Path) -> None:
    disk, kept = tmp_path / "disk", tmp_path / "kept.kvcap"
    disk.mkdir()
    script = f"""mount -t tmpfs -o size=8k none {disk}
trap 'kill $child' TERM
"$@" & child=$!
wait $child; wait $child; status=$?
cp {disk}/x.kvcap {kept}
exit $status"""
    command = ["unshare", "-m" if os.geteuid() == 0 else "-rm", "sh", "-c", script, "sh"]
    status, said = run_drainer(survived("kill-0").ring, disk / "x.kvcap", command)
    assert status == 0, said
    assert "cannot write" in said
    assert "No space left on device" in said
    try:
        capture = kvcatch.open(str(kept))
    except KVCatchError:
        return
    capture.snapshot()
    capture.close()


def test_a_reader_far_behind_loses_records_and_says_so(tmp_path: Path, tiny_model: Path) -> None:
    case = cases(str(tiny_model))["wrapped"]
    process = modelfree.start_cases([case], tmp_path)
    run = Run(case, tmp_path / case.name)
    deadline_poll(lambda: run.rings, 600, "the ring")
    # Opened at the start, read again only when the engine has gone round the ring more than once.
    capture = kvcatch.open(str(run.ring))
    assert capture.loss.dropped_bytes == 0
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-2000:]
    capture.refresh()
    assert capture.loss.dropped_bytes > 0
    snapshot = capture.snapshot()
    assert snapshot.state == "ended"
    assert snapshot.preemption.preemptions == run.seen.preemptions
    assert snapshot.pool.active_blocks == 0
    assert snapshot.requests == ()
    capture.close()


def test_top_sees_the_newest_life_and_keeps_the_one_before(survived: Callable[[str], Run]) -> None:
    run = survived("kill-0")
    said = top_json(directory=str(run.folder / "rings"))
    assert said["state"] == "ended"
    assert said["step"] in {len(run.seen.updates), len(run.seen.updates) - 1, len(run.seen.updates) + 1}

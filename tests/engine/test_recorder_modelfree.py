"""The recorder on the real scheduler of five vLLM releases, without a model, against an independent observer.

Every comparison is with a brute-force walk of the scheduler's own state after every step (see the test plugin
``observer``), never with anything that the recorder computed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.support import modelfree, observed
from engine.support.cases import Run
from engine.support.modelfree import Case
from kvcatch.store.replay import Replay
from old_engines import RELEASES, release

#: layout, asynchronous, resumed requests reported the way of Model Runner V2
SHAPES = [
    ("full", False, False),
    ("full", True, True),
    ("sliding", True, False),
    ("alternating", False, True),
    ("alternating", True, False),
    ("chunked", False, False),
    ("mamba", True, True),
]


def shape_case(version: str, shape: tuple[str, bool, bool], model: Path) -> Case:
    layout, asynchronous, v2_runner = shape
    return Case(
        version=version,
        layout=layout,
        asynchronous=asynchronous,
        v2_runner=v2_runner,
        num_blocks=120 if layout == "sliding" else 400,
        requests=100,
        model=str(model),
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], dict[str, Run]]:
    """All shapes of one release, run once."""
    done: dict[str, dict[str, Run]] = {}

    def of(version: str) -> dict[str, Run]:
        if version not in done:
            folder = tmp_path_factory.mktemp(f"modelfree-{version}")
            cases = [shape_case(version, shape, tiny_model) for shape in SHAPES]
            statuses = modelfree.run_cases(cases, folder, release(version))
            errors = [(folder / name / "error.txt").read_text() for name, code in statuses.items() if code]
            assert not errors, errors[0]
            done[version] = {case.name: Run(case, folder / case.name) for case in cases}
        return done[version]

    return of


def shape_name(shape: tuple[str, bool, bool]) -> str:
    return f"{shape[0]}-{'async' if shape[1] else 'sync'}{'-v2' if shape[2] else ''}"


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_every_step_equals_a_walk_of_the_schedulers_state(
    runs: Callable[[str], dict[str, Run]], version: str, shape: tuple[str, bool, bool], tiny_model: Path
) -> None:
    run = runs(version)[shape_case(version, shape, tiny_model).name]
    seen = run.seen
    steps = []
    # A state block of a Mamba layer is not filled by tokens: what it "holds" is a matter of definition.
    comparison = observed.compare(
        seen, (steps.append(step) or step for step in Replay(str(run.ring))), shape[0] != "mamba"
    )

    assert not comparison.wrong, str(comparison)
    assert run.result["unfinished"] == 0
    assert run.result["scheduler"] == ("AsyncScheduler" if shape[1] else "Scheduler")
    last = steps[-1]
    assert last.preemptions == seen.preemptions == run.result["preemptions"]
    assert last.recomputed == seen.recomputed
    assert last.evicted_blocks == sum(row["evicted"] for row in seen.schedules)
    assert last.active_blocks == 0
    assert not last.blocks
    # The run must have exercised what it is for.
    assert seen.preemptions > 0
    assert seen.recomputed > 0
    assert last.evicted_blocks > 0
    assert run.result["aborted"] > 0
    bounds = {seen.bound(index) for index in range(len(seen.schedules))}
    assert {"none", "blocks"} <= bounds
    assert "unexplained" not in bounds


@pytest.mark.parametrize("version", RELEASES)
def test_the_log_says_where_the_recording_is(runs: Callable[[str], dict[str, Run]], version: str) -> None:
    for run in runs(version).values():
        assert f"recording to {run.ring}" in run.log
        assert "no capture" not in run.log

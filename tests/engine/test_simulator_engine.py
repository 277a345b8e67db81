"""From a recording of the real engine to what it does with other settings, against the real engine doing it.

``test_simulator_prediction`` asks the same of the scheduler alone; here the model runs and the memory is real.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.support.hardware import needs_fp8_cache
from engine.support.offline import Job, offline
from kvcatch.simulator.engine import EngineSettings, simulate_engine
from kvcatch.sources.captured import Measured, workload_of
from kvcatch.store.capture import ReplayCapture
from kvcatch.workload import Workload

pytestmark = pytest.mark.soak

BLOCKS, SIZE, SEQS, BUDGET, LENGTH = 61, 64, 16, 512, 640
BASE = {
    "block_size": SIZE, "num_gpu_blocks_override": BLOCKS, "max_num_seqs": SEQS, "max_num_batched_tokens": BUDGET,
    "max_model_len": LENGTH,
}  # fmt: skip
#: what is asked of the engine, and what is asked of the simulator
OTHERS: dict[str, tuple[dict[str, object], dict[str, float]]] = {
    "as it was": ({}, {}),
    "double the blocks": ({"num_gpu_blocks_override": 121}, {"num_blocks": 121}),
    "half the block size": (
        {"num_gpu_blocks_override": 121, "block_size": 32},
        {"num_blocks": 121, "block_size": 32},
    ),
    "fp8": ({"num_gpu_blocks_override": 121, "kv_cache_dtype": "fp8"}, {"num_blocks": 121}),
    "watermark": ({"watermark": 0.05}, {"watermark": 0.05}),
}


def served(folder: Path, model: Path, other: dict[str, object]) -> tuple[Workload, Measured]:
    job = Job(str(model), {**BASE, **other}, prompts=120, longest=400, tokens=60, seed=4)
    offline(folder, job)
    (ring,) = (folder / "rings").glob("*.core0.kvring")
    capture = ReplayCapture.open(str(ring))
    found = workload_of(capture)
    capture.close()
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Workload:
    """What was asked, as a recording tells it: two rounds, each there as a whole before its first step."""
    workload, measured = served(tmp_path_factory.mktemp("base"), tiny_model, {})
    assert workload.notes == ()
    assert measured.preemptions > 5
    assert measured.cached_tokens.sum() > 2000
    second = np.arange(len(workload)) >= len(workload) // 2
    return dataclasses.replace(workload, arrival_seconds=np.where(second, 1e6, 0.0))


@pytest.mark.parametrize(
    "other", [pytest.param(name, marks=needs_fp8_cache if name == "fp8" else ()) for name in OTHERS]
)
def test_other_settings_do_what_was_predicted(
    recorded: Workload, tiny_model: Path, tmp_path: Path, other: str
) -> None:
    asked, changed = OTHERS[other]
    _, measured = served(tmp_path, tiny_model, asked)
    settings = {"num_blocks": BLOCKS, "block_size": SIZE, **changed}
    predicted = simulate_engine(
        recorded,
        EngineSettings(max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, max_model_len=LENGTH, **settings),
    )
    hits = int(measured.cached_tokens.sum())
    print(other, hits, predicted.hit_tokens, measured.preemptions, predicted.preemptions, file=sys.stderr)
    assert predicted.hit_tokens == pytest.approx(hits, rel=0.01)
    assert predicted.preemptions == pytest.approx(measured.preemptions, rel=0.10, abs=1)

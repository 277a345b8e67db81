"""Faults of ours, injected into every process of a real engine: it goes on serving, and says once what is off."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvcatch
from engine.support import observed
from engine.support.offline import Job, offline
from kvcatch.store.replay import Replay

POOL = {"num_gpu_blocks_override": 64, "block_size": 32, "max_model_len": 1024, "max_num_seqs": 12}
FAULTS = {
    "a hook in the engine core": "kvcatch.capture.recorder:Recorder._after_update:60",
    "the plugin function in every process": "kvcatch.capture.plugin:check_version",
    "the sampling of a worker": "kvcatch.capture.worker:RankRecorder._write:3",
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_engine_goes_on(tmp_path: Path, tiny_model: Path, name: str) -> None:
    job = Job(str(tiny_model), POOL)
    said = offline(
        tmp_path,
        job,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        KVCATCH_TEST_FAULT=FAULTS[name],
        KVCATCH_MEMORY_INTERVAL="0.01",
    )
    assert said["outputs"] == [job.tokens] * job.prompts
    log = (tmp_path / "log.txt").read_text()
    assert "injected fault" in log
    cores = list((tmp_path / "rings").glob("*.core0.kvring"))
    if "plugin" in name:
        assert cores == []
        assert "capture could not be set up, the engine starts without it" in log
        return
    (seen,) = observed.read_all(tmp_path)
    if "worker" in name:
        # Only the memory record of the rank has stopped.
        assert log.count("memory record stopped") == 1
    else:
        assert log.count("a hook failed, capture is off") == 1
        capture = kvcatch.open(str(cores[0]))
        assert capture.loss.hook_errors == 1
        seen.updates = seen.updates[: (capture.snapshot().step or 0) - 1]
        assert len(seen.updates) >= 50
        capture.close()
    comparison = observed.compare(seen, Replay(str(cores[0])))
    assert not comparison.wrong, str(comparison)

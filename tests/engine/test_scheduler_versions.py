"""The plugin on other releases' real schedulers, sync and async."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.support import env
from engine.support.sched_modelfree import tiny_model
from old_engines import release


@pytest.mark.parametrize("version", ["0.24.0", "0.31.0", "0.33.0"])
def test_promises_hold_on_this_release(version: str, tmp_path: Path) -> None:
    folder = release(version)
    worker = Path(__file__).parent / "support" / "sched_versions.py"
    done = subprocess.run(
        [sys.executable, str(worker), tiny_model(tmp_path / "model")],
        env=env.environment(
            PYTHONPATH=os.pathsep.join([str(folder), str(env.ROOT / "tests")]),
            VLLM_PLUGINS="",
            VLLM_LOGGING_LEVEL="ERROR",
            KVCATCH_DIR=str(tmp_path),
        ),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["vllm"].startswith(version)
    assert answer["identical_below"]
    for row in answer["rows"]:
        assert row["in_charge"]
        assert row["pool_whole"]
        assert (row["lost"], row["twice"]) == (0, 0)
        assert row["preemptions"][0] > 0
        assert row["preemptions"][1] == 0
        assert row["short"][1] <= 0.35 * row["short"][0]
        assert row["long"][1] <= 1.10 * row["long"][0]
        assert row["steps"][1] <= 1.03 * row["steps"][0]

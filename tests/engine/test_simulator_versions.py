"""The fast engine beside the Scheduler of other vLLM releases, with their rules switched on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from engine.support import env
from old_engines import RELEASES, release

OTHERS = [version for version in RELEASES if not version.startswith("0.32")]
SEEDS = 6


@pytest.mark.parametrize("version", OTHERS)
def test_same_decisions_as_that_release(version, tmp_path):
    path = os.pathsep.join(map(str, (release(version), env.ROOT / "tests", env.ROOT / "src")))
    done = subprocess.run(
        [sys.executable, str(env.ROOT / "tests/engine/simulator_versions.py"), str(SEEDS), str(tmp_path)],
        env=env.environment(PYTHONPATH=path, VLLM_LOGGING_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["version"].startswith(version.split(".post")[0])
    assert answer["steps"] > 1000
    assert answer["preemptions"] > 10

"""The plugin in a real engine that computes: the same greedy tokens as stock, without its preemptions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.support import env
from engine.support.server import engine_lock

#: several engines in turn, many minutes on two cores
pytestmark = pytest.mark.soak


def generated(model: Path, mode: str, scheduler: str, folder: Path) -> dict[str, Any]:
    """What the worker prints."""
    worker = Path(__file__).parent / "support" / "sched_llm.py"
    paths = [str(env.ROOT / "tests"), str(env.ROOT / "tests" / "engine_plugins")]
    with engine_lock():
        done = subprocess.run(
            [sys.executable, str(worker), str(model), mode, scheduler],
            env=env.environment(
                PYTHONPATH=os.pathsep.join(paths), VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR",
                KVCATCH_DIR=str(folder), KVCATCH_TEST_ASYNC="1" if mode == "async" else None,
            ),
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.fixture(scope="module")
def stock(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return generated(tiny_model, "sync", "", tmp_path_factory.mktemp("stock"))


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("mode", "scheduler", "batches"), [("sync", "KVCatchScheduler", 1), ("async", "KVCatchAsyncScheduler", 2)]
)
def test_greedy_tokens_equal_stock_and_nothing_is_preempted(
    mode: str, scheduler: str, batches: int, stock: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    ours = generated(tiny_model, mode, f"kvcatch.control.scheduler.{scheduler}", tmp_path)
    assert stock["preemptions"] > 0
    assert ours["class"] == scheduler
    assert ours["batches"] == batches
    assert ("AsyncScheduler" in ours["bases"]) == (mode == "async")
    assert ours["in_charge"]
    assert ours["tokens"] == stock["tokens"]
    assert ours["preemptions"] == 0
    assert "backfilled" in ours["reasons"]
    assert ours["free"] == 40

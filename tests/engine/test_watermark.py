"""``watermark --drive`` against a real engine, and what the views then say of that engine."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.support.server import Server, server
from engine.support.top import top_json

BLOCKS = 96
POOL = ["--num-gpu-blocks-override", str(BLOCKS), "--block-size", "32", "--max-model-len", "1024"]
POOL += ["--max-num-seqs", "64", "--max-num-batched-tokens", "1024", "--enable-prompt-tokens-details"]


def drive(running: Server, state: Path, *more: str) -> dict[str, Any]:
    words = ["watermark", "--drive", running.url, "--prompt-tokens", "200", "--output-tokens", "150"]
    done = subprocess.run(
        [sys.executable, "-m", "kvcatch", *words, "--json", "--exit-zero", *more],
        capture_output=True, text=True, check=False, env=os.environ | {"KVCATCH_DIR": str(state)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.soak  # a ladder takes minutes on two cores, and a noisy one stores no line
def test_a_ladder_on_a_real_engine_is_taken_up_by_its_views(tmp_path: Path, tiny_model: Path) -> None:
    """What is measured depends on who else uses the machine; what is done with it does not."""
    state = tmp_path / "state"
    with server(tmp_path, tiny_model, *POOL, KVCATCH="1", KVCATCH_DIR=str(state)) as running:
        before = top_json(directory=str(state))["pool"]
        said = drive(running, state, "--per-level", "25")
        pages = running.get("/metrics")
        after = top_json(directory=str(state))["pool"]
    assert (before["watermark_utilization_ratio"], before["watermark_source"]) == (0.85, "assumed")
    assert len(said["levels"]) == 8
    demand = [level["committed_ratio_mean"] for level in said["levels"]]
    assert demand[-1] > demand[0]
    assert said["config"]["num_blocks"] == BLOCKS
    assert said["largest_request_ratio"] == pytest.approx(-(-300 // 32) / (BLOCKS - 1), abs=0.011)
    # The sender's ledger and the engine agree that the pool was passed: only then is something preempted.
    preempted = sum((level["preemptions_per_request"] or 0) > 0 for level in said["levels"])
    assert f'num_gpu_blocks="{BLOCKS}"' in pages
    assert not preempted or said["committed_range"][1] > 0.8
    if said["safe_utilization_ratio"] is None:
        assert said["verdict"] == "no knee in range" or said["warnings"]
        assert after["watermark_source"] == "assumed"
    else:
        stored = json.loads((state / "watermark.json").read_text())
        assert stored["safe_utilization_ratio"] == said["safe_utilization_ratio"]
        assert after["watermark_source"] == "measured"
        assert after["watermark_utilization_ratio"] == said["safe_utilization_ratio"]


@pytest.mark.soak
def test_five_ladders_agree(tmp_path: Path, tiny_model: Path) -> None:
    """On a machine that does nothing else."""
    knees = []
    with server(tmp_path, tiny_model, *POOL) as running:
        for seed in range(5):
            said = drive(running, tmp_path / "state", "--seed", str(seed))
            assert said["knee_committed_ratio"] is not None, said["warnings"]
            knees.append(said["knee_committed_ratio"]["value"])
    assert statistics.stdev(knees) <= 0.03, knees

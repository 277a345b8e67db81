"""A protected system prompt on a real engine, and what ``simulate`` promised from a recording without protection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.support import env
from engine.support.protected_llm import BLOCKS, ROUNDS, SHARED
from engine.support.server import engine_lock
from kvcatch.cli.main import main

FLOORS = "chat=0.4"


def served(model: Path, folder: Path, scheduler: str, **settings: str) -> dict[str, Any]:
    """What the worker prints."""
    worker = Path(__file__).parent / "support" / "protected_llm.py"
    with engine_lock():
        done = subprocess.run(
            [sys.executable, str(worker), str(model), scheduler],
            env=env.environment(
                PYTHONPATH=str(env.ROOT / "tests"), VLLM_PLUGINS="kvcatch", VLLM_LOGGING_LEVEL="ERROR",
                KVCATCH_DIR=str(folder), **settings,
            ),
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.mark.timeout(1300)
def test_a_protected_system_prompt_survives_and_wins_what_was_predicted(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = served(tiny_model, tmp_path, "", KVCATCH="1")
    ours = served(
        tiny_model, tmp_path / "ours", "kvcatch.control.scheduler.KVCatchScheduler", KVCATCH_PROTECT=FLOORS
    )
    assert stock["class"] == "Scheduler"
    assert ours["class"] == "KVCatchScheduler"
    assert ours["in_charge"]
    # Each round of the flood takes 24 x 11 blocks of 32 tokens, more than the 200 there are.
    assert stock["chat_hits"] == [0, SHARED, *[0] * ROUNDS]
    assert ours["chat_hits"] == [0, SHARED, *[SHARED] * ROUNDS]
    assert ours["flood_hits"] == stock["flood_hits"]
    # Nobody pays: the same greedy tokens, no preemption in either, the pool whole at the end.
    assert ours["tokens"] == stock["tokens"]
    assert stock["preemptions"] == ours["preemptions"] == 0
    assert stock["free"] == ours["free"] == BLOCKS

    (ring,) = tmp_path.glob("*.core0.kvring")
    capsys.readouterr()
    code = main(["simulate", str(ring), "--policy", "lru,floors", "--floors", FLOORS, "--json"])
    assert code == 0
    before, after = json.loads(capsys.readouterr().out)["results"]
    assert after["runs_on"] == "KVCatchScheduler with KVCATCH_PROTECT"
    hits = sum(stock["chat_hits"] + stock["flood_hits"]), sum(ours["chat_hits"] + ours["flood_hits"])
    assert before["hit_tokens"] == hits[0]
    assert after["hit_tokens"] == pytest.approx(hits[1], rel=0.02)

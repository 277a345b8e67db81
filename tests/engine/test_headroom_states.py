"""What ``/v1/headroom`` promises at 20 random states of a real engine: K more requests run undisturbed, K + 1 do not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.support import env, headroom_states
from engine.support.monitoring import serving
from engine.support.server import engine_lock
from engine.support.top import top_json

STATES = 20


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    """Every state with both outcomes, and what ``top`` said in the first three."""
    folder = tmp_path_factory.mktemp("headroom")
    rings = folder / "rings"
    rings.mkdir()
    found: list[dict[str, Any]] = []
    tops: list[int | None] = []
    with (
        engine_lock(),
        serving(folder, "live", KVCATCH_DIR=str(rings)) as url,
        open(folder / "log", "w") as log,
    ):
        process = subprocess.Popen(
            [env.PYTHON, headroom_states.__file__, str(tiny_model), url, str(STATES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=env.environment(KVCATCH="1", KVCATCH_DIR=str(rings)),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            for line in process.stdout:
                if line.startswith('{"asked"'):
                    prompt, output = json.loads(line)["asked"]["size"]
                    if len(tops) < 3:
                        size = f"{prompt}+{output}"
                        seen = top_json("--headroom", size, directory=str(rings))
                        tops.append(seen["headroom"]["requests"])
                    process.stdin.write("\n")
                    process.stdin.flush()
                elif line.startswith('{"state"'):
                    found.append(json.loads(line)["state"])
        finally:
            process.kill()
            code = process.wait()
    assert code in (0, -9), (folder / "log").read_text()[-4000:]
    assert len(found) == STATES, (folder / "log").read_text()[-4000:]
    for state, told in zip(found, tops, strict=False):
        state["top"] = told
    return found


def test_so_many_finish_without_preemption_and_without_waiting(states: list[dict[str, Any]]) -> None:
    assert [state["so many"] for state in states] == [[]] * STATES
    # The states differ, and so do the answers.
    assert len({(state["running"], state["requests"]) for state in states}) > 10


def test_one_more_meets_the_limit_in_nineteen_of_twenty(states: list[dict[str, Any]]) -> None:
    met = [bool(state["one more"]) for state in states]
    assert sum(met) >= 19, [state for state in states if not state["one more"]]


def test_the_limit_is_named(states: list[dict[str, Any]]) -> None:
    """Where the number of sequences binds, one more waits although blocks are free; elsewhere blocks run out."""
    limits = [state["limit"] for state in states]
    assert set(limits) == {"blocks", "max_num_seqs"}
    for state in states:
        if state["limit"] == "max_num_seqs":
            assert state["running"] + state["requests"] == headroom_states.SEQS
            assert state["one more"] == ["max_num_seqs"]
        elif state["one more"]:
            assert "max_num_seqs" not in state["one more"]


def test_top_shows_the_same_number(states: list[dict[str, Any]]) -> None:
    """Both count with requests that arrive a little later; that is never more than what fits this very step."""
    for state in states[:3]:
        assert state["top"] == state["careful"]
    assert all(state["careful"] <= state["requests"] for state in states)

"""The recorded lengths are what the releases answer today; and ``plan`` agrees on every shipped configuration."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.support import env
from kvcatch.errors import KVCatchError
from kvcatch.planner.lengths import lengths
from kvcatch.planner.shape import model_shape
from old_engines import release

pytestmark = pytest.mark.soak
PLAN = env.ROOT / "tests" / "data" / "plan"
#: these classes are vLLM's own and keep a length of their own beside what the file states
OWN_CLASS = {"hfdefault--step3p5", "stepfun-ai--Step-3.7-Flash", "stepfun-ai--Step-3.7-Flash-FP8"}


def asked(version: str, configs: Path, folder: Path) -> dict[str, Any]:
    target = folder / f"{version}.jsonl"
    paths = [str(env.ROOT / "tests")]
    if version != "0.32.0":
        paths.insert(0, str(release(version)))
    subprocess.run(
        [env.PYTHON, "-m", "engine.support.length_oracle", str(configs), str(target)],
        env=env.environment(PYTHONPATH=":".join(paths), VLLM_PLUGINS=""), check=True, capture_output=True,
        timeout=900,
    )  # fmt: skip
    rows = map(json.loads, target.read_text().splitlines())
    return {row["name"]: row["answer"] for row in rows}


@pytest.mark.parametrize("version", ["0.12.0.post2", "0.24.0", "0.31.0", "0.32.0", "0.33.0"])
def test_the_recorded_lengths(version: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (PLAN / "lengths.jsonl").read_text().splitlines()]
    answers = asked(version, PLAN / "lengths.jsonl", tmp_path)
    recorded = {row["name"]: row["answers"].get(version) for row in rows}
    assert {name: value if isinstance(value, int) else None for name, value in answers.items()} == recorded


def test_every_shipped_configuration(tmp_path: Path) -> None:
    answers = asked("0.32.0", PLAN / "model_configs.jsonl", tmp_path)
    compared = 0
    for line in (PLAN / "model_configs.jsonl").read_text().splitlines():
        row = json.loads(line)
        try:
            shape = model_shape(row["name"], row["config"])
        except KVCatchError:
            continue
        said = answers[row["name"]]
        # Where the file states nothing the engine assumes 2,048 and plan asks.
        if not isinstance(said, int) or shape.max_position_embeddings is None or row["name"] in OWN_CLASS:
            continue
        assert lengths(shape.max_position_embeddings, shape.text, shape.model_type, (0, 32)).start == said, (
            row["name"]
        )
        compared += 1
    assert compared >= 210

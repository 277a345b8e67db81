"""The longest sequence of a config: what five releases of vLLM answered for every kind of rope scaling."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_data import PLAN

from kvcatch.planner import plan
from kvcatch.planner.engine import parse_version
from kvcatch.planner.lengths import lengths
from kvcatch.planner.shape import model_shape

ROWS = [json.loads(line) for line in (PLAN / "lengths.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_engine_s_own_length_in_every_release(row: dict[str, Any]) -> None:
    shape = model_shape(row["name"], row["config"])
    ours = {
        version: lengths(
            shape.max_position_embeddings, shape.text, shape.model_type, parse_version(version)
        ).start
        for version in row["answers"]
    }
    assert ours == row["answers"]


def test_all_rope_types_are_there() -> None:
    kinds = {
        rope.get("rope_type", rope.get("type"))
        for row in ROWS
        for name in ("rope_scaling", "rope_parameters")
        if (rope := row["config"].get(name)) is not None
    }
    assert {"linear", "dynamic", "yarn", "deepseek_yarn", "llama3", "longrope", "mrope", "default"} <= kinds
    assert all(row["answers"]["0.32.0"] for row in ROWS)


def _config(name: str) -> dict[str, Any]:
    (row,) = [row for row in ROWS if row["name"] == name]
    config: dict[str, Any] = row["config"]
    return config


def test_a_plan_uses_it() -> None:
    # Gemma 3 states 131,072 with the factor of 8 in it; a LongRoPE model starts with what it was trained with.
    sizes = {"available_kv_bytes": 1 << 33, "advise": False}
    assert "131,072 tokens per request" in " ".join(plan(_config("gemma 3"), **sizes).log_lines)
    found = plan(_config("longrope"), **sizes)
    assert "4,096 tokens per request" in " ".join(found.log_lines)
    assert any("131,072" in text and "--max-model-len" in text for text in found.warnings)
    whole = plan(_config("longrope"), max_model_len=131072, **sizes)
    assert not any("refuses" in text for text in whole.warnings)


def test_yarn_counts_as_scaled_since_0_31() -> None:
    def beyond(version: str) -> bool:
        found = plan(
            _config("qwen2 windows yarn"), max_model_len=131072, engine_version=version,
            available_kv_bytes=1 << 33, advise=False,
        )  # fmt: skip
        return any("refuses" in text for text in found.warnings)

    assert not beyond("0.24.0")
    assert beyond("0.32.0")

"""``upgrade-check`` on real servers of vLLM 0.31 and 0.32, and on a new engine with half the blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.support.server import engine_lock, server
from old_engines import release

FLAGS = [
    "--block-size",
    "32",
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "16",
    "--max-num-batched-tokens",
    "512",
]
FLAGS += ["--enable-prompt-tokens-details"]
#: what a scheduler decides; latencies depend on who else uses the machine
DECIDED = ("kv_capacity_tokens", "hit_ratio", "prompt_tokens", "output_tokens")


def trace(path: Path, count: int = 100) -> Path:
    """Requests of five kinds with a shared head each, ten a second."""
    rows = [
        {"timestamp": 100 * n, "input_length": 160 + 7 * (n % 9), "output_length": 12 + n % 20, "tenant": f"t{n % 5}",
         "hash_ids": [n % 5, 10 + n % 5, *range(1000 + 10 * n, 1000 + 10 * n + 4 + (7 * (n % 9) > 0) + (7 * (n % 9) > 32))],
         "block_size": 32}
        for n in range(count)
    ]  # fmt: skip
    for row in rows:
        ids = row["hash_ids"]
        assert isinstance(ids, list)
        row["hash_ids"] = ids[: -(-int(row["input_length"]) // 32)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def check(source: Path, old: str, new: str, to: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "kvcatch", "upgrade-check", str(source), "--old", old, "--new", new, "-o", str(to), "--json", "--speed", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_half_the_blocks_are_a_regression_with_its_cause(tmp_path: Path, tiny_model: Path) -> None:
    with engine_lock(), ExitStack() as stack:
        urls = [
            stack.enter_context(
                server(tmp_path / str(blocks), tiny_model, "--num-gpu-blocks-override", str(blocks), *FLAGS, lock=False)
            ).url
            for blocks in (160, 80)
        ]  # fmt: skip
        code, said = check(trace(tmp_path / "trace.jsonl", 60), *urls, tmp_path / "out")
    assert code == 1
    assert said["paired"]
    verdicts = {row["name"]: row["verdict"] for row in said["metrics"]}
    assert verdicts["kv_capacity_tokens"] == "worse"
    cause = next(one["cause"] for one in said["findings"] if one["code"] == "KVC402")
    assert "num_gpu_blocks changed from 160 to 80" in cause
    assert "--num-gpu-blocks-override 160" in said["restore_flags"]
    assert [Path(path).name for path in said["results"]["old"]] == ["old-1.jsonl", "old-2.jsonl"]


@pytest.mark.soak
def test_031_against_032_is_equal_in_all_that_is_decided(tmp_path: Path, tiny_model: Path) -> None:
    pool = ["--num-gpu-blocks-override", "160", *FLAGS]
    old_code = {"PYTHONPATH": str(release("0.31.0", compiled=True))}
    with (
        engine_lock(),
        server(tmp_path / "old", tiny_model, *pool, lock=False, **old_code) as old,
        server(tmp_path / "new", tiny_model, *pool, lock=False) as new,
    ):
        assert json.loads(old.get("/version"))["version"].startswith("0.31.0")
        assert json.loads(new.get("/version"))["version"].startswith("0.32.0")
        _, said = check(trace(tmp_path / "trace.jsonl"), old.url, new.url, tmp_path / "out")
    assert said["paired"]
    verdicts = {row["name"]: row["verdict"] for row in said["metrics"]}
    assert {verdicts[name] for name in DECIDED} == {"equal"}
    # The release is the first thing that differs, whatever else the two say of their caches.
    assert said["drift"][0]["name"] == "engine_version"
    assert (said["drift"][0]["a"][:6], said["drift"][0]["b"][:6]) == ("0.31.0", "0.32.0")

"""The Python functions on a real engine: record, collect, open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvcatch
from engine.support import env
from engine.support.server import engine_lock

#: what a user would write; the block pool itself is the witness where it can be reached
SCRIPT = """
import json, sys
import kvcatch
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, path = sys.argv[1:3]
    with kvcatch.record(path):
        llm = LLM(model, enforce_eager=True, block_size=32, num_gpu_blocks_override=80, max_model_len=512)
        idle = kvcatch.collect(llm)
        llm.generate(["ab" * 60] * 3 + ["cd" * 40], SamplingParams(max_tokens=20, ignore_eos=True))
        after = kvcatch.collect(llm)
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    pool = core.scheduler.kv_cache_manager.block_pool if core is not None else None
    hashed = sum(b.block_hash is not None for b in pool.blocks) if pool is not None else None
    with open(sys.argv[3], "w") as seen:  # the engine prints to stdout as it likes
        json.dump([idle.to_dict(), after.to_dict(), hashed], seen)
"""


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_record_and_collect(tmp_path: Path, tiny_model: Path, multiprocessing: str) -> None:
    script, capture, seen = tmp_path / "offline.py", tmp_path / "out.kvcap", tmp_path / "seen.json"
    script.write_text(SCRIPT)
    with engine_lock():
        done = subprocess.run(
            [sys.executable, str(script), str(tiny_model), str(capture), str(seen)],
            env=env.environment(
                VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing, KVCATCH_DIR=str(tmp_path / "rings"),
                VLLM_PLUGINS="kvcatch",
            ),
            capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    idle, after, hashed = json.loads(seen.read_text())
    assert (idle["kv_total_blocks"], idle["kv_used_blocks"], idle["kv_free_blocks"]) == (79, 0, 79)
    assert idle["kv_utilization"] == 0
    assert after["kv_used_blocks"] == 0, "nothing runs any more"
    # 120 and 80 prompt tokens (one a character), 20 generated: the last token has no KV, so 139 and 99
    # positions fill 4 and 3 blocks of 32; the three equal prompts share their first three or more.
    assert after["kv_cached_blocks"] >= 4 + 3
    if hashed is not None:
        assert after["kv_cached_blocks"] == hashed
    recorded = kvcatch.open(str(capture))
    views = recorded.requests()
    assert [view.finish_reason for view in views] == ["length"] * 4
    assert [view.output_tokens for view in views] == [20] * 4
    snapshot = recorded.snapshot()
    assert snapshot.state == "ended"
    assert snapshot.pool.cached_blocks == after["kv_cached_blocks"]
    assert snapshot.requests == ()

"""Throughput with capture on, with vLLM's own KV events and residency metrics on, and with neither. JSON on stdout.

    .venv-engine/bin/python bench/throughput.py [--pairs 20]

One real engine in this process, 48 concurrent requests; what is measured is switched on and off between runs, in
ABBA order, so that a slow minute of the machine hits both sides of a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "", "KVCATCH_DIR": tempfile.mkdtemp(),
}  # fmt: skip
CONCURRENT, PROMPT, OUTPUT = 48, 100, 64


class Bench:
    """One engine and the switches."""

    def __init__(self) -> None:
        from hook_cost import model_folder
        from vllm import LLM
        from vllm.config.kv_events import KVEventsConfig

        from kvcatch.capture.options import Options
        from kvcatch.capture.plugin import start_recorder

        self.llm = LLM(
            str(model_folder()), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, block_size=32,
            num_gpu_blocks_override=400, max_model_len=1024, max_num_seqs=CONCURRENT, kv_cache_metrics=True,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://127.0.0.1:*"
            ),
        )  # fmt: skip
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.residency = self.pool.metrics_collector
        self.recorder = start_recorder(self.scheduler, Options({**os.environ, "KVCATCH": "1"}))
        assert self.recorder is not None
        self.recorder.detach()

    def run(self, mode: str, seed: int) -> tuple[float, float]:
        """(wall seconds, CPU seconds) of 48 requests in one mode: plain, capture or events."""
        from vllm import SamplingParams

        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": [rng.randrange(1000) for _ in range(PROMPT)]} for _ in range(CONCURRENT)
        ]
        self.llm.reset_prefix_cache()
        self.pool.enable_kv_cache_events = mode == "events"
        self.pool.metrics_collector = self.residency if mode == "events" else None
        if mode == "capture":
            self.recorder.attach()
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
        cpu, start = time.thread_time(), time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start, time.thread_time() - cpu
        if mode == "capture":
            assert self.recorder.active
            self.recorder.detach()
        return took


def pairs(bench: Bench, mode: str, count: int) -> dict[str, Any]:
    """Ratios plain time / mode time: 1 = no cost, 0.99 = one percent slower."""
    wall, cpu = [], []
    for number in range(count):
        order = ("plain", mode) if number % 2 == 0 else (mode, "plain")
        took = {name: bench.run(name, number) for name in order}
        wall.append(took["plain"][0] / took[mode][0])
        cpu.append(took["plain"][1] / took[mode][1])
    return {"mode": mode, "pairs": count, "wall": summary(wall), "cpu": summary(cpu)}


def summary(ratios: list[float]) -> dict[str, float]:
    """Median and a bootstrap 95 % interval of it."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {"median": statistics.median(ratios), "low": medians[50], "high": medians[-51]}


def sizes(bench: Bench) -> dict[str, float]:
    """Bytes of the recording as .kvcap, and as JSON lines of the same records."""
    import msgspec

    from kvcatch.store import layout as L
    from kvcatch.store.drain import CoreDrain
    from kvcatch.store.dump import event_dicts
    from kvcatch.store.feeds import open_feed

    path = str(Path(os.environ["KVCATCH_DIR"]) / "size.kvcap")
    drain = CoreDrain(
        bench.recorder.ring.path, path, b"bench", argparse.Namespace(rotate_bytes=0, rotate_seconds=0)
    )
    drain.finish()
    hashes = events = lines = 0
    for event in event_dicts(open_feed(path), 0):
        events += 1
        lines += len(msgspec.json.encode(event)) + 1
        if event["kind"] == L.KIND_NAMES[L.CHAIN]:
            hashes += len(event["hashes"])
    stored = os.path.getsize(path)
    return {
        "events": events, "hashes": hashes, "kvcap_bytes": stored, "json_bytes": lines,
        "bytes_per_event": (stored - 8 * hashes) / events,
    }  # fmt: skip


def main() -> None:
    """Warm up, then pairs of both modes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    count = parser.parse_args().pairs
    bench = Bench()
    for mode in ("plain", "capture", "events", "plain"):
        bench.run(mode, 1000)
    result = {mode: pairs(bench, mode, count) for mode in ("capture", "events")}
    result["size"] = sizes(bench)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Recordings of the embedded engine in two configurations, and what bench and metrics pages say of such runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcatch.capture.options import Options
from kvcatch.capture.recorder import Recorder
from kvcatch.capture.ring import RingWriter
from kvcatch.simulator.drive import VirtualClock, drive
from kvcatch.simulator.embedded import Scheduler
from kvcatch.workload import Workload, build

START = 1_764_439_200_000_000_000


def load(seed: int, *, count: int = 240, per_second: float = 6.0, prompt: int = 200, output: int = 60,
         shared: int = 0) -> Workload:  # fmt: skip
    """Poisson arrivals; prompts and outputs are uniform within a half of their mean; the first tokens are shared."""
    import random

    rng = random.Random(seed)
    now, rows = 0.0, []
    for number in range(count):
        now += rng.expovariate(per_second)
        own = max(1, int(prompt * rng.uniform(0.5, 1.5)))
        segments = ([(0, shared)] if shared else []) + [(number + 1, own)]
        rows.append(
            {
                "arrival": now,
                "tenant": f"team{number % 3}",
                "prompt": shared + own,
                "output": max(1, int(output * rng.uniform(0.5, 1.5))),
                "segments": segments,
            }
        )
    return build("made up", rows, grain=1)


def record(
    folder: Path,
    workload: Workload,
    *,
    blocks: int = 401,
    block_size: int = 16,
    max_num_seqs: int = 64,
    caching: bool = True,
    version: str = "0.32.0",
    speed: float = 1.0,
    watermark: float = 0.0,
) -> str:
    """Serve the workload with the recorder on; the path of the recording."""
    scheduler = Scheduler(
        blocks, block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048, enable_caching=caching,
        watermark=watermark,
    )  # fmt: skip
    clock = VirtualClock(1_000_000_000_000, START)
    path = folder / f"run{len(list(folder.iterdir()))}.kvring"
    info: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": version,
        "model": "made-up",
        "num_blocks": blocks,
        "block_size": block_size,
        "groups": [{"kind": "full", "layers": 4, "block_size": block_size}],
        "prefix_caching": caching,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": 2048,
        "watermark_free_ratio": watermark,
        "start_unix_ns": clock.start_unix_ns,
        "start_monotonic_ns": clock.start_monotonic_ns,
        "config": {
            "cache": {"block_size": block_size, "enable_prefix_caching": caching, "num_gpu_blocks": blocks},
            "scheduler": {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048},
        },
    }
    ring = RingWriter(str(path), 8 << 20, info)
    recorder = Recorder(
        scheduler, ring, [("full", block_size)], Options({"KVCATCH_DIR": str(folder)}),
        mono=clock.monotonic_ns, wall=clock.time_ns,
    )  # fmt: skip
    recorder.attach()
    try:
        drive(workload, scheduler, clock, speed=speed)
    finally:
        recorder.detach()
        ring.close()
    return str(path)

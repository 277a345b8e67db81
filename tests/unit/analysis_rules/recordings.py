"""Recordings of the embedded engine, which decides as vLLM's scheduler does, under chosen loads."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from kvcatch.capture.options import Options
from kvcatch.capture.recorder import Recorder
from kvcatch.capture.ring import RingWriter
from kvcatch.simulator.drive import VirtualClock, drive
from kvcatch.simulator.embedded import Scheduler
from kvcatch.workload import Workload, build

START = 1_764_439_200_000_000_000


def workload(rows: list[tuple[float, str, int, int]], shared: int = 0, alone: str = "") -> Workload:
    """Requests of (arrival seconds, tenant, prompt tokens, output tokens).

    ``shared`` leading tokens are equal, except in prompts of the tenant ``alone``.
    """
    made = []
    for number, (arrival, tenant, prompt, output) in enumerate(rows):
        head = min(shared, prompt) if tenant != alone else 0
        segments = [(0, head)] if head else []
        segments += [(number + 1, prompt - head)] if prompt > head else []
        made.append(
            {"arrival": arrival, "tenant": tenant, "prompt": prompt, "output": output, "segments": segments}
        )
    return build("made up", made, grain=1)


def steady(
    count: int, every: float, prompt: int = 200, output: int = 60, seed: int = 1, tenants: int = 3
) -> list[tuple[float, str, int, int]]:
    """Poisson arrivals of requests around one size."""
    rng = random.Random(seed)
    now, rows = 0.0, []
    for _ in range(count):
        now += rng.expovariate(1 / every)
        rows.append(
            (
                now,
                f"tenant{rng.randrange(tenants)}",
                max(1, int(prompt * rng.uniform(0.5, 1.5))),
                max(1, int(output * rng.uniform(0.5, 1.5))),
            )
        )
    return rows


def record(
    folder: Path,
    rows: list[tuple[float, str, int, int]],
    *,
    blocks: int = 401,
    block_size: int = 16,
    max_num_seqs: int = 64,
    budget: int = 2048,
    shared: int = 0,
    alone: str = "",
    **engine: Any,
) -> str:
    """Serve the rows with the recorder on; the path of the recording."""
    scheduler = Scheduler(
        blocks, block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **engine
    )
    clock = VirtualClock(1_000_000_000_000, START)
    path = folder / f"run{len(list(folder.iterdir()))}.kvring"
    ring = RingWriter(
        str(path),
        32 << 20,
        {
            "engine": "vllm",
            "engine_version": "0.32.0",
            "model": "made-up",
            "num_blocks": blocks,
            "block_size": block_size,
            "groups": [{"kind": "full", "layers": 4, "block_size": block_size}],
            "prefix_caching": True,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": budget,
            "start_unix_ns": clock.start_unix_ns,
            "start_monotonic_ns": clock.start_monotonic_ns,
        },
    )
    recorder = Recorder(
        scheduler, ring, [("full", block_size)], Options({"KVCATCH_DIR": str(folder)}),
        mono=clock.monotonic_ns, wall=clock.time_ns,
    )  # fmt: skip
    recorder.attach()
    try:
        drive(workload(sorted(rows), shared, alone), scheduler, clock)
    finally:
        recorder.detach()
        ring.close()
    return str(path)

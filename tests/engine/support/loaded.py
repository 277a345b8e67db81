"""One big load on a real server, recorded and observed: the evidence that several test files ask."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvcatch
from engine.support import observed
from engine.support.loads import tenants_load
from engine.support.processes import resident_bytes
from engine.support.server import Answer, ask_all, server
from engine.support.top import top_json
from kvcatch.results import RequestView
from kvcatch.store.replay import Replay, Step

REQUESTS, CONCURRENCY, LOOKS = 560, 64, 8
BLOCKS, BLOCK_SIZE = 80, 32
POOL = ["--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK_SIZE), "--max-model-len", "1024"]
LIMITS = ["--max-num-seqs", "14", "--max-num-batched-tokens", "512"]


@dataclass(frozen=True)
class Look:
    """What ``kvcatch top --once --json`` said, and the worker's memory in bytes before and after."""

    said: dict[str, Any]
    resident: tuple[int, int]


@dataclass(frozen=True)
class Loaded:
    """What a load left behind."""

    answers: list[Answer]
    looks: list[Look]
    metrics: str
    seen: observed.Observation
    steps: list[observed.Recorded]
    last: Step
    requests: list[RequestView]
    ring: Path
    log: str


def load_a_server(folder: Path, model: Path, mode: str) -> Loaded:
    rings = folder / "rings"
    looks: list[Look] = []
    answered = threading.Event()

    def look() -> None:
        while len(looks) < LOOKS and not answered.is_set():
            (worker,) = running.pids("Worker")
            before = resident_bytes(worker)
            said = top_json(directory=str(rings))
            looks.append(Look(said, (before, resident_bytes(worker))))

    with server(
        folder,
        model,
        *POOL,
        *LIMITS,
        "--enable-prompt-tokens-details",
        KVCATCH="1",
        KVCATCH_DIR=str(rings),
        KVCATCH_TEST_OBSERVER=str(folder),
        KVCATCH_TEST_ASYNC="1" if mode == "async" else None,
    ) as running:
        running.complete("warm up", 2)
        looker = threading.Thread(target=look)
        looker.start()
        answers = ask_all(running.url, tenants_load(REQUESTS), CONCURRENCY)
        answered.set()
        looker.join()
        metrics = running.get("/metrics")
        log = running.text
    (ring,) = rings.glob("*.core0.kvring")
    (seen,) = observed.read_all(folder)
    last: Step | None = None
    rows = []
    for step in Replay(str(ring)):
        last = step
        rows.append(observed.Recorded.of(step, len(seen.info["block_sizes"])))
    assert last is not None
    capture = kvcatch.open(str(ring))
    requests = capture.requests()
    capture.close()
    return Loaded(answers, looks, metrics, seen, rows, last, requests, ring, log)

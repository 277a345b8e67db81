"""Reading and judging a long capture: a million steps with five million events, by ``kvcatch doctor``.

    python bench/analyse.py [--steps N]

Writes a synthetic capture, runs the verb on it as a process of its own (prefix chains included) and prints one JSON
document with wall time, CPU time and peak memory; the peer is the state machine of ``kvcatch top`` replaying a tenth
of the same records, times ten. Exits 1 when a budget is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvcatch.store import layout as L
from kvcatch.store.capture import ReplayCapture
from kvcatch.store.kvcap import KvcapWriter

BUDGET_SECONDS, BUDGET_BYTES = 10.0, 1 << 30
START_MONO, START_UNIX = 10**12, 1_764_439_200 * 10**9
NEW_EVERY, LIVE, BLOCKS_EACH = 20, 40, 50
LOW = 0xFFFFFFFF


class Writer:
    """Records of a steady load: every 20th step one request of 800 tokens comes, 40 run."""

    def __init__(self, path: str) -> None:
        self.file = KvcapWriter(path)
        self.file.info(
            0,
            {
                "engine": "vllm", "engine_version": "0.32.0", "num_blocks": 20_001, "block_size": 16,
                "start_unix_ns": START_UNIX, "start_monotonic_ns": START_MONO, "prefix_caching": True,
                "max_num_seqs": 64, "groups": [{"kind": "full", "layers": 4, "block_size": 16}],
            },
        )  # fmt: skip
        self.words: list[int] = []
        self.events = self.requests = self.nodes = 0
        self.live: list[list[int]] = []

    def add(self, kind: int, *body: int) -> None:
        self.words.append(kind | (len(body) + 1) << 16)
        self.words.extend(body)
        self.events += 1

    def step(self, number: int) -> None:
        now = START_MONO + number * 20_000_000
        clock = (now & LOW, now >> 32)
        new = number % NEW_EVERY == 0
        if new:
            self._arrive(clock)
        if len(self.live) > LIVE:
            rid, _ = self.live.pop(0)
            self.add(L.FINISH, rid, 2, 200, 1000, 0, 0, *clock)
        for turn in range(2):
            holder = self.live[(2 * number + turn) % len(self.live)]
            self.add(L.BLOCKS, holder[0], 60 + turn)
            holder[1] += 1
        self.add(L.TOKENS, self.live[-1][0], 16 | L.DONE)
        self.add(L.EVICT, 77)
        self.add(L.SCHEDULED, 40, 40, *clock)
        active = sum(count for _, count in self.live)
        self.add(
            L.SAMPLE, number + 1, *clock, 400_000, 18_000_000, 20_000_000, LIVE, 0, 0, 0, active, 3000,
            17_000 - active, active * 15, 16, 24, 800 if new else 0, 0, 1, 0, 0, 0, active, LIVE, 0, 18_000_000, 1, 0, 1,
        )  # fmt: skip
        if len(self.words) > 60_000:
            self.flush()

    def _arrive(self, clock: tuple[int, int]) -> None:
        self.requests += 1
        rid = self.requests
        name = json.dumps([f"cmpl-r{rid}-0-{rid:08x}", {"tenant": f"t{rid % 5}"}])
        text = np.frombuffer(L.text_bytes(name.encode()), dtype="<u4").tolist()
        self.add(L.ARRIVE, rid, *clock, *clock, 800, 200, 0, BLOCKS_EACH, 0, 0, 0, 0, *text)
        if self.nodes + BLOCKS_EACH > 1 << 17:
            self.add(L.EPOCH)
            self.nodes = 0
        hashes = [part for index in range(BLOCKS_EACH) for part in (index * 2_654_435_761 & LOW, rid)]
        self.add(L.CHAIN, rid, 0, 0, *hashes)
        self.nodes += BLOCKS_EACH
        self.add(L.NEW, rid, 0, 800)
        self.add(L.BLOCKS, rid, *range(1, BLOCKS_EACH + 1))
        self.add(L.FIRST, rid, *clock)
        self.live.append([rid, BLOCKS_EACH])

    def flush(self) -> None:
        self.file.records(0, np.array(self.words, dtype=np.uint32))
        self.words.clear()

    def close(self) -> int:
        self.flush()
        self.file.close({})
        return self.events


def write(path: str, steps: int) -> int:
    """A capture of so many steps; the number of its records."""
    writer = Writer(path)
    for number in range(steps):
        writer.step(number)
    return writer.close()


def main() -> int:
    """Write, measure, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="kvcatch-bench-") as folder:
        path, small = str(Path(folder) / "long.kvcap"), str(Path(folder) / "short.kvcap")
        records = write(path, steps)
        write(small, steps // 10)
        before, started = os.times(), time.perf_counter()
        command = [sys.executable, "-m", "kvcatch", "doctor", path, "--exit-zero", "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        wall = time.perf_counter() - started
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        started = time.process_time()
        ReplayCapture.open(small)
        replay = 10 * (time.process_time() - started)
        size = os.path.getsize(path)
    met = wall <= BUDGET_SECONDS and peak <= BUDGET_BYTES
    print(
        json.dumps(
            {
                "what": "read + analyse", "samples": steps, "events": records - steps, "file_bytes": size,
                "findings": [one["code"] for one in json.loads(done.stdout)["findings"]],
                "wall_seconds": round(wall, 2), "cpu_seconds": round(cpu, 2), "peak_bytes": peak,
                "replay_cpu_seconds": round(replay, 1), "budget_seconds": BUDGET_SECONDS,
                "budget_bytes": BUDGET_BYTES, "met": met,
            }
        )
    )  # fmt: skip
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

"""Every metric that a person asks for, as ``kvcatch top --once --json`` tells it of a loaded server.

One case a metric; the expected value comes from the observer inside the engine, from /proc or from arithmetic on the
model's shape, never from our own code. The engine runs one batch at a time here, so that a look at step n has
seen exactly the first n schedules.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from engine.support.loaded import BLOCK_SIZE, BLOCKS, Loaded, Look
from engine.support.observed import Observation, Row

#: 2 (K and V) x 4 layers x 2 KV heads x 32 per head x 2 bytes (bfloat16) x 32 tokens x 80 blocks
KV_BYTES = 2 * 4 * 2 * 32 * 2 * BLOCK_SIZE * BLOCKS
assert KV_BYTES == 2_621_440


class Truth:
    """What the observer knows at the step of one look."""

    def __init__(self, seen: Observation, look: Look) -> None:
        self.step: int = look.said["step"]
        self.look = look
        self.row: Row = seen.updates[self.step - 1]
        self.schedules = seen.schedules[: self.step]
        window = float(look.said["latency"]["window_seconds"])
        # The window ends when top read the clock: shortly after the row.
        self.recent = [row for row in seen.updates[: self.step] if row["ns"] > self.row["ns"] - window * 1e9]

    def total(self, name: str) -> int:
        return sum(row[name] if isinstance(row[name], int) else len(row[name]) for row in self.schedules)

    @property
    def span(self) -> float:
        return (self.recent[-1]["ns"] - self.recent[0]["ns"]) / 1e9


def memory_total(truth: Truth) -> Any:
    with open("/proc/meminfo") as file:
        return int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024


def memory_used(truth: Truth) -> Any:
    return pytest.approx(statistics.mean(truth.look.resident), rel=0.05)


def hit_ratio(truth: Truth) -> Any:
    lookups = [pair for row in truth.schedules for pair in row["new"].values()]
    return pytest.approx(sum(hit for hit, _ in lookups) / sum(asked for _, asked in lookups))


def utilization(truth: Truth) -> float:
    return float(truth.row["held"] / (truth.row["referenced"] * BLOCK_SIZE))


def by_request(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda said: {view["engine_request_id"]: view[name] for view in said["requests"]}


def at(path: str) -> Callable[[dict[str, Any]], Any]:
    def read(said: dict[str, Any]) -> Any:
        value: Any = said
        for name in path.split("."):
            value = value[int(name)] if name.isdigit() else value[name]
        return value

    return read


def owned(truth: Truth) -> dict[str, int]:
    return {
        request: sum(count for count, _ in truth.row["owners"].get(request, ()))
        for request in truth.row["requests"]
    }


def output_rate(truth: Truth) -> Any:
    tokens = sum(
        after["requests"].get(request, [0, before["requests"][request][1]])[1]
        - before["requests"][request][1]
        for before, after in zip(truth.recent, truth.recent[1:], strict=False)
        for request in before["running"]
    )
    tokens += sum(len(row["done"]) for row in truth.recent)
    return pytest.approx(tokens / truth.span, rel=0.15)


CASES: dict[str, tuple[Callable[[dict[str, Any]], Any], Callable[[Truth], Any]]] = {
    "total memory": (at("ranks.0.memory_total_bytes"), memory_total),
    "used memory": (at("ranks.0.memory_used_bytes"), memory_used),
    "memory of the KV cache": (at("ranks.0.kv_cache_bytes"), lambda truth: KV_BYTES),
    "usable blocks": (at("pool.num_blocks"), lambda truth: BLOCKS - 1),
    "active blocks": (at("pool.active_blocks"), lambda truth: truth.row["referenced"]),
    "free blocks that nothing is cached in": (at("pool.free_blocks"), lambda truth: truth.row["neither"]),
    "blocks left for new requests": (
        lambda said: said["pool"]["free_blocks"] + said["pool"]["cached_blocks"],
        lambda truth: truth.row["free"],
    ),
    "most active blocks": (
        at("pool.active_blocks_max"),
        lambda truth: max(row["referenced"] for row in truth.recent),
    ),
    "blocks of each request": (by_request("num_blocks"), owned),
    "sequence length of each request": (
        by_request("num_tokens"),
        lambda truth: {request: row[1] for request, row in truth.row["requests"].items()},
    ),
    "running requests": (at("queues.running"), lambda truth: len(truth.row["running"])),
    "waiting requests": (
        lambda said: said["queues"]["waiting_for_blocks"] + said["queues"]["waiting_other"],
        lambda truth: len(truth.row["waiting"]),
    ),
    "waiting for blocks": (
        at("queues.waiting_for_blocks"),
        lambda truth: (
            len(truth.row["waiting"])
            if truth.schedules[-1]["refused"] or truth.schedules[-1]["preempted"]
            else 0
        ),
    ),
    "prefix hit ratio": (at("prefix.hit_ratio"), hit_ratio),
    "prefix hit tokens": (
        at("prefix.hit_tokens"),
        lambda truth: sum(hit for row in truth.schedules for hit, _ in row["new"].values()),
    ),
    "preemptions": (at("preemption.preemptions"), lambda truth: truth.total("preempted")),
    "recomputations": (at("preemption.recomputes"), lambda truth: truth.total("resumed")),
    "recomputed tokens": (at("preemption.recomputed_tokens"), lambda truth: truth.total("again")),
    "block utilization": (
        at("efficiency.block_utilization_ratio"),
        lambda truth: pytest.approx(utilization(truth)),
    ),
    "internal fragmentation": (
        at("efficiency.internal_fragmentation_ratio"),
        lambda truth: pytest.approx(1 - utilization(truth)),
    ),
    "time to first token": (
        at("latency.ttft_seconds"),
        lambda truth: pytest.approx(
            statistics.mean(seconds for row in truth.recent for seconds in row["first"].values()), rel=0.1
        ),
    ),
    "time per output token": (
        at("latency.tpot_seconds"),
        lambda truth: pytest.approx(
            statistics.mean(
                each for row in truth.recent for tokens, each in row["done"].values() if tokens > 1
            ),
            rel=0.1,
        ),
    ),
    "throughput": (at("latency.output_tokens_per_second"), output_rate),
}


def busy(run: Loaded) -> list[Look]:
    """Looks while requests were running, at a step that the observer saw."""
    return [look for look in run.looks if look.said["step"] and look.said["queues"]["running"]]


@pytest.mark.parametrize("name", CASES)
def test_top_tells_every_metric_of_a_loaded_engine(loaded: Callable[[str], Loaded], name: str) -> None:
    run = loaded("sync")
    looks = busy(run)
    assert len(looks) >= 3
    said, expected = CASES[name]
    # The first looks can come before anything has finished: times per token exist later.
    for look in looks[1:]:
        assert said(look.said) == expected(Truth(run.seen, look)), f"step {look.said['step']}"

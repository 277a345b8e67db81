"""Reading what the independent observer wrote, and comparing a recorder's reconstruction with it step by step."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]


class Step(Protocol):
    """What a replay tells after one recorded step."""

    step: int
    active_blocks: int
    cached_blocks: int
    free_blocks: int
    held_tokens: int
    bound: str
    preemptions: int
    recomputed: int
    evicted_blocks: int

    @property
    def running(self) -> set[str]: ...
    @property
    def waiting(self) -> set[str]: ...
    @property
    def blocks(self) -> dict[str, list[list[int]]]: ...
    @property
    def computed_tokens(self) -> dict[str, int]: ...


@dataclass
class Observation:
    """Everything the observer of one engine core wrote."""

    info: Row
    schedules: list[Row]
    updates: list[Row]

    @property
    def preemptions(self) -> int:
        return sum(len(row["preempted"]) for row in self.schedules)

    @property
    def recomputed(self) -> int:
        return sum(row["again"] for row in self.schedules)

    def bound(self, step: int) -> str:
        """Which limit bound a step, judged from refusals and preemptions that were seen to happen."""
        row = self.schedules[step]
        if row["refused"] or row["preempted"]:
            return "blocks"
        if row["waiting"] == 0:
            return "none"
        if row["waiting"] <= row["deferred"]:
            return "deferred"
        if sum(row["tokens"].values()) >= self.info["max_tokens"]:
            return "token_budget"
        if row["running"] >= self.info["max_running"]:
            return "max_num_seqs"
        return "unexplained"


def read(path: Path) -> Observation:
    """One observer file; a last line cut off by a kill is left out."""
    rows = []
    for line in path.read_text().split("\n")[:-1]:
        rows.append(json.loads(line))
    return Observation(
        rows[0], [row for row in rows if row["k"] == "s"], [row for row in rows if row["k"] == "u"]
    )


def read_all(folder: Path) -> list[Observation]:
    """All observers of a folder, by data-parallel rank."""
    found = [read(path) for path in sorted(folder.glob("observer-*.jsonl"))]
    return sorted(found, key=lambda seen: seen.info["dp_rank"])


def checksum(block_ids: Iterable[int]) -> int:
    """CRC-32 of block numbers as 32-bit words, as the observer writes it."""
    return zlib.crc32(array("I", block_ids).tobytes())


@dataclass
class Comparison:
    """How often each quantity differed, with the first few differences in words."""

    steps: int = 0
    wrong: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    wrong_steps: set[int] = field(default_factory=set)

    def check(self, step: int, name: str, ours: object, theirs: object) -> None:
        if ours == theirs:
            return
        self.wrong[name] = self.wrong.get(name, 0) + 1
        self.wrong_steps.add(step)
        if self.wrong[name] <= 3:
            self.examples.append(f"step {step}: {name}: recorded {ours!r}, observed {theirs!r}")

    def __str__(self) -> str:
        head = f"{len(self.wrong_steps)} of {self.steps} steps differ: {self.wrong}"
        return "\n".join([head, *self.examples])


@dataclass(frozen=True)
class Recorded:
    """One recorded row, taken out of the replay that goes on changing."""

    step: int
    active: int
    cached: int
    free: int
    held: int
    bound: str
    running: set[str]
    waiting: set[str]
    owners: dict[str, list[list[int]]]
    computed: dict[str, int]

    @classmethod
    def of(cls, step: Step, groups: int) -> Recorded:
        owners = {
            request: [[len(ids), checksum(ids)] for ids in padded(lists, groups)]
            for request, lists in step.blocks.items()
        }
        return cls(
            step.step,
            step.active_blocks,
            step.cached_blocks,
            step.free_blocks,
            step.held_tokens,
            step.bound,
            step.running,
            step.waiting,
            owners,
            step.computed_tokens,
        )


def differences(row: Recorded, update: Row, held_tokens: bool) -> list[tuple[str, object, object]]:
    """(quantity, recorded, observed) wherever a recorded row and an observed update disagree."""
    pairs: list[tuple[str, object, object]] = [
        ("active", row.active, update["referenced"]),
        ("cached", row.cached, update["hashed"]),
        ("free", row.free, update["neither"]),
        ("running", row.running, set(update["running"])),
        ("waiting", row.waiting, set(update["waiting"])),
        ("requests with blocks", set(row.owners), set(update["owners"])),
    ]
    for request, groups in update["owners"].items():
        pairs.append(("blocks of a request", row.owners.get(request), groups))
    for request in update["running"]:
        pairs.append(("computed tokens", row.computed.get(request), update["requests"][request][0]))
    if held_tokens:
        pairs.append(("held tokens", row.held, update["held"]))
    return [pair for pair in pairs if pair[1] != pair[2]]


def compare(seen: Observation, steps: Iterable[Step], held_tokens: bool = True) -> Comparison:
    """``compare_rows`` over a replay."""
    groups = len(seen.info["block_sizes"])
    return compare_rows(seen, (Recorded.of(step, groups) for step in steps), held_tokens)


def compare_rows(seen: Observation, recorded: Iterable[Recorded], held_tokens: bool = True) -> Comparison:
    """Every observed update against the row that was recorded for it (steps count updates from 1).

    An update that had nothing to do needs no row of its own: then the row before must still be true. If the next
    batch was already scheduled by then (a bubble of a pipeline), the state belongs to that batch's row, and there is
    nothing to compare. Requests that are aborted between two updates give a further row under the number of the
    update before.
    """
    result = Comparison()
    rows = iter(recorded)
    ahead = next(rows, None)
    before: Recorded | None = None
    for update in seen.updates:
        number = update["n"] + 1
        tokens = seen.schedules[update["n"]]["tokens"]
        own: Recorded | None = None
        last = before
        while ahead is not None and ahead.step <= number:
            last = ahead
            if ahead.step == number and own is None:
                own = last
            ahead = next(rows, None)
        later = seen.schedules[number]["ns"] if number < len(seen.schedules) else None
        if own is None and not tokens and later is not None and later < update["ns"]:
            before = last
            continue
        result.steps += 1
        candidates = [own] if tokens else [own, before]
        found = [differences(row, update, held_tokens) for row in candidates if row is not None]
        if not found:
            result.check(number, "row", None, "an update")
        elif all(found):
            for name, ours, theirs in found[0]:
                result.check(number, name, ours, theirs)
        if own is not None and tokens:
            result.check(number, "bound", own.bound, seen.bound(update["n"]))
        before = last
    return result


def padded(groups: list[list[int]], count: int) -> list[list[int]]:
    """Group lists filled up with empty ones: a replay may leave out groups that hold nothing."""
    return groups + [[]] * (count - len(groups))

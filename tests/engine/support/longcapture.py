"""A recording of minutes as the beginning of a capture of many hours: what follows is a made-up calm load."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt

from kvcatch.store import layout as L
from kvcatch.store.columns import record_starts
from kvcatch.store.feeds import open_feed
from kvcatch.store.kvcap import KvcapWriter

Words = npt.NDArray[np.uint32]

#: one request each cycle: it comes, is prefilled, decodes and ends, and nothing ever waits
STEPS, STEP_NS = 20, 100_000_000
#: numbers of made-up requests start here, far above those of any recording
FIRST_RID = 1 << 24
_CYCLES_AT_ONCE = 2000


def lengthen(source: str, target: str, hours: float) -> int:
    """Write ``source`` and then ``hours`` of calm load as one ``.kvcap``. Returns the steps that were added."""
    feed = open_feed(source)
    writer = KvcapWriter(target)
    writer.info(0, feed.core_info())
    last = tail = np.zeros(0, np.uint32)
    for rank, words, _ in feed.raw(1 << 20):
        if rank or not len(words):
            continue
        words = np.concatenate([tail, words])
        starts, used, _ = record_starts(words)
        tail = words[used:]
        writer.records(0, words[:used])
        rows = starts[(words[starts] & 0xFF) == L.SAMPLE]
        if len(rows):
            last = words[rows[-1] + 1 : rows[-1] + 1 + len(L.ROW)].copy()
    feed.close()
    row = dict(zip(L.ROW, last.tolist(), strict=True))
    cycles = int(hours * 3600e9 / (STEPS * STEP_NS))
    template, rids, times, steps = _cycle(row["active_blocks"] + row["cached_blocks"] + row["free_blocks"])
    began = (row["mono_lo"] | row["mono_hi"] << 32) + STEP_NS
    for first in range(0, cycles, _CYCLES_AT_ONCE):
        number = np.arange(first, min(cycles, first + _CYCLES_AT_ONCE), dtype=np.uint64)[:, None]
        table = np.repeat(template[None, :], len(number), axis=0)
        table[:, rids] = (FIRST_RID + number).astype(np.uint32)
        table[:, steps] += (row["step"] + number * STEPS).astype(np.uint32)
        low = template[times].astype(np.uint64) + began + number * np.uint64(STEPS * STEP_NS)
        table[:, times], table[:, times + 1] = low & np.uint64(L.UNKNOWN), low >> np.uint64(32)
        writer.records(0, table.reshape(-1))
    writer.close({})
    return cycles * STEPS


def _cycle(usable: int) -> tuple[Words, npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The words of one cycle from time 0, and the places of its request numbers, times (low words) and steps."""
    words: list[int] = []
    rids: list[int] = []
    times: list[int] = []
    steps: list[int] = []

    def add(kind: int, *body: int | str | tuple[int]) -> None:
        words.append(kind | (len(body) + 1 + sum(isinstance(part, tuple) for part in body)) << 16)
        for part in body:
            if isinstance(part, tuple):
                times.append(len(words))
                words.extend((part[0], 0))
            elif isinstance(part, str):
                rids.append(len(words))
                words.append(0)
            else:
                words.append(part)

    name = json.dumps(["cmpl-calm-0-00000000", {"tenant": "calm"}]).encode()
    text = np.frombuffer(L.text_bytes(name), "<u4").tolist()
    add(L.ARRIVE, "rid", (0,), (0,), 90, 18, 0, L.UNKNOWN, 0, 0, 0, 0, *text)
    for step in range(STEPS):
        now = step * STEP_NS
        if step == 0:
            add(L.NEW, "rid", 0, 90)
            add(L.BLOCKS, "rid", 1, 2, 3, 4)
            add(L.TOKENS, "rid", 90 | L.DONE)
        elif step == STEPS - 1:
            add(L.FINISH, "rid", 2, 18, 108, 0, 0, (now,))
        running = int(step < STEPS - 1)
        add(L.SCHEDULED, 90 if step == 0 else running, running, (now,))
        if step == 0:
            add(L.FIRST, "rid", (now + STEP_NS // 2,))
        steps.append(len(words) + 1)
        active = 4 * running
        add(
            L.SAMPLE, step + 1, (now + STEP_NS // 2,), 400_000, STEP_NS // 2, STEP_NS, running, 0, 0, 0, active,
            usable - active, 0, 90 + step if running else 0, 90 if step == 0 else 0, running, 90 if step == 0 else 0,
            0, 0, 0, 0, 0, active, running, 0, STEP_NS // 2, 1, 0, int(step == 0),
        )  # fmt: skip
    return (
        np.array(words, np.uint32), np.array(rids, np.int64), np.array(times, np.int64), np.array(steps, np.int64),
    )  # fmt: skip

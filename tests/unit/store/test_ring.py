"""Ring files: wrapping, slow readers, liveness, damage."""

from __future__ import annotations

import signal
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from kvcatch.capture.ring import RingWriter
from kvcatch.errors import KVCatchError
from kvcatch.store import layout as L
from kvcatch.store.feeds import JUMP, RingFeed
from kvcatch.store.ring import RingReader, is_locked

SMALL = 4 * L.SEGMENT_WORDS * 4


def write(ring: RingWriter, count: int, first: int = 0) -> None:
    """Records that carry a running number."""
    for number in range(first, first + count):
        record = [L.NEW | 4 << 16, number, 0, 0]
        if ring.room() < len(record):
            ring.pad(0, 0)
            ring.append(L.segment_record(0, 0, 0), 0, 0)
        ring.append(array("I", record).tobytes(), number, number)


def numbers(feed: RingFeed) -> list[int | None]:
    """The running numbers; None where records were lost."""
    return [
        None if kind == JUMP else payload[0]
        for _, kind, _, payload in feed.records()
        if kind in (JUMP, L.NEW)
    ]


def test_a_reader_that_keeps_up_loses_nothing(tmp_path: Path) -> None:
    ring = RingWriter(str(tmp_path / "a.core0.kvring"), SMALL, {})
    feed = RingFeed(ring.path)
    got: list[int | None] = []
    for start in range(0, 300_000, 10_000):
        write(ring, 10_000, start)
        got += numbers(feed)
    assert ring.head > 4 * ring.words, "wrapped several times"
    assert got == list(range(300_000))
    assert feed.loss()["dropped_bytes"] == 0


def test_a_slow_reader_counts_its_loss_and_goes_on(tmp_path: Path) -> None:
    ring = RingWriter(str(tmp_path / "a.core0.kvring"), SMALL, {})
    feed = RingFeed(ring.path)
    write(ring, 1000)
    assert numbers(feed) == list(range(1000))
    before = feed.ring.position
    write(ring, 200_000, 1000)
    got = numbers(feed)
    assert got[0] is None
    rest = got[1:]
    assert rest == list(range(201_000 - len(rest), 201_000)), "a whole tail, up to the newest record"
    assert feed.loss()["dropped_bytes"] == 4 * (feed.ring.oldest(ring.head) - before)


def test_liveness_is_the_lock_not_the_pid(tmp_path: Path) -> None:
    path = tmp_path / "a.core0.kvring"
    code = (
        "import sys; from kvcatch.capture.ring import RingWriter; r = RingWriter(sys.argv[1], 1, {}); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert is_locked(str(path))
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not is_locked(str(path))
    assert RingReader(str(path)).state == "recording", "a killed writer could not say good-bye"


def test_a_closed_ring_says_so(tmp_path: Path) -> None:
    ring = RingWriter(str(tmp_path / "a.core0.kvring"), SMALL, {"model": "m"})
    ring.close()
    ring.close()
    reader = RingReader(ring.path)
    assert reader.state == "closed"
    assert reader.info()["model"] == "m"


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    RingWriter(str(tmp_path / "a.core0.kvring"), SMALL, {})
    with pytest.raises(OSError):
        RingWriter(str(tmp_path / "a.core0.kvring"), SMALL, {})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:100], "only 100 bytes"),
        (lambda data: b"not a ring" + data[10:], "not a kvcatch ring"),
        (lambda data: data[:8] + (99).to_bytes(4, "little") + data[12:], "ring version 99"),
        (lambda data: data[: len(data) // 2], "damaged"),
    ],
)
def test_damaged_rings_are_refused_with_a_reason(tmp_path: Path, damage, message: str) -> None:
    ring = RingWriter(str(tmp_path / "a.core0.kvring"), SMALL, {})
    data = Path(ring.path).read_bytes()
    broken = tmp_path / "b.core0.kvring"
    broken.write_bytes(damage(data))
    with pytest.raises(KVCatchError, match=message):
        RingReader(str(broken))


def test_garbage_in_the_ring_stops_the_reader_with_a_warning(tmp_path: Path) -> None:
    ring = RingWriter(str(tmp_path / "a.core0.kvring"), SMALL, {})
    write(ring, 10)
    ring.append(array("I", [0xDEADBEEF, 1, 2]).tobytes(), 0, 0)
    feed = RingFeed(ring.path)
    assert numbers(feed) == list(range(10))
    assert "damaged record" in feed.warnings[0]

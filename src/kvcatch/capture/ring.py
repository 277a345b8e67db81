"""The writer of a ring file: preallocated, memory-mapped, no lock, no system call after the start."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from typing import Any

from kvcatch.store import layout
from kvcatch.store.layout import HEADER_BYTES, INFO_BYTES, SEGMENT_WORDS

_DATA = HEADER_BYTES + INFO_BYTES


class RingWriter:
    """Appends batches of words to a ring file. A killed process loses at most the batch being written.

    Raises OSError when the file cannot be allocated in full: a sparse map on a full disk would kill the
    engine with a bus error at some later write.
    """

    def __init__(self, path: str, ring_bytes: int, info: dict[str, Any]) -> None:
        segments = max(4, ring_bytes // (SEGMENT_WORDS * 4))
        self.words = segments * SEGMENT_WORDS
        size = HEADER_BYTES + INFO_BYTES + self.words * 4
        self.path = path
        # The lock lives on its own file: closing any descriptor of a locked file drops the lock.
        self._lock_fd = os.open(path + ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        self.pid = os.getpid()
        try:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            os.close(self._lock_fd)
            raise
        try:
            os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        except OSError:
            os.unlink(path)
            os.unlink(path + ".lock")
            os.close(self._lock_fd)
            raise
        finally:
            os.close(fd)
        self._head_view = memoryview(self._map)[layout.HEAD_OFFSET : layout.HEAD_OFFSET + 24].cast("Q")
        self.head = 0
        self.dropped = 0
        self.start_unix_ns = time.time_ns()
        self.start_mono_ns = time.monotonic_ns()
        layout.HEADER.pack_into(
            self._map, 0, layout.MAGIC, layout.RING_VERSION, HEADER_BYTES, 0, SEGMENT_WORDS, self.words,
            self.start_unix_ns, self.start_mono_ns, self.pid, 0,
        )  # fmt: skip
        self.write_info(info)
        self.set_state("recording")

    def write_info(self, info: dict[str, Any]) -> None:
        """(Re)write the information area; readers see the length last."""
        data = json.dumps(info, separators=(",", ":"), default=str).encode()[:INFO_BYTES]
        self._map[HEADER_BYTES : HEADER_BYTES + len(data)] = data
        self._map[20 - 4 : 20] = len(data).to_bytes(4, "little")

    def set_state(self, state: str) -> None:
        """One of layout.STATES."""
        offset = layout.STATE_OFFSET
        self._map[offset : offset + 4] = layout.STATES.index(state).to_bytes(4, "little")

    def count_hook_error(self) -> None:
        """Add one to the hook-error counter in the header."""
        offset = layout.HOOK_ERRORS_OFFSET
        count = int.from_bytes(self._map[offset : offset + 4], "little") + 1
        self._map[offset : offset + 4] = count.to_bytes(4, "little")

    def room(self) -> int:
        """Words left in the current segment; 0 means a SEGMENT record must come first."""
        return -self.head % SEGMENT_WORDS

    def append_if_room(self, data: bytearray, mono_ns: int, step: int) -> bool:
        """``append`` when the records fit into the current segment; the hot path of every step."""
        head = self.head
        end = head + (len(data) >> 2)
        if end > head + -head % SEGMENT_WORDS:
            return False
        start = _DATA + (head % self.words << 2)
        self._map[start : start + len(data)] = data
        self.head = end
        view = self._head_view
        view[1] = mono_ns
        view[2] = step
        view[0] = end
        return True

    def append(self, data: bytes | bytearray, mono_ns: int, step: int) -> None:
        """Write whole records that fit into the current segment, then publish them."""
        start = _DATA + (self.head % self.words << 2)
        self._map[start : start + len(data)] = data
        self.head += len(data) >> 2
        head = self._head_view
        head[1] = mono_ns
        head[2] = step
        head[0] = self.head

    def pad(self, mono_ns: int, step: int) -> None:
        """Fill the rest of the current segment."""
        room = self.room()
        if room:
            self.append(
                (layout.PAD | room << 16).to_bytes(4, "little") + bytes(4 * (room - 1)), mono_ns, step
            )

    def count_dropped(self, records: int) -> None:
        """Say that records were lost at the source."""
        self.dropped += records
        offset = layout.DROPPED_OFFSET
        self._map[offset : offset + 8] = self.dropped.to_bytes(8, "little")

    def close(self) -> None:
        """Mark the end of this life and release the liveness lock. Safe to call twice."""
        if self._lock_fd < 0 or os.getpid() != self.pid:
            return
        self.set_state("closed")
        os.close(self._lock_fd)
        self._lock_fd = -1

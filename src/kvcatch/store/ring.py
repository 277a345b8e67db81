"""Reading a ring file, of a live engine or a dead one, without disturbing its writer."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.store import layout

Words = npt.NDArray[np.uint32]

#: rings written by this very process: their lock cannot be asked for, and must not be touched
OWNED: set[str] = set()
_FLOCK = struct.Struct("hhqqi4x")


def lock_held(path: str) -> bool:
    """Whether another process holds a POSIX lock on a file. Asks only (F_GETLK), takes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def is_locked(path: str) -> bool:
    """Whether the process that writes a ring still lives.

    A POSIX lock works across pid namespaces and dies with its process, so no pid is ever trusted.
    """
    return os.path.realpath(path) in OWNED or lock_held(path + ".lock")


class RingReader:
    """A cursor over a ring file.

    ``read`` returns words that were not returned before. When the writer has overtaken the reader the lost
    words are counted and reading goes on at the oldest whole segment; ``jumped`` then says so.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise KVCatchError(f"cannot open {path}: {error.strerror}.") from error
        try:
            size = os.fstat(fd).st_size
            if size < layout.HEADER_BYTES + layout.INFO_BYTES:
                raise KVCatchError(f"{path} is not a kvcatch ring: only {size} bytes.")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        fields = layout.HEADER.unpack_from(self._map, 0)
        if fields[0] != layout.MAGIC:
            raise KVCatchError(f"{path} is not a kvcatch ring.", "Give a .kvring or .kvcap file.")
        self.version, self.header_bytes, _, self.segment_words, self.words = fields[1:6]
        self.start_unix_ns, self.start_mono_ns, self.pid = fields[6:9]
        if self.version > layout.RING_VERSION:
            raise KVCatchError(
                f"{path} has ring version {self.version}, this kvcatch reads up to {layout.RING_VERSION}.",
                "Upgrade kvcatch.",
            )
        start = layout.HEADER_BYTES + layout.INFO_BYTES
        if (
            self.words <= 0
            or self.segment_words <= 0
            or start + self.words * 4 > size
            or self.words % self.segment_words
        ):
            raise KVCatchError(f"{path} is damaged: its header names {self.words} words in {size} bytes.")
        self._words: Words = np.frombuffer(self._map, dtype="<u4", count=self.words, offset=start)
        self.position = 0
        self.lost_words = 0
        self.jumped = False

    def _u64(self, offset: int) -> int:
        return int.from_bytes(self._map[offset : offset + 8], "little")

    @property
    def head(self) -> int:
        """Words written since the start of this life."""
        return self._u64(layout.HEAD_OFFSET)

    @property
    def last_mono_ns(self) -> int:
        """Monotonic time of the last write, nanoseconds."""
        return self._u64(layout.LAST_MONO_OFFSET)

    @property
    def last_step(self) -> int:
        """Number of the last recorded step."""
        return self._u64(layout.LAST_STEP_OFFSET)

    @property
    def dropped(self) -> int:
        """Records the writer could not write."""
        return self._u64(layout.DROPPED_OFFSET)

    @property
    def hook_errors(self) -> int:
        """Exceptions in hooks; after one the recorder is off."""
        offset = layout.HOOK_ERRORS_OFFSET
        return int.from_bytes(self._map[offset : offset + 4], "little")

    @property
    def state(self) -> str:
        """What the writer said last: recording, closed or disabled. A killed writer leaves ``recording``."""
        offset = layout.STATE_OFFSET
        number = int.from_bytes(self._map[offset : offset + 4], "little")
        return layout.STATES[number] if number < len(layout.STATES) else "empty"

    def is_live(self) -> bool:
        """Whether the writing process still runs."""
        return is_locked(self.path)

    def info(self) -> dict[str, Any]:
        """The information area: fields of events.EngineInfo or of a worker rank."""
        length = int.from_bytes(self._map[16:20], "little")
        data = self._map[layout.HEADER_BYTES : layout.HEADER_BYTES + min(length, layout.INFO_BYTES)]
        try:
            decoded = json.loads(data)
        except ValueError as error:
            raise KVCatchError(f"{self.path} is damaged: its configuration is not JSON.") from error
        if not isinstance(decoded, dict):
            raise KVCatchError(f"{self.path} is damaged: its configuration is not an object.")
        return decoded

    def oldest(self, head: int) -> int:
        """First position that can still be read whole: the segment after the one being written over."""
        segment: int = head // self.segment_words - self.words // self.segment_words + 1
        return max(0, segment) * int(self.segment_words)

    def read(self, limit: int = 1 << 22) -> Words:
        """Up to ``limit`` new words, a copy; empty when there is nothing new."""
        self.jumped = False
        for _ in range(8):
            head = self.head
            oldest = self.oldest(head)
            if self.position < oldest:
                self.lost_words += oldest - self.position
                self.position = oldest
                self.jumped = True
            count = min(head - self.position, limit)
            if count <= 0:
                return self._words[:0].copy()
            start = self.position % self.words
            first = self._words[start : start + count].copy()
            data = (
                first if len(first) == count else np.concatenate([first, self._words[: count - len(first)]])
            )
            # The writer may have come round while we copied: only then try again further on.
            if self.position >= self.oldest(self.head):
                self.position += count
                return data
        return self._words[:0].copy()

    def close(self) -> None:
        """Unmap the file."""
        del self._words
        self._map.close()

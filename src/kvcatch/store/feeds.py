"""Where records come from: a ring, a ``.kvcap`` file, in whole records, with what was lost on the way."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

from kvcatch.errors import KVCatchError
from kvcatch.store import layout
from kvcatch.store.kvcap import KvcapReader, Starts
from kvcatch.store.records import DamagedError, split
from kvcatch.store.ring import RingReader, Words, lock_held

_CORE = re.compile(r"(?P<run>.+)\.core(?P<dp>\d+)(-\d+)?\.kvring")
JUMP = -1  # pseudo record kind: records were lost before this point


class Feed(Protocol):
    """A source of records of one engine core and its ranks."""

    warnings: list[str]

    def core_info(self) -> dict[str, Any]:
        """Fields of events.EngineInfo."""

    def ranks(self) -> dict[int, dict[str, Any]]:
        """Descriptions of worker ranks by source number."""

    def records(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """(source, kind, aux, payload) not returned before; source 0 is the engine core."""

    def raw(self, piece: int) -> Iterator[tuple[int, Words, Starts]]:
        """(source, words, places of the records where known) not returned before; a ring in ``piece`` words."""

    def loss(self) -> dict[str, int]:
        """dropped_records, dropped_bytes, hook_errors."""

    def is_live(self) -> bool:
        """Whether the writer of this record still runs."""

    def last_mono_ns(self) -> int:
        """When the engine last wrote, in its monotonic clock; 0 when this feed cannot know."""

    def close(self) -> None:
        """Release files."""


class RingFeed:
    """A core's ring and the rings of its worker ranks."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ring = RingReader(path)
        self.warnings: list[str] = []
        self._tail: list[int] = []
        self._ranks: dict[str, tuple[int, RingReader, dict[str, Any]]] = {}
        self._damaged = False

    def core_info(self) -> dict[str, Any]:
        info = self.ring.info()
        info.setdefault("start_unix_ns", self.ring.start_unix_ns)
        info.setdefault("start_monotonic_ns", self.ring.start_mono_ns)
        return info

    def _find_ranks(self) -> None:
        match = _CORE.fullmatch(os.path.basename(self.path))
        if match is None:
            return
        pattern = os.path.join(
            glob.escape(os.path.dirname(self.path)), glob.escape(match["run"]) + ".rank*.kvring"
        )
        for path in sorted(glob.glob(pattern)):
            if path in self._ranks:
                continue
            try:
                ring = RingReader(path)
                info = ring.info()
            except KVCatchError as error:
                self.warnings.append(str(error))
                continue
            if int(info.get("dp_rank", 0)) == int(match["dp"]):
                self._ranks[path] = (len(self._ranks) + 1, ring, info)

    def ranks(self) -> dict[int, dict[str, Any]]:
        self._find_ranks()
        return {source: {**info, "live": ring.is_live()} for source, ring, info in self._ranks.values()}

    def records(self) -> Iterator[tuple[int, int, int, list[int]]]:
        while not self._damaged:
            words = self.ring.read()
            if self.ring.jumped:
                self._tail = []
                yield 0, JUMP, 0, []
            if not len(words):
                break
            data = self._tail + words.tolist()
            used = 0
            try:
                for kind, aux, payload in split(data):
                    used += 1 + len(payload)
                    if kind:
                        yield 0, kind, aux, payload
            except DamagedError as error:
                self._damaged = True
                self.warnings.append(f"{self.path}: damaged record ({error}); what follows was not read")
            self._tail = data[used:]
        self._find_ranks()
        for source, ring, _ in self._ranks.values():
            try:
                for kind, aux, payload in split(ring.read().tolist()):
                    if kind:
                        yield source, kind, aux, payload
            except DamagedError as error:
                self.warnings.append(f"{ring.path}: {error}")

    def raw(self, piece: int) -> Iterator[tuple[int, Words, Starts]]:
        """(source, words, None) not returned before, unsplit; no words stand where records were lost."""
        while True:
            words = self.ring.read(piece)
            if self.ring.jumped:
                yield 0, words[:0], None
            if not len(words):
                break
            yield 0, words, None
        self._find_ranks()
        for source, ring, _ in self._ranks.values():
            yield source, ring.read(), None

    def loss(self) -> dict[str, int]:
        return {
            "dropped_records": self.ring.dropped,
            "dropped_bytes": self.ring.lost_words * 4,
            "hook_errors": self.ring.hook_errors,
        }

    def is_live(self) -> bool:
        return self.ring.is_live()

    def last_mono_ns(self) -> int:
        return self.ring.last_mono_ns

    def close(self) -> None:
        self.ring.close()
        for _, ring, _ in self._ranks.values():
            ring.close()


class FileFeed:
    """A ``.kvcap`` file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.reader = KvcapReader(path)
        self.warnings = self.reader.warnings
        self._loss = {"dropped_records": 0, "dropped_bytes": 0, "hook_errors": 0}
        self._pending: list[tuple[int, Words]] = []
        self._fill()

    def _fill(self) -> None:
        """Read on to the first records, so that the infos are known."""
        if not self._pending:
            for chunk in self.reader.chunks():
                self._pending.append(chunk)
                break

    def core_info(self) -> dict[str, Any]:
        return self.reader.infos.get(0, {})

    def ranks(self) -> dict[int, dict[str, Any]]:
        return {source: info for source, info in self.reader.infos.items() if source}

    def records(self) -> Iterator[tuple[int, int, int, list[int]]]:
        pending, self._pending = self._pending, []
        for source, words in pending:
            yield from self._split(source, words)
        for source, words in self.reader.chunks():
            yield from self._split(source, words)
        self.warnings = self.reader.warnings

    def raw(self, piece: int = 0) -> Iterator[tuple[int, Words, Starts]]:
        """(source, words, places) of each chunk not returned before; chunks hold whole records."""
        pending, self._pending = self._pending, []
        for source, words in pending:
            yield source, words, None
        yield from self.reader.located()
        self.warnings = self.reader.warnings

    def _split(self, source: int, words: Words) -> Iterator[tuple[int, int, int, list[int]]]:
        try:
            for kind, aux, payload in split(words.tolist()):
                if kind == layout.NOTE and source == 0 and aux == 1:
                    # The drainer was overtaken: payload = words lost.
                    self._loss["dropped_bytes"] += 4 * payload[0]
                    yield 0, JUMP, 0, []
                elif kind:
                    yield source, kind, aux, payload
        except DamagedError as error:
            self.reader.warnings.append(f"{self.path}: {error}")

    def loss(self) -> dict[str, int]:
        trailer = self.reader.trailer or {}
        return {name: max(value, int(trailer.get(name, 0))) for name, value in self._loss.items()}

    def is_live(self) -> bool:
        # The drainer holds a lock on the file while it writes it.
        return self.reader.trailer is None and not self.reader.damaged and lock_held(self.path)

    def last_mono_ns(self) -> int:
        return 0

    def close(self) -> None:
        self.reader.close()


def open_feed(path: str) -> Feed:
    """The feed for a ``.kvring`` or ``.kvcap`` file, told apart by content. Raises KVCatchError."""
    try:
        with open(path, "rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise KVCatchError(f"cannot open {path}: {error.strerror}.") from error
    if magic == layout.MAGIC:
        return RingFeed(path)
    return FileFeed(path)

"""The drainer: copies rings into ``.kvcap`` files, in its own process, never touching the engine.

    python -m kvcatch.store.drain --dir DIR --run RUN [-o FILE]

It follows every engine core of one run (data parallel ranks get a file each), salts block hashes, and ends when
the engines have ended or when it is told to stop (SIGTERM, SIGINT). A slow or dead drainer loses records, which
are counted in the file; the engine does not notice.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import hashlib
import os
import secrets
import signal
import sys
import time
from typing import Any

import numpy as np

from kvcatch.errors import KVCatchError
from kvcatch.store import layout as L
from kvcatch.store.kvcap import KvcapWriter
from kvcatch.store.ring import RingReader, Words

POLL_SECONDS = 0.1
CHUNK_WORDS = 1 << 16
CHUNK_SECONDS = 2.0
MAX_BUFFER_WORDS = 1 << 23


class SourceDrain:
    """One ring: whole records since the last call, block hashes salted."""

    def __init__(self, path: str, salt: bytes) -> None:
        self.ring = RingReader(path)
        self.salt = salt
        self._tail: Words = np.empty(0, dtype=np.uint32)
        self._lost = 0

    def take(self) -> list[Words]:
        """New words in whole records; a NOTE with aux 1 stands where records were lost."""
        parts = []
        while True:
            words = self.ring.read()
            if self.ring.jumped:
                self._tail = self._tail[:0]
                lost = self.ring.lost_words - self._lost
                self._lost = self.ring.lost_words
                parts.append(np.array([L.NOTE | 1 << 8 | 2 << 16, min(lost, L.UNKNOWN)], dtype=np.uint32))
            if not len(words):
                return parts
            data = np.concatenate([self._tail, words]) if len(self._tail) else words
            used = self._salt_chains(data)
            parts.append(data[:used])
            self._tail = data[used:]

    def _salt_chains(self, data: Words) -> int:
        """Replace block hashes by keyed hashes, in place; returns the words in whole records."""
        position, end = 0, len(data)
        heads = data.tolist()
        while position < end:
            head = heads[position]
            size = head >> 16
            if size == 0 or position + size > end:
                break
            if head & 0xFF == L.CHAIN and size > 4:
                part = data[position + 4 : position + size]
                raw = part.tobytes()
                salted = b"".join(
                    hashlib.blake2b(raw[i : i + 8], digest_size=8, key=self.salt).digest()
                    for i in range(0, len(raw), 8)
                )
                part[:] = np.frombuffer(salted, dtype="<u4")
            position += size
        return position


class CoreDrain:
    """One engine core and its worker ranks, into one file (or a row of them when it rotates)."""

    def __init__(self, path: str, output: str, salt: bytes, options: argparse.Namespace) -> None:
        self.path = path
        self.options = options
        self.salt = salt
        self.core = SourceDrain(path, salt)
        self.output = output
        self.part = 0
        self.ranks: dict[str, tuple[int, SourceDrain, dict[str, Any]]] = {}
        self.buffer: list[Words] = []
        self.buffered = 0
        self.last_write = time.monotonic()
        self.dropped_words = 0
        self.complained = False
        self.writer = self._open()

    def _open(self) -> KvcapWriter:
        path = self.output
        if self.part:
            stem, suffix = os.path.splitext(self.output)
            path = f"{stem}.{self.part:03d}{suffix}"
        writer = KvcapWriter(path)
        # Readers take a held lock as "still being written".
        with contextlib.suppress(OSError):
            fcntl.lockf(writer._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        info = self.core.ring.info()
        info.setdefault("start_unix_ns", self.core.ring.start_unix_ns)
        info.setdefault("start_monotonic_ns", self.core.ring.start_mono_ns)
        writer.info(0, info)
        for source, _, rank_info in self.ranks.values():
            writer.info(source, rank_info)
        self.opened = time.monotonic()
        return writer

    def _find_ranks(self) -> None:
        name = os.path.basename(self.path)
        run = name[: name.index(".core")]
        dp_rank = int(self.core.ring.info().get("dp_rank", 0))
        pattern = os.path.join(
            glob.escape(os.path.dirname(self.path)), f"{glob.escape(run)}.rank-dp{dp_rank}-*.kvring"
        )
        for path in sorted(set(glob.glob(pattern)) - set(self.ranks)):
            try:
                drain = SourceDrain(path, self.salt)
            except KVCatchError:
                continue  # being created: its header comes in a moment
            source = len(self.ranks) + 1
            info = drain.ring.info()
            self.ranks[path] = (source, drain, info)
            self.writer.info(source, info)

    def pump(self, *, final: bool = False) -> int:
        """Take what is new and write chunks when due; returns the new words."""
        new = 0
        for words in self.core.take():
            self.buffer.append(words)
            new += len(words)
        self.buffered += new
        due = self.buffered >= CHUNK_WORDS or time.monotonic() - self.last_write >= CHUNK_SECONDS
        if self.buffered and (due or final):
            self._write()
        if due or final:
            try:
                self._find_ranks()
                for source, drain, _ in self.ranks.values():
                    for words in drain.take():
                        self.writer.records(source, words)
            except OSError as error:
                self._complain(error)
        return new

    def _write(self) -> None:
        words = np.concatenate(self.buffer)
        try:
            if self._rotation_due():
                border = _segment_border(words)
                if border >= 0:
                    self.writer.records(0, words[:border])
                    self.writer.close(self.totals())
                    self.part += 1
                    self.writer = self._open()
                    words = words[border:]
            self.writer.records(0, words)
            self.complained = False
        except OSError as error:
            self._complain(error)
            if self.buffered < MAX_BUFFER_WORDS:
                self.buffer = [words]
                self.buffered = len(words)
                self.last_write = time.monotonic()
                return
            self.dropped_words += self.buffered
        self.buffer = []
        self.buffered = 0
        self.last_write = time.monotonic()

    def _rotation_due(self) -> bool:
        size, age = self.options.rotate_bytes, self.options.rotate_seconds
        return bool((size and self.writer.bytes >= size) or (age and time.monotonic() - self.opened >= age))

    def _complain(self, error: OSError) -> None:
        if not self.complained:
            print(f"kvcatch: cannot write {self.writer.path}: {error.strerror}; trying on", file=sys.stderr)
            self.complained = True

    def totals(self) -> dict[str, Any]:
        """What the trailer says."""
        ring = self.core.ring
        return {
            "last_step": ring.last_step,
            "dropped_records": ring.dropped,
            "dropped_bytes": 4 * (ring.lost_words + self.dropped_words),
            "hook_errors": ring.hook_errors,
            "writer_state": ring.state,
            "ended_unix_ns": ring.start_unix_ns + ring.last_mono_ns - ring.start_mono_ns,
        }

    def finish(self) -> None:
        """Write what is left and the trailer."""
        self.pump(final=True)
        try:
            self.writer.close(self.totals())
        except OSError as error:
            self._complain(error)


def _segment_border(words: Words) -> int:
    """Offset of the first SEGMENT record; -1 when there is none."""
    position, heads = 0, words.tolist()
    while position < len(heads):
        if heads[position] & 0xFF == L.SEGMENT:
            return position
        position += max(1, heads[position] >> 16)
    return -1


def default_output(info: dict[str, Any]) -> str:
    """``kvcatch-<model>.<pid>.kvcap`` in the current folder, with a number when it exists."""
    model = "".join(c if c.isalnum() or c in "._-" else "_" for c in str(info.get("model") or "engine"))
    stem = f"kvcatch-{model}.{info.get('pid', 0)}"
    path, number = f"{stem}.kvcap", 1
    while os.path.exists(path):
        number += 1
        path = f"{stem}-{number}.kvcap"
    return path


class Drainer:
    """All engine cores of one run."""

    def __init__(self, directory: str, run: str, options: argparse.Namespace) -> None:
        self.directory = directory
        self.run = run
        self.options = options
        self.salt = secrets.token_bytes(16)
        self.cores: dict[str, CoreDrain] = {}
        self.done: set[str] = set()
        self.paths: list[str] = []

    def discover(self) -> None:
        """Open rings that have appeared."""
        pattern = os.path.join(glob.escape(self.directory), f"{glob.escape(self.run)}.core*.kvring")
        for path in sorted(set(glob.glob(pattern)) - set(self.cores) - self.done):
            try:
                info = RingReader(path).info()
                output = self.options.output or default_output(info)
                if self.paths and self.options.output:
                    stem, suffix = os.path.splitext(output)
                    output = f"{stem}.core{len(self.paths)}{suffix}"
                self.cores[path] = CoreDrain(path, output, self.salt, self.options)
            except KVCatchError:
                continue
            except OSError as error:
                print(f"kvcatch: cannot write the capture: {error}", file=sys.stderr)
                self.done.add(path)
                continue
            self.paths.append(output)
            print(output, flush=True)

    def pump(self) -> bool:
        """One round; returns whether any engine is left."""
        self.discover()
        for path, core in list(self.cores.items()):
            live = core.core.ring.is_live()
            if core.pump() == 0 and not live:
                core.finish()
                del self.cores[path]
                self.done.add(path)
        return bool(self.cores)

    def finish(self) -> None:
        """Close every file."""
        for core in self.cores.values():
            core.finish()
        self.cores.clear()


def main(argv: list[str] | None = None) -> int:
    """Run until the engines end, or until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="kvcatch-drain")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("-o", "--output")
    parser.add_argument("--rotate-bytes", type=int, default=0)
    parser.add_argument("--rotate-seconds", type=float, default=0.0)
    options = parser.parse_args(argv)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: stopping.append(n))
    drainer = Drainer(options.dir, options.run, options)
    parent = os.getppid()
    seen = False
    while not stopping:
        left = drainer.pump()
        seen = seen or left
        # Without a parent nobody will start an engine of this run any more.
        if not left and (os.getppid() != parent or (seen and not parent)):
            break
        time.sleep(POLL_SECONDS)
    drainer.pump()
    drainer.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())

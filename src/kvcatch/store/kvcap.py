"""The ``.kvcap`` file: append-only, chunked, checksummed, compressed; readable while written and after a crash.

::

    "KVCAP" version(1 byte) 0 0 | chunk | chunk | ... | trailer chunk

    chunk = magic "KC" kind(u8) codec(u8) source(u16) 0(u16) raw_bytes(u32) stored_bytes(u32) crc32(u32) data

kind: INFO (JSON of one source: an engine core or a worker rank), RECORDS (words of store/layout.py), TRAILER
(JSON totals). codec: 0 stored, 1 zlib, 3 zlib over store/codec.py (columns and byte planes). crc32 covers the stored data. A file without trailer (crash, still being written) is readable to
its last whole chunk. Integers are little-endian.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.store import codec
from kvcatch.store.ring import Words

MAGIC = b"KVCAP"
FORMAT_VERSION = 1
FILE_HEADER = struct.Struct("<5sBH")
CHUNK = struct.Struct("<2sBBHHIII")
CHUNK_MAGIC = b"KC"
INFO, RECORDS, TRAILER = 1, 2, 3
STORED, ZLIB, COLUMNS = 0, 1, 3
MAX_CHUNK = 1 << 28
#: where the records of a chunk start, when unpacking has shown it anyway
Starts = npt.NDArray[np.int64] | None


def _pack(data: bytes, words: bool) -> tuple[int, bytes]:
    if words and len(data) >= 64:
        return COLUMNS, zlib.compress(codec.encode(np.frombuffer(data, dtype="<u4")), 6)
    return (ZLIB, zlib.compress(data, 6)) if len(data) >= 64 else (STORED, data)


def _unpack(kind: int, data: bytes, raw_bytes: int) -> tuple[bytes, Starts]:
    starts: Starts = None
    if kind == STORED:
        raw = data
    elif kind in (ZLIB, COLUMNS):
        # A bound on what a damaged or hostile file may unpack to.
        raw = zlib.decompressobj().decompress(data, raw_bytes + 64)
        if kind == COLUMNS:
            words, starts = codec.decode(raw)
            raw = words.tobytes()
    else:
        raise ValueError(f"codec {kind}")
    if len(raw) != raw_bytes:
        raise ValueError(f"{len(raw)} bytes instead of {raw_bytes}")
    return raw, starts


class KvcapWriter:
    """Appends chunks; each is flushed to the file whole. Raises OSError (disk full) without harming the rest."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: IO[bytes] = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by close())
        os.chmod(path, 0o600)
        self._file.write(FILE_HEADER.pack(MAGIC, FORMAT_VERSION, 0))
        self.bytes = FILE_HEADER.size

    def info(self, source: int, info: dict[str, Any]) -> None:
        """Describe a source; may be repeated, the last one counts."""
        self._chunk(INFO, source, json.dumps(info, separators=(",", ":")).encode(), words=False)

    def records(self, source: int, words: Words) -> None:
        """Whole records of one source."""
        if len(words):
            self._chunk(RECORDS, source, words.astype("<u4", copy=False).tobytes(), words=True)

    def _chunk(self, kind: int, source: int, data: bytes, *, words: bool) -> None:
        method, stored = _pack(data, words)
        header = CHUNK.pack(CHUNK_MAGIC, kind, method, source, 0, len(data), len(stored), zlib.crc32(stored))
        start = self.bytes
        try:
            view = memoryview(header + stored)
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            # Half a chunk would hide the chunks after it.
            self._file.truncate(start)
            self._file.seek(start)
            raise
        self.bytes = start + len(header) + len(stored)

    def close(self, totals: dict[str, Any]) -> None:
        """Write the trailer and close."""
        self._chunk(TRAILER, 0, json.dumps(totals, separators=(",", ":")).encode(), words=False)
        self._file.close()


class KvcapReader:
    """Reads chunks in order; a growing file can be read again for what was added.

    ``warnings`` tells what was damaged, with the byte offset; reading stops at the last whole chunk.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.warnings: list[str] = []
        self.infos: dict[int, dict[str, Any]] = {}
        self.trailer: dict[str, Any] | None = None
        try:
            self._file: IO[bytes] = open(path, "rb")  # noqa: SIM115 (closed by close())
        except OSError as error:
            raise KVCatchError(f"cannot open {path}: {error.strerror}.") from error
        header = self._file.read(FILE_HEADER.size)
        if len(header) < FILE_HEADER.size or not header.startswith(MAGIC):
            self._file.close()
            raise KVCatchError(f"{path} is not a kvcatch capture.", "Give a .kvcap or .kvring file.")
        version = FILE_HEADER.unpack(header)[1]
        if version > FORMAT_VERSION:
            self._file.close()
            raise KVCatchError(
                f"{path} has capture format {version}, this kvcatch reads up to {FORMAT_VERSION}.",
                "Upgrade kvcatch.",
            )
        self._offset = FILE_HEADER.size
        self.damaged = False

    def chunks(self) -> Iterator[tuple[int, Words]]:
        """(source, words) of each RECORDS chunk not read before."""
        for source, words, _ in self.located():
            yield source, words

    def located(self) -> Iterator[tuple[int, Words, Starts]]:
        """The same, with the places of the records where they are known."""
        while not self.damaged:
            self._file.seek(self._offset)
            header = self._file.read(CHUNK.size)
            if len(header) < CHUNK.size:
                if header:
                    self._half(len(header))
                return
            magic, kind, method, source, _, raw_bytes, stored_bytes, crc = CHUNK.unpack(header)
            if magic != CHUNK_MAGIC or max(raw_bytes, stored_bytes) > MAX_CHUNK:
                self._damage("no chunk begins here")
                return
            stored = self._file.read(stored_bytes)
            if len(stored) < stored_bytes:
                self._half(CHUNK.size + len(stored))
                return
            try:
                if zlib.crc32(stored) != crc:
                    raise ValueError("wrong checksum")
                raw, starts = _unpack(method, stored, raw_bytes)
                decoded = json.loads(raw) if kind in (INFO, TRAILER) else None
            except (ValueError, zlib.error) as error:
                self._damage(str(error))
                return
            self._offset += CHUNK.size + stored_bytes
            self.warnings = [w for w in self.warnings if not w.startswith("half a chunk")]
            if kind == INFO and isinstance(decoded, dict):
                self.infos[source] = decoded
            elif kind == TRAILER and isinstance(decoded, dict):
                self.trailer = decoded
            elif kind == RECORDS:
                yield source, np.frombuffer(raw, dtype="<u4"), starts

    def _half(self, size: int) -> None:
        warning = f"half a chunk at byte {self._offset} ({size} bytes): still being written, or cut off"
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _damage(self, reason: str) -> None:
        self.damaged = True
        self.warnings.append(f"damaged at byte {self._offset}: {reason}; what follows was not read")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

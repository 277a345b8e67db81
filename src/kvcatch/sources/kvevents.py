"""vLLM's own KV event stream over ZMQ (0.11 and later), with every gap found and asked for again.

A publisher numbers its batches. A subscriber that was away, or too slow, sees a jump in the numbers; the
replay endpoint then sends what its buffer still holds, and the rest is a gap that is reported exactly.
Token ids, which the events carry, are dropped here and go nowhere.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError, missing_extra

_END = (-1).to_bytes(8, "big", signed=True)
_REPLAY_SECONDS = 5.0
_KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}
#: fields by position in the array form of vLLM up to 0.2x; later releases send maps
_ARRAY = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


class KVEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the block pool. kind: stored | removed | cleared.

    num_tokens: tokens in the stored blocks. group: KV cache group, None where the release does not say.
    """

    kind: str
    unix_seconds: float
    sequence: int
    hashes: tuple[bytes | int, ...] = ()
    parent: bytes | int | None = None
    block_size: int | None = None
    num_tokens: int | None = None
    medium: str | None = None
    group: int | None = None


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Batches that are lost for good: ``first`` to ``last``, both included."""

    first: int
    last: int

    @property
    def batches(self) -> int:
        """How many."""
        return self.last - self.first + 1


def decode(payload: bytes, sequence: int) -> list[KVEvent]:
    """The events of one batch. Unknown kinds are left out. Raises KVCatchError when it is no batch."""
    try:
        batch = msgspec.msgpack.decode(payload)
        stamp, rows = float(batch[0]), batch[1]
        return [event for row in rows if (event := _event(row, stamp, sequence)) is not None]
    except (msgspec.DecodeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise KVCatchError(f"batch {sequence} is not a batch of KV events: {error}.") from None


def _event(row: Any, stamp: float, sequence: int) -> KVEvent | None:
    if isinstance(row, dict):
        name, fields = row.get("type"), row
    else:
        name = row[0]
        fields = dict(zip(_ARRAY.get(name, ()), row[1:], strict=False))
    kind = _KINDS.get(str(name))
    if kind is None:
        return None
    tokens = fields.get("token_ids")
    return KVEvent(
        kind=kind,
        unix_seconds=stamp,
        sequence=sequence,
        hashes=tuple(fields.get("block_hashes") or ()),
        parent=fields.get("parent_block_hash"),
        block_size=fields.get("block_size"),
        num_tokens=len(tokens) if tokens is not None else None,
        medium=fields.get("medium"),
        group=fields.get("group_idx"),
    )


class KVEventSource:
    """A subscription. Use as a context manager or call ``close``.

    Args:
        endpoint: the publisher's address, e.g. ``tcp://127.0.0.1:5557``.
        replay: its replay address; without it every jump is a gap.
        topic: as in vLLM's configuration.
        from_start: ask the replay endpoint for everything it holds before the first live batch.
    """

    def __init__(
        self, endpoint: str, replay: str | None = None, topic: str = "", from_start: bool = True
    ) -> None:
        try:
            zmq: Any = importlib.import_module("zmq")
        except ImportError:
            raise missing_extra("pyzmq", "kvevents") from None
        self._zmq = zmq
        self._context = zmq.Context()
        self._replay_address = replay
        self._next: int | None = 0 if from_start and replay else None
        self.gaps: list[Gap] = []
        self.batches = 0
        self.replayed_batches = 0
        self._sub = self._context.socket(zmq.SUB)
        # The library drops silently above this mark; the jump in the numbers shows it.
        self._sub.set_hwm(100_000)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        try:
            self._sub.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise KVCatchError(f"{endpoint}: {error}.", "Write for example tcp://127.0.0.1:5557") from None

    def __enter__(self) -> KVEventSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the stream."""
        self._context.destroy(linger=0)

    def poll(self, seconds: float = 0.0) -> Iterator[KVEvent]:
        """Events that are there, in order; waits at most ``seconds`` for the first."""
        wait = round(seconds * 1000)
        while self._sub.poll(wait):
            wait = 0
            frames = self._sub.recv_multipart()
            if len(frames) == 3:
                yield from self._take(int.from_bytes(frames[1], "big"), frames[2])

    def catch_up(self) -> Iterator[KVEvent]:
        """Events that only the replay endpoint still has: for the end of a stream, or a late start."""
        if self._replay_address is not None:
            for sequence, payload in self._replay(self._next or 0):
                if self._next is None or sequence >= self._next:
                    self.replayed_batches += 1
                    yield from self._emit(sequence, payload)

    def _take(self, sequence: int, payload: bytes) -> Iterator[KVEvent]:
        expected = self._next
        if expected is not None and sequence < expected:
            if sequence != 0:
                return  # already had it from a replay
            expected = self._next = None  # numbers start again: the engine was restarted
        if expected is not None and sequence > expected:
            yield from self._fill(expected, sequence)
        yield from self._emit(sequence, payload)

    def _fill(self, first: int, stop: int) -> Iterator[KVEvent]:
        """Batches ``first`` to ``stop - 1`` from the replay endpoint; what it lacks becomes a gap."""
        wanted = first
        for sequence, payload in self._replay(first):
            if sequence >= stop:
                break
            if sequence < wanted:
                continue
            if sequence > wanted:
                self.gaps.append(Gap(first=wanted, last=sequence - 1))
            self.replayed_batches += 1
            yield from self._emit(sequence, payload)
            wanted = sequence + 1
        if wanted < stop:
            self.gaps.append(Gap(first=wanted, last=stop - 1))

    def _emit(self, sequence: int, payload: bytes) -> Iterator[KVEvent]:
        self._next = sequence + 1
        self.batches += 1
        yield from decode(payload, sequence)

    def _replay(self, first: int) -> list[tuple[int, bytes]]:
        """What the replay endpoint holds from ``first`` on; empty when it does not answer in time."""
        if self._replay_address is None:
            return []
        zmq = self._zmq
        # One question brings many answers: a REQ socket would take only the first.
        socket = self._context.socket(zmq.DEALER)
        got: list[tuple[int, bytes]] = []
        try:
            socket.connect(self._replay_address)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            deadline = time.monotonic() + _REPLAY_SECONDS
            while socket.poll(max(0, round((deadline - time.monotonic()) * 1000))):
                frames = socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == _END:
                    break
                got.append((int.from_bytes(frames[-2], "big"), frames[-1]))
        finally:
            socket.close(linger=0)
        return got

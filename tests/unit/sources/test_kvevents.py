"""KV events: both encodings, gaps found and replayed, restarts; the publisher speaks vLLM's protocol."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.errors import KVCatchError
from kvcatch.sources.eventlog import open_kvevents
from kvcatch.sources.kvevents import Gap, KVEventSource, decode

END = (-1).to_bytes(8, "big", signed=True)


def batch(number: int) -> bytes:
    stored = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": None,
              "token_ids": [7] * 16, "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None,
              "group_idx": 0}  # fmt: skip
    return msgspec.msgpack.encode([1000.0 + number, [stored], 0])


class Publisher:
    """PUB and ROUTER sockets as vLLM's ZmqEventPublisher uses them; the test decides what is sent where."""

    def __init__(self, folder: Any) -> None:
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.endpoint = f"ipc://{folder}/pub"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self.pub.bind(self.endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.replay_endpoint)
        self.buffer: deque[tuple[int, bytes]] = deque()
        self.asked: list[int] = []
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def subscribed(self) -> None:
        """Wait until a subscription has arrived, so that nothing sent afterwards is missed."""
        assert self.pub.poll(10_000)
        self.pub.recv()

    def send(self, number: int, payload: bytes | None = None, lost: bool = False, kept: bool = True) -> None:
        """One batch; ``lost`` on the way to subscribers, ``kept`` in the replay buffer."""
        body = batch(number) if payload is None else payload
        if kept:
            self.buffer.append((number, body))
        if not lost:
            self.pub.send_multipart((b"", number.to_bytes(8, "big"), body))

    def _serve(self) -> None:
        while not self.done.is_set():
            if not self.router.poll(20):
                continue
            client, _, start = self.router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            for number, body in list(self.buffer):
                if number >= first:
                    self.router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), body))
            self.router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self.done.set()
        self.thread.join()
        self.context.destroy(linger=0)


@pytest.fixture
def publisher(tmp_path: Any) -> Iterator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    made.close()


def read(source: KVEventSource, count: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        events = list(source.poll(10))
        assert events, f"only {numbers}"
        numbers += [event.sequence for event in events]
    return numbers


def test_events_in_map_and_array_form_mean_the_same() -> None:
    """Maps since vLLM 0.2x; arrays before, as published by 0.11 and 0.12."""
    fields = {"type": "BlockStored", "block_hashes": [b"a", b"b"], "parent_block_hash": b"p",
              "token_ids": list(range(32)), "block_size": 16, "lora_id": None, "medium": "GPU"}  # fmt: skip
    new = msgspec.msgpack.encode([12.5, [fields, {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU"},
                                         {"type": "AllBlocksCleared"}], None])  # fmt: skip
    old = msgspec.msgpack.encode(
        [12.5, [["BlockStored", [b"a", b"b"], b"p", list(range(32)), 16, None, "GPU"],
                ["BlockRemoved", [b"a"], "GPU"], ["AllBlocksCleared"]]]
    )  # fmt: skip
    got = decode(new, 3)
    assert got == decode(old, 3)
    stored, removed, cleared = got
    assert (stored.kind, stored.hashes, stored.parent, stored.block_size) == (
        "stored",
        (b"a", b"b"),
        b"p",
        16,
    )
    assert (stored.num_tokens, stored.unix_seconds, stored.sequence) == (32, 12.5, 3)
    assert (removed.kind, removed.hashes, cleared.kind) == ("removed", (b"a",), "cleared")


def test_no_token_id_survives_decoding() -> None:
    (event,) = decode(batch(1), 1)
    assert event.num_tokens == 16
    assert "token_ids" not in msgspec.structs.asdict(event)
    assert 7 not in msgspec.structs.asdict(event).values()


@settings(max_examples=50)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_an_error(data: bytes) -> None:
    with contextlib.suppress(KVCatchError):
        assert all(event.sequence == 0 for event in decode(data, 0))


def test_unknown_kinds_are_passed_over() -> None:
    assert decode(msgspec.msgpack.encode([1.0, [{"type": "Other"}, ["Other", 1]]]), 0) == []


def test_a_stream_without_loss_is_passed_on(publisher: Publisher) -> None:
    with KVEventSource(publisher.endpoint, publisher.replay_endpoint) as source:
        publisher.subscribed()
        for number in range(5):
            publisher.send(number)
        assert read(source, 5) == [0, 1, 2, 3, 4]
        assert (source.gaps, source.batches, source.replayed_batches) == ([], 5, 0)
        assert publisher.asked == []


def test_a_late_start_is_made_good_from_the_buffer(publisher: Publisher) -> None:
    for number in range(3):
        publisher.send(number)
    with KVEventSource(publisher.endpoint, publisher.replay_endpoint) as source:
        publisher.subscribed()
        publisher.send(3)
        assert read(source, 4) == [0, 1, 2, 3]
        assert source.gaps == []


def test_a_jump_is_replayed_in_order(publisher: Publisher) -> None:
    with KVEventSource(publisher.endpoint, publisher.replay_endpoint) as source:
        publisher.subscribed()
        for number in range(10):
            publisher.send(number, lost=3 <= number <= 6)
        assert read(source, 10) == list(range(10))
        assert (source.gaps, source.replayed_batches) == ([], 4)
        assert publisher.asked == [3]


def test_what_the_buffer_no_longer_holds_is_an_exact_gap(publisher: Publisher) -> None:
    with KVEventSource(publisher.endpoint, publisher.replay_endpoint) as source:
        publisher.subscribed()
        for number in range(12):
            publisher.send(number, lost=2 <= number <= 9, kept=number not in (2, 3, 4, 8))
        assert read(source, 8) == [0, 1, 5, 6, 7, 9, 10, 11]
        assert source.gaps == [Gap(first=2, last=4), Gap(first=8, last=8)]
        assert [gap.batches for gap in source.gaps] == [3, 1]


def test_without_a_replay_endpoint_every_jump_is_a_gap(publisher: Publisher) -> None:
    with KVEventSource(publisher.endpoint) as source:
        publisher.subscribed()
        for number in (5, 6, 9):
            publisher.send(number)
        assert read(source, 3) == [5, 6, 9]
        assert source.gaps == [Gap(first=7, last=8)]


def test_a_restarted_engine_starts_a_new_count(publisher: Publisher) -> None:
    with KVEventSource(publisher.endpoint) as source:
        publisher.subscribed()
        for number in (0, 1, 2, 0, 1):
            publisher.send(number)
        assert read(source, 5) == [0, 1, 2, 0, 1]
        assert source.gaps == []


def test_the_end_of_a_stream_is_fetched_by_catching_up(publisher: Publisher) -> None:
    with KVEventSource(publisher.endpoint, publisher.replay_endpoint) as source:
        publisher.subscribed()
        publisher.send(0)
        assert read(source, 1) == [0]
        for number in (1, 2):
            publisher.send(number, lost=True)
        assert [event.sequence for event in source.catch_up()] == [1, 2]
        assert source.gaps == []


def test_a_bad_address_is_named() -> None:
    with pytest.raises(KVCatchError, match="nonsense"):
        KVEventSource("nonsense")


def test_the_stream_is_a_capture_with_its_gaps_in_the_loss(publisher: Publisher) -> None:
    stored = {"type": "BlockStored", "block_hashes": [b"a", b"b"], "parent_block_hash": None, "token_ids": [1] * 32,
              "block_size": 16, "lora_id": None, "medium": "GPU"}  # fmt: skip
    removed = {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU"}
    target = f"kvevents:{publisher.endpoint}?replay={publisher.replay_endpoint}"
    capture = open_kvevents(target)
    assert capture.snapshot().state == "connecting"
    publisher.subscribed()
    publisher.send(0, msgspec.msgpack.encode([100.0, [stored], 0]))
    publisher.send(1, msgspec.msgpack.encode([101.0, [removed], 0]))
    publisher.send(2, lost=True, kept=False)
    publisher.send(3, msgspec.msgpack.encode([103.0, [removed, stored], 0]))
    while len(list(capture.events())) < 4:
        capture.refresh()
    assert {key for _, _, key in capture.hashed} == {b"a", b"b"}
    rows = capture.samples()
    assert rows["evicted_blocks"].tolist() == [0, 1, 1]
    assert rows["unix_ns"].tolist() == [100 * 10**9, 101 * 10**9, 103 * 10**9]
    assert [record["kind"] for record in capture.events(start=101 * 10**9)] == [
        "removed",
        "removed",
        "stored",
    ]
    got = capture.snapshot()
    assert (got.state, got.pool.block_size, got.pool.active_blocks) == ("live", 16, None)
    assert got.loss.warnings == ("batches 2 to 2 are lost",)
    assert got.loss.dropped_records == 1
    capture.close()
    with pytest.raises(KVCatchError, match="unknown option 'port'"):
        open_kvevents(target + "&port=3")

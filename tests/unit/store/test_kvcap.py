"""Capture files: round trips, every possible cut, damage, versions, and the golden file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.errors import KVCatchError
from kvcatch.store import codec
from kvcatch.store import layout as L
from kvcatch.store.capture import ReplayCapture
from kvcatch.store.columns import record_starts
from kvcatch.store.drain import CoreDrain, main
from kvcatch.store.kvcap import KvcapReader, KvcapWriter
from unit.capture.embedded_run import EmbeddedRun

GOLDEN = Path(__file__).resolve().parents[2] / "golden"

record = st.one_of(
    st.tuples(
        st.just(L.SAMPLE), st.lists(st.integers(0, 2**32 - 1), min_size=len(L.ROW), max_size=len(L.ROW))
    ),
    st.tuples(st.just(L.SCHEDULED), st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4)),
    st.tuples(st.sampled_from(sorted(L.KIND_NAMES)), st.lists(st.integers(0, 2**32 - 1), max_size=40)),
)


def words_of(records: list[tuple[int, list[int]]]) -> np.ndarray:
    flat = [word for kind, body in records for word in (kind | (len(body) + 1) << 16, *body)]
    return np.array(flat, dtype=np.uint32)


@given(st.lists(record, max_size=60))
def test_the_codec_is_exact_for_any_records(records: list[tuple[int, list[int]]]) -> None:
    words = words_of(records)
    decoded, starts = codec.decode(codec.encode(words))
    assert decoded.tolist() == words.tolist()
    # Places come with it exactly when every record is whole, and then they are those that a walk finds.
    walked, used, trouble = record_starts(words)
    whole = len(words) > 0 and used == len(words) and not trouble
    assert (None if starts is None else starts.tolist()) == (walked.tolist() if whole else None)


@given(st.binary(max_size=200))
def test_the_codec_refuses_what_it_did_not_write(data: bytes) -> None:
    try:
        codec.decode(data)
    except ValueError:
        pass


def write_file(path: Path, chunks: int = 3) -> list[list[int]]:
    writer = KvcapWriter(str(path))
    writer.info(0, {"model": "m", "num_blocks": 10, "block_size": 16})
    written = []
    for number in range(chunks):
        words = words_of([(L.NEW, [number, 1, 2])] * 50)
        writer.records(0, words)
        written.append(words.tolist())
    writer.close({"last_step": 7})
    return written


def test_round_trip(tmp_path: Path) -> None:
    written = write_file(tmp_path / "a.kvcap")
    reader = KvcapReader(str(tmp_path / "a.kvcap"))
    assert [words.tolist() for _, words in reader.chunks()] == written
    assert reader.infos[0]["model"] == "m"
    assert reader.trailer == {"last_step": 7}
    assert reader.warnings == []


def test_every_cut_gives_the_whole_chunks_before_it(tmp_path: Path) -> None:
    written = write_file(tmp_path / "a.kvcap")
    data = (tmp_path / "a.kvcap").read_bytes()
    cut_file = tmp_path / "cut.kvcap"
    counts = []
    for size in range(8, len(data)):
        cut_file.write_bytes(data[:size])
        reader = KvcapReader(str(cut_file))
        got = [words.tolist() for _, words in reader.chunks()]
        assert got == written[: len(got)]
        counts.append(len(got))
        assert reader.trailer is None
        if reader.warnings:
            assert "half a chunk at byte" in reader.warnings[0]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    written = write_file(tmp_path / "a.kvcap")
    data = bytearray((tmp_path / "a.kvcap").read_bytes())
    for position in range(8, len(data), 7):
        broken = bytearray(data)
        broken[position] ^= 0x10
        (tmp_path / "b.kvcap").write_bytes(broken)
        reader = KvcapReader(str(tmp_path / "b.kvcap"))
        got = [words.tolist() for _, words in reader.chunks()]
        # A flip in a chunk's source number or spare bytes is not covered by the checksum of the data.
        assert got == written[: len(got)]


def test_foreign_and_newer_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "x.kvcap"
    foreign.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(KVCatchError, match="not a kvcatch capture"):
        KvcapReader(str(foreign))
    newer = tmp_path / "y.kvcap"
    newer.write_bytes(b"KVCAP\x63\x00\x00")
    with pytest.raises(KVCatchError, match="capture format 99"):
        KvcapReader(str(newer))


def drained(run: EmbeddedRun, output: Path, **options: float) -> CoreDrain:
    from types import SimpleNamespace

    settings = SimpleNamespace(rotate_bytes=options.get("rotate_bytes", 0), rotate_seconds=0.0)
    return CoreDrain(run.path, str(output), b"salt", settings)  # type: ignore[arg-type]


def test_a_drained_file_tells_what_the_ring_tells(tmp_path: Path) -> None:
    run = EmbeddedRun(tmp_path, seed=5)
    drain = drained(run, tmp_path / "out.kvcap")
    for number, _ in enumerate(run.steps()):
        if number % 50 == 0:
            drain.pump(final=True)
    run.ring.close()
    drain.finish()
    ring, file = ReplayCapture.open(run.path), ReplayCapture.open(str(tmp_path / "out.kvcap"))
    assert file.state.rows == ring.state.rows
    assert file.state.totals == ring.state.totals
    assert [view.to_dict() for view in file.requests()] == [view.to_dict() for view in ring.requests()]
    assert file.snapshot().source == "capture"
    # Same chains, other hashes: they are salted.
    assert {node: parent for node, (parent, _) in file.state.nodes.items()} == {
        node: parent for node, (parent, _) in ring.state.nodes.items()
    }
    assert not {value for _, value in file.state.nodes.values()} & {
        value for _, value in ring.state.nodes.values()
    }


def test_rotation_starts_each_file_whole(tmp_path: Path) -> None:
    run = EmbeddedRun(tmp_path, seed=6, requests=900, ring_bytes=16 << 20)
    drain = drained(run, tmp_path / "out.kvcap", rotate_bytes=20_000)
    for number, _ in enumerate(run.steps()):
        if number % 200 == 0:
            drain.pump(final=True)
    run.ring.close()
    drain.finish()
    files = [tmp_path / "out.kvcap", *sorted(tmp_path.glob("out.*.kvcap"))]
    assert len(files) > 2
    captures = [ReplayCapture.open(str(path)) for path in files]
    assert captures[-1].state.totals["steps"] == run.recorder.step
    assert captures[-1].state.totals["preemptions"] == run.preemptions
    for capture in captures:
        assert capture.feed.warnings == []
        assert not capture.state.partial


def test_the_drainer_ends_with_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = EmbeddedRun(tmp_path, seed=7)
    for _ in run.steps():
        pass
    run.ring.close()
    drain = drained(run, tmp_path / "out.kvcap")
    while drain.pump():
        pass
    drain.finish()
    assert KvcapReader(str(tmp_path / "out.kvcap")).trailer is None  # read lazily
    reader = KvcapReader(str(tmp_path / "out.kvcap"))
    list(reader.chunks())
    assert reader.trailer is not None
    assert reader.trailer["writer_state"] == "closed"
    assert run.recorder.step - 1 <= reader.trailer["last_step"] <= run.recorder.step
    with pytest.raises(SystemExit):
        main([])
    assert "--dir" in capsys.readouterr().err


def test_golden_file_opens_for_ever() -> None:
    capture = ReplayCapture.open(str(GOLDEN / "v1.kvcap"))
    expected = json.loads((GOLDEN / "v1.json").read_text())
    assert capture.state.totals == expected["totals"]
    assert len(capture.requests()) == expected["requests"]
    snapshot = capture.snapshot()
    assert snapshot.state == "ended"
    assert snapshot.pool.num_blocks == expected["num_blocks"]
    assert capture.loss.dropped_bytes == 0

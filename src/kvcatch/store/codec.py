"""Packing the words of a chunk: what follows from other words is subtracted, columns and byte planes compress.

Two kinds of records make up most of a capture and have a fixed length: SAMPLE rows and SCHEDULED marks. Their
payloads leave the stream and become columns, in which each value is replaced by what a prediction from the
columns before it leaves over (mostly zeros); decoding adds the predictions back. All arithmetic is modulo 2^32
or 2^64, so it is exact for any content.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from kvcatch.store import layout as L

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
_HEADER = struct.Struct("<III")  # words left in the stream, SAMPLE rows, SCHEDULED marks
_FIXED = {L.SAMPLE: len(L.ROW), L.SCHEDULED: 4}
_COLUMN = {name: index for index, name in enumerate(L.ROW)}
#: columns that change little from row to row
_SMOOTH = ("step", "running", "waiting", "deferred", "held", "active_blocks", "cached_blocks", "held_tokens")
#: column -> column it mostly equals
_EQUAL = {
    "active_max": "active_blocks", "running_max": "running", "waiting_max": "waiting", "step_max_ns": "step_ns",
}  # fmt: skip


def encode(words: U32) -> bytes:
    """Bytes for ``decode``, about to be compressed. Records must be whole."""
    heads = words.tolist()
    keep = np.ones(len(words), dtype=bool)
    starts: dict[int, list[int]] = {L.SAMPLE: [], L.SCHEDULED: []}
    order: list[int] = []  # SAMPLE rows seen before each SCHEDULED mark
    position, end = 0, len(heads)
    while position < end:
        head = heads[position]
        size = head >> 16
        kind = head & 0xFF
        if size - 1 == _FIXED.get(kind) and position + size <= end:
            starts[kind].append(position + 1)
            if kind == L.SCHEDULED:
                order.append(len(starts[L.SAMPLE]))
        position += size or 1
    rows = _gather(words, starts[L.SAMPLE], len(L.ROW), keep)
    marks = _gather(words, starts[L.SCHEDULED], 4, keep)
    _predict(rows, marks, np.array(order, dtype=np.int64), forward=True)
    rest = words[keep]
    header = _HEADER.pack(len(rest), len(rows), len(marks))
    return header + _planes(rest.reshape(1, -1)) + _planes(rows.T) + _planes(marks.T)


def decode(data: bytes) -> tuple[U32, npt.NDArray[np.int64] | None]:
    """The words given to ``encode``, and where records start in them (None unless all are whole).

    Raises ValueError for bytes that ``encode`` cannot have made.
    """
    if len(data) < _HEADER.size:
        raise ValueError("too short")
    num_rest, num_rows, num_marks = _HEADER.unpack_from(data)
    width = len(L.ROW)
    if len(data) != _HEADER.size + 4 * (num_rest + num_rows * width + num_marks * 4):
        raise ValueError("lengths do not fit")
    offset = _HEADER.size
    rest = _unplanes(data, offset, 1, num_rest)[0]
    offset += 4 * num_rest
    rows = _unplanes(data, offset, width, num_rows).T.copy()
    offset += 4 * num_rows * width
    marks = _unplanes(data, offset, 4, num_marks).T.copy()
    return _merge(rest, rows, marks)


def _merge(rest: U32, rows: U32, marks: U32) -> tuple[U32, npt.NDArray[np.int64] | None]:
    kinds, sizes = rest & 0xFF, rest >> 16
    width = np.zeros(len(rest), dtype=np.uint32)
    for kind, length in _FIXED.items():
        width[(kinds == kind) & (sizes == length + 1)] = length
    # A head whose payload is in the columns is one word here. Only heads are looked at: payloads may look like them.
    starts = np.array(_walk(np.where(width > 0, 1, np.maximum(sizes, 1)).astype(np.uint32)), dtype=np.int64)
    kinds, width = kinds[starts], width[starts]
    samples, scheduled = ((width > 0) & (kinds == kind) for kind in (L.SAMPLE, L.SCHEDULED))
    if np.count_nonzero(samples) != len(rows) or np.count_nonzero(scheduled) != len(marks):
        raise ValueError("rows without their records")
    places = starts + np.cumsum(width, dtype=np.int64) - width + 1
    _predict(rows, marks, np.cumsum(samples)[scheduled], forward=False)
    words = np.empty(len(rest) + rows.size + marks.size, dtype=np.uint32)
    keep = np.ones(len(words), dtype=bool)
    for mask, table in ((samples, rows), (scheduled, marks)):
        index = places[mask][:, None] + np.arange(table.shape[1])
        words[index] = table
        keep[index] = False
    words[keep] = rest
    heads = places - 1
    length = words[heads] >> 16
    whole = len(heads) > 0 and bool(length.all()) and int(heads[-1]) + int(length[-1]) == len(words)
    return words, heads if whole else None


def _walk(sizes: U32) -> list[int]:
    """Where records start, from the size that a record starting at each word would have."""
    # A view hands out the few words that are looked at; a list would make a number of each.
    view, position, end = sizes.data, 0, len(sizes)
    starts: list[int] = []
    add = starts.append
    while position < end:
        add(position)
        position += view[position]
    return starts


def _gather(words: U32, starts: list[int], width: int, keep: npt.NDArray[np.bool_]) -> U32:
    index = np.array(starts, dtype=np.int64)[:, None] + np.arange(width)
    keep[index] = False
    gathered: U32 = words[index].reshape(-1, width)
    return gathered


def _wide(table: U32, low: int) -> U64:
    return table[:, low].astype(np.uint64) | table[:, low + 1].astype(np.uint64) << np.uint64(32)


def _put(table: U32, low: int, values: U64) -> None:
    table[:, low] = (values & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    table[:, low + 1] = (values >> np.uint64(32)).astype(np.uint32)


def _predict(rows: U32, marks: U32, order: npt.NDArray[np.int64], *, forward: bool) -> None:
    """Subtract the predictions in place, or add them back. ``order``: rows before each mark."""
    c = _COLUMN
    if forward:
        times, starts = _wide(rows, c["mono_lo"]), _wide(marks, 2)
        _relate(rows, times, starts, order, sign=-1)
        _put(marks, 2, starts - _before(times, order))
        _put(rows, c["mono_lo"], _delta(times))
        for name in _SMOOTH:
            rows[:, c[name]] = _delta(rows[:, c[name]])
    else:
        for name in _SMOOTH:
            rows[:, c[name]] = np.cumsum(rows[:, c[name]], dtype=np.uint32)
        times = np.cumsum(_wide(rows, c["mono_lo"]), dtype=np.uint64)
        _put(rows, c["mono_lo"], times)
        starts = _wide(marks, 2) + _before(times, order)
        _put(marks, 2, starts)
        _relate(rows, times, starts, order, sign=1)


def _before(times: U64, order: npt.NDArray[np.int64]) -> U64:
    """The time of the row before each mark, 0 for the first."""
    padded = np.concatenate([np.zeros(1, dtype=np.uint64), times])
    return padded[order]


def _relate(rows: U32, times: U64, starts: U64, order: npt.NDArray[np.int64], *, sign: int) -> None:
    """Columns that follow from others of the same row or from the clock."""
    c = _COLUMN
    if sign > 0:
        _clock(rows, times, starts, order, sign)
        for name, other in _EQUAL.items():
            rows[:, c[name]] += rows[:, c[other]]
        rows[:, c["free_blocks"]] -= rows[:, c["active_blocks"]] + rows[:, c["cached_blocks"]]
    else:
        rows[:, c["free_blocks"]] += rows[:, c["active_blocks"]] + rows[:, c["cached_blocks"]]
        for name, other in _EQUAL.items():
            rows[:, c[name]] -= rows[:, c[other]]
        _clock(rows, times, starts, order, sign)


def _clock(rows: U32, times: U64, starts: U64, order: npt.NDArray[np.int64], sign: int) -> None:
    """step_ns = this row's time - start of the newest schedule(); interval_ns = time since the row before."""
    c = _COLUMN
    newest = np.searchsorted(order, np.arange(len(rows)), side="right") - 1
    known = newest >= 0
    step = np.zeros(len(rows), dtype=np.uint32)
    step[known] = (times[known] - starts[newest[known]]).astype(np.uint32)
    interval = np.zeros(len(rows), dtype=np.uint32)
    interval[1:] = (times[1:] - times[:-1]).astype(np.uint32)
    if sign > 0:
        rows[:, c["step_ns"]] += step
        rows[:, c["interval_ns"]] += interval
    else:
        rows[:, c["step_ns"]] -= step
        rows[:, c["interval_ns"]] -= interval


def _delta(values: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    result = values.copy()
    result[1:] -= values[:-1]
    return result


def _planes(columns: U32) -> bytes:
    """Each column's lowest bytes, then its second bytes, ..."""
    shape = columns.shape
    return np.ascontiguousarray(columns).view(np.uint8).reshape(*shape, 4).transpose(0, 2, 1).tobytes()


def _unplanes(data: bytes, offset: int, columns: int, count: int) -> U32:
    planes = np.frombuffer(data, dtype=np.uint8, count=4 * columns * count, offset=offset)
    joined = np.ascontiguousarray(planes.reshape(columns, 4, count).transpose(0, 2, 1))
    return joined.view("<u4").reshape(columns, count)

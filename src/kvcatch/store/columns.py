"""A whole recording as columns: what happened, without replaying the engine's state record by record.

The state machine of ``store/state.py`` answers who holds which block at one moment; a diagnosis of millions of
records asks how many blocks each request held over time. Here the records of one kind are gathered at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvcatch.events import EngineInfo
from kvcatch.store import layout as L
from kvcatch.store.base import SAMPLE_COLUMNS, Columns
from kvcatch.store.chains import ChainGather, Chains
from kvcatch.store.feeds import open_feed

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

#: read at once from a ring, in words
_PIECE = 1 << 20
_JUMP = 64  # pseudo kind: records were lost here
#: payload words kept of each kind; texts and id lists are handled apart
_FIXED = {
    L.ARRIVE: 13, L.REFRESH: 19, L.NEW: 3, L.RESUME: 2, L.PREEMPT: 8, L.FIRST: 3, L.FINISH: 8, L.DROP: 3,
    L.BLOCKS: 1, L.REPLACE: 1, L.SAMPLE: len(L.ROW), L.SEGMENT: 6, L.RESET: 0, _JUMP: 0,
}  # fmt: skip
_TEXT_AT = {L.ARRIVE: 13, L.REFRESH: 19}


@dataclass(frozen=True, eq=False)
class Requests:
    """One row per request, by its number in the recording. Times are monotonic ns, 0 = never.

    ``description`` is the recorded text: ``[engine request id, tags]`` as JSON.
    """

    rid: Ints
    arrival: Ints
    added: Ints
    scheduled: Ints
    first: Ints
    finish: Ints
    prompt_tokens: Ints
    max_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    queried_tokens: Ints
    preemptions: Ints
    recomputed_tokens: Ints
    reason: Ints
    description: list[bytes]

    def __len__(self) -> int:
        return len(self.rid)

    def named(self, row: int) -> tuple[str, dict[str, str]]:
        """Engine request id and tags of one row."""
        try:
            key, tags = msgspec.json.decode(self.description[row])
            return str(key), {str(name): str(value) for name, value in tags.items()}
        except (msgspec.DecodeError, ValueError, AttributeError, TypeError):
            return f"#{self.rid[row]}", {}

    def tenants(self) -> list[str]:
        """Tenant of every row, ``-`` where none is known."""
        known: dict[bytes, str] = {}
        result = []
        for row, text in enumerate(self.description):
            tags = text[text.find(b",{") :] if b",{" in text else text
            if tags not in known:
                known[tags] = self.named(row)[1].get("tenant", "-")
            result.append(known[tags])
        return result


@dataclass(frozen=True, eq=False)
class Holds:
    """Blocks held after each change, sorted by request and time; ``time`` is the row that ended the step."""

    rid: Ints
    time: Ints
    blocks: Ints


@dataclass(eq=False)
class Recording:
    """One engine core's record."""

    target: str
    info: EngineInfo
    samples: Columns
    requests: Requests
    holds: Holds
    preempted: (
        Columns  # rid, computed_tokens, held_blocks, freed_blocks, cause, beneficiary, time (monotonic)
    )
    records: int
    loss: dict[str, int]
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    live: bool = False
    chains: Chains | None = None
    row_orders: Ints = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # place of each sample among the records
    num_hashes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # of each request at arrival
    keys: Ints = field(
        default_factory=lambda: np.zeros((0, 4), np.int64)
    )  # cache salt and LoRA words of each request

    @property
    def wall_offset(self) -> int:
        """Wall-clock minus monotonic nanoseconds."""
        return self.info.start_unix_ns - self.info.start_monotonic_ns


def read_recording(path: str, *, chains: bool = False) -> Recording:
    """Read a ``.kvring`` or ``.kvcap`` file to its end, with ``chains`` also hash chains and prefill progress.

    Raises KVCatchError when it is neither.
    """
    feed = open_feed(path)
    gathered = _Gathered(ChainGather() if chains else None)
    ranks: dict[int, list[int]] = {}
    for source, words, starts in feed.raw(_PIECE):
        if source == 0:
            gathered.take(words, starts)
        else:
            row = _last_rank_row(words)
            if row:
                ranks[source] = row
    info = msgspec.convert(feed.core_info(), EngineInfo, strict=False)
    recording = Recording(
        target=path,
        info=info,
        samples=gathered.samples(info.start_unix_ns - info.start_monotonic_ns),
        requests=gathered.requests(),
        holds=gathered.holds(max(1, len(info.groups))),
        preempted=gathered.preempted(),
        records=gathered.records,
        loss=feed.loss(),
        ranks={
            source: {**described, **dict(zip(L.RANK_ROW, ranks.get(source, ()), strict=False))}
            for source, described in feed.ranks().items()
        },
        warnings=[*feed.warnings, *gathered.warnings],
        live=feed.is_live(),
    )
    if gathered.chains is not None:
        recording.chains = gathered.chains.finish()
        recording.row_orders = gathered.row_orders
        recording.num_hashes, recording.keys = gathered.keys(recording.requests.rid)
    if gathered.jumps and not recording.loss["dropped_bytes"]:
        recording.loss["dropped_bytes"] = gathered.lost_bytes
    feed.close()
    return recording


def _last_rank_row(words: Words) -> list[int]:
    starts = record_starts(words)[0]
    heads = words[starts]
    found = starts[(heads & 0xFF == L.RANK) & (heads >> 16 > len(L.RANK_ROW))]
    return words[found[-1] + 1 : found[-1] + 1 + len(L.RANK_ROW)].tolist() if len(found) else []


def record_starts(words: Words) -> tuple[Ints, int, str]:
    """Offsets of the whole records, the words they take, and what is wrong after them."""
    # A view hands out the few words that are looked at; a list would make a number of each.
    heads = np.ascontiguousarray(words, dtype=np.uint32).data
    starts: list[int] = []
    add = starts.append
    position, end, trouble = 0, len(heads), ""
    while position < end:
        size = heads[position] >> 16
        if not size:
            trouble = f"word {position}: a record of no length"
            break
        add(position)
        position += size
    if position > end:
        position = starts.pop()
    return np.array(starts, np.int64), position, trouble


class _Gathered:
    """Collects the records of each kind, piece by piece."""

    def __init__(self, chains: ChainGather | None = None) -> None:
        self.chains = chains
        self.records = 0
        self.next_order = 0
        self.jumps = 0
        self.lost_bytes = 0
        self.warnings: list[str] = []
        self.tail: Words = np.zeros(0, np.uint32)
        self.order: dict[int, list[Ints]] = {kind: [] for kind in _FIXED}
        self.fields: dict[int, list[Words]] = {kind: [] for kind in _FIXED}
        self.counts: dict[int, list[Ints]] = {L.BLOCKS: [], L.REPLACE: []}
        self.group: dict[int, list[Ints]] = {L.BLOCKS: [], L.REPLACE: [], L.DROP: []}
        self.texts: dict[int, list[bytes]] = {L.ARRIVE: [], L.REFRESH: []}
        self.stopped = False

    def take(self, words: Words, starts: Ints | None = None) -> None:
        """The next words; an incomplete record at their end waits for the rest. Empty: records were lost.

        starts: where their records begin, if that is known and all are whole.
        """
        if self.stopped:
            return
        if not len(words):
            self.tail = self.tail[:0]
            self._jump(self.next_order)
            return
        used, trouble = len(words), ""
        if starts is None or len(self.tail):
            words = np.concatenate([self.tail, words]) if len(self.tail) else words
            starts, used, trouble = record_starts(words)
        if trouble:
            self.warnings.append(f"damaged record ({trouble}); what follows was not read")
            self.stopped = True
        self.tail = words[used:]
        heads = words[starts]
        kinds, sizes = heads & 0xFF, (heads >> 16).astype(np.int64)
        order = np.arange(self.next_order, self.next_order + len(starts), dtype=np.int64)
        self.next_order += len(starts)
        self.records += int(np.count_nonzero(kinds))
        null = np.flatnonzero(words == 0)  # ids of the null block hold nothing
        for kind, width in _FIXED.items():
            chosen = (kinds == kind) & (sizes > width)
            at = starts[chosen]
            if not len(at):
                continue
            self.order[kind].append(order[chosen])
            self.fields[kind].append(words[at[:, None] + np.arange(1, width + 1)])
            if kind in self.group:
                self.group[kind].append((heads[chosen] >> 8 & 0xFF).astype(np.int64))
            if kind in self.counts:
                ids, end = at + 2, at + sizes[chosen]
                empty = np.searchsorted(null, end) - np.searchsorted(null, ids)
                self.counts[kind].append(end - ids - empty)
            if kind in _TEXT_AT:
                ends = at + sizes[chosen]
                for start, stop in zip((at + 1 + _TEXT_AT[kind]).tolist(), ends.tolist(), strict=True):
                    self.texts[kind].append(words[start + 1 : stop].tobytes()[: int(words[start])])
        if self.chains is not None:
            self.chains.take(words, starts, kinds, sizes, order)
        lost = (kinds == L.NOTE) & (heads >> 8 & 0xFF == 1) & (sizes > 1)
        for where, place in zip(starts[lost], order[lost], strict=True):
            # The drainer was overtaken: the payload says how many words are gone.
            self.lost_bytes += 4 * int(words[where + 1])
            self._jump(int(place))

    def _jump(self, order: int) -> None:
        self.jumps += 1
        if self.chains is not None:
            self.chains.forget()
        self.order[_JUMP].append(np.array([order], np.int64))

    def _table(self, kind: int) -> tuple[Ints, Ints]:
        """(order, fields as rows) of one kind."""
        if not self.fields[kind]:
            return np.zeros(0, np.int64), np.zeros((0, _FIXED[kind]), np.int64)
        return np.concatenate(self.order[kind]), np.concatenate(self.fields[kind]).astype(np.int64)

    def samples(self, wall_offset: int) -> Columns:
        """As ``Capture.samples()``, with ``mono_ns`` and ``order`` beside it."""
        parts = self.fields[L.SAMPLE]
        table = np.concatenate(parts) if parts else np.zeros((0, len(L.ROW)), np.uint32)
        parts.clear()
        index = {name: place for place, name in enumerate(L.ROW)}
        mono = _u64(table, index["mono_lo"])
        result: Columns = {"unix_ns": mono + wall_offset}
        for name in (*SAMPLE_COLUMNS[1:], "active_max", "waiting_max", "step_max_ns", "steps", "completed"):
            if name in index:
                result[name] = table[:, index[name]].astype(np.int64 if name == "held_tokens" else np.uint32)
        held = result["held_tokens"]
        held[held == L.UNKNOWN] = -1
        self.row_orders = np.concatenate(self.order[L.SAMPLE]) if len(mono) else np.zeros(0, np.int64)
        self._mono = mono
        return result

    def _time(self, order: Ints) -> Ints:
        """Monotonic time of the row that ended the step of a record; of the last row after it."""
        if not len(self._mono):
            return np.zeros(len(order), np.int64)
        return self._mono[np.minimum(np.searchsorted(self.row_orders, order), len(self._mono) - 1)]

    def requests(self) -> Requests:
        """The request table. A request described again (REFRESH) takes the newer description."""
        arrive, refresh = self._table(L.ARRIVE)[1], self._table(L.REFRESH)[1]
        rids = np.unique(np.concatenate([arrive[:, 0], refresh[:, 0]]))
        size = len(rids)
        columns = {name: np.zeros(size, np.int64) for name in Requests.__annotations__}
        texts = [b""] * size
        for kind, table in ((L.ARRIVE, arrive), (L.REFRESH, refresh)):
            rows = np.searchsorted(rids, table[:, 0])
            for row, text in zip(rows.tolist(), self.texts[kind], strict=True):
                texts[row] = text
            columns["arrival"][rows], columns["added"][rows] = _u64(table, 1), _u64(table, 3)
            place = 5 if kind == L.ARRIVE else 9
            columns["prompt_tokens"][rows], columns["max_tokens"][rows] = table[:, place], table[:, place + 1]
            if kind == L.REFRESH:
                columns["scheduled"][rows], columns["first"][rows] = _u64(table, 5), _u64(table, 7)
                for offset, name in enumerate(
                    ("output_tokens", "queried_tokens", "cached_tokens", "preemptions", "recomputed_tokens")
                ):
                    columns[name][rows] = table[:, 14 + offset]
        for kind, fields in (
            (L.NEW, {"cached_tokens": 1, "queried_tokens": 2}),
            (L.FIRST, {}),
            (L.FINISH, {"reason": 1, "output_tokens": 2, "preemptions": 4, "recomputed_tokens": 5}),
        ):
            order, table = self._table(kind)
            rows, known = _places(rids, table[:, 0])
            table, order = table[known], order[known]
            for name, place in fields.items():
                columns[name][rows] = table[:, place]
            if kind == L.NEW:
                columns["scheduled"][rows] = self._time(order)
            elif kind == L.FIRST:
                columns["first"][rows] = _u64(table, 1)
            else:
                columns["finish"][rows] = _u64(table, 6)
        # A request that still lives has its preemptions in PREEMPT records only.
        _, table = self._table(L.PREEMPT)
        rows, known = _places(rids, table[:, 0])
        counted = np.bincount(rows, minlength=size) if size else np.zeros(0, np.int64)
        columns["preemptions"] = np.maximum(columns["preemptions"], counted)
        columns.pop("description")
        columns["rid"] = rids
        return Requests(**columns, description=texts)

    def keys(self, rids: Ints) -> tuple[Ints, Ints]:
        """Blocks hashed at arrival (UNKNOWN: caching off or never seen) and the salt and LoRA words of each request."""
        hashes, keys = np.full(len(rids), L.UNKNOWN, np.int64), np.zeros((len(rids), 4), np.int64)
        table = self._table(L.ARRIVE)[1]
        rows = np.searchsorted(rids, table[:, 0])
        hashes[rows], keys[rows] = table[:, 8], table[:, 9:13]
        return hashes, keys

    def preempted(self) -> Columns:
        """Every preemption."""
        _, table = self._table(L.PREEMPT)
        names = ("rid", "computed_tokens", "held_blocks", "freed_blocks", "cause", "beneficiary")
        result: Columns = {name: table[:, place] for place, name in enumerate(names)}
        result["time"] = _u64(table, 6)
        return result

    def holds(self, num_groups: int) -> Holds:
        """Blocks held by each request after each change."""
        order, rid, group, value, sets = [], [], [], [], []

        def add(orders: Ints, rids: Ints, groups: Any, values: Any, is_set: bool) -> None:
            order.append(orders)
            rid.append(rids)
            group.append(np.broadcast_to(np.asarray(groups, np.int64), orders.shape))
            value.append(np.broadcast_to(np.asarray(values, np.int64), orders.shape))
            sets.append(np.full(len(orders), is_set))

        for kind in (L.BLOCKS, L.REPLACE, L.DROP):
            orders, table = self._table(kind)
            if len(orders):
                groups = np.concatenate(self.group[kind])
                values = -table[:, 2] if kind == L.DROP else np.concatenate(self.counts[kind])
                add(orders, table[:, 0], groups, values, kind == L.REPLACE)
                num_groups = max(num_groups, int(groups.max()) + 1)
        for kind in (L.PREEMPT, L.FINISH, L.RESUME, L.REFRESH):
            orders, table = self._table(kind)
            for number in range(num_groups if len(orders) else 0):
                add(orders, table[:, 0], number, 0, True)
        if not order:
            empty = np.zeros(0, np.int64)
            return Holds(empty, empty, empty)
        if self.order[_JUMP]:
            everyone = np.unique(np.concatenate(rid))
            for at in np.concatenate(self.order[_JUMP]):
                for number in range(num_groups):
                    add(np.full(len(everyone), at), everyone, number, 0, True)
        when, who, which = np.concatenate(order), np.concatenate(rid), np.concatenate(group)
        change, is_set = np.concatenate(value), np.concatenate(sets)
        if num_groups > 1:
            when, who, change = _per_group(when, who, which, change, is_set)
            is_set = np.zeros(len(when), bool)
        place = np.lexsort((when, who))
        when, who, change, is_set = when[place], who[place], change[place], is_set[place]
        held = _running_total(who, change, is_set)
        # Of several changes in one step only the last one stands.
        time = self._time(when)
        last = np.ones(len(who), bool)
        last[:-1] = (who[1:] != who[:-1]) | (time[1:] != time[:-1])
        return Holds(who[last], time[last], held[last])


def _per_group(when: Ints, who: Ints, which: Ints, number: Ints, is_set: Any) -> tuple[Ints, Ints, Ints]:
    """Changes of the sum over groups, from additions and settings of each group."""
    place = np.lexsort((when, which, who))
    key = who[place] * 256 + which[place]
    held = _running_total(key, number[place], is_set[place])
    change = held.copy()
    same = key[1:] == key[:-1]
    change[1:][same] -= held[:-1][same]
    return when[place], who[place], change


def _running_total(key: Ints, number: Ints, is_set: Any) -> Ints:
    """Sum of ``number`` within runs of equal keys; where ``is_set``, the sum becomes the number."""
    first = np.ones(len(key), bool)
    first[1:] = key[1:] != key[:-1]
    total = np.cumsum(np.where(is_set, 0, number))
    # At a start the total restarts at this number, at a setting it becomes this number.
    anchor = first | is_set
    offset = np.where(is_set, number - total, np.where(first, number - total, 0))
    latest = np.maximum.accumulate(np.where(anchor, np.arange(len(key)), 0))
    held: Ints = np.maximum(0, total + offset[latest])
    return held


def _places(rids: Ints, wanted: Ints) -> tuple[Ints, Any]:
    """Rows of ``wanted`` in the sorted ``rids``, and which of them exist."""
    if not len(rids):
        return np.zeros(0, np.int64), np.zeros(len(wanted), bool)
    rows = np.minimum(np.searchsorted(rids, wanted), len(rids) - 1)
    known = rids[rows] == wanted
    return rows[known], known


def _u64(table: Any, place: int) -> Ints:
    low, high = table[:, place].astype(np.int64), table[:, place + 1].astype(np.int64)
    joined: Ints = low | high << 32
    return joined

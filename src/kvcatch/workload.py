"""The ``Workload`` noun: arrivals, lengths and prefix identity of requests; the simulator's only input.

A request's prompt is a row of *segments*. A segment id stands for the whole prefix up to the segment's end:
equal ids mean equal prefixes. Every trace format becomes this: a Mooncake trace has segments of 512 tokens, a
request log whose token ids are known has the branches of its radix tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError

#: no model's context comes near; a larger number is damage and would exhaust memory
MAX_TOKENS = 1 << 26
Ints = npt.NDArray[np.int64]
SmallInts = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class BlockView:
    """The prompts of a workload cut into blocks.

    ids: dense block ids, request after request; the partial last block of a prompt has an id too.
    offsets: blocks of request i are ``ids[offsets[i]:offsets[i + 1]]``.
    exact: False when finer sharing may exist than the ids can tell, so that hits are a lower bound.
    """

    ids: SmallInts
    offsets: Ints
    num_ids: int
    block_size: int
    exact: bool


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival.

    arrival_seconds: from the first request. prompt_tokens and output_tokens: per request.
    segment_ids, segment_tokens: all segments; those of request i are ``offsets[i]:offsets[i + 1]``.
    grain: tokens below which sharing is unknown (512 for Mooncake ids, 1 when token ids were known).
    tenant: index into ``tenants`` per request. content_ids: what a segment holds wherever it stands, or None
    when the trace names prefixes only. made_ids: prefixes of whole grains that end in what a request generated, in
    the ids of the segments; those of request i are ``made_offsets[i]:made_offsets[i + 1]``, None when unknown.
    max_tokens: the most output each request asked for, None where only what it got is known.
    notes: what a reader had to assume or repair.
    """

    name: str
    arrival_seconds: npt.NDArray[np.float64]
    prompt_tokens: Ints
    output_tokens: Ints
    offsets: Ints
    segment_ids: Ints
    segment_tokens: Ints
    grain: int
    tenants: tuple[str, ...] = ("",)
    tenant: SmallInts | None = None
    content_ids: Ints | None = None
    made_offsets: Ints | None = None
    made_ids: Ints | None = None
    max_tokens: Ints | None = None
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def tenant_index(self) -> SmallInts:
        """Tenant of each request; all zero when the workload names none."""
        return np.zeros(len(self), np.int32) if self.tenant is None else self.tenant

    def head(self, count: int) -> Workload:
        """The first ``count`` requests."""
        end = int(self.offsets[min(count, len(self))])
        return replace(
            self,
            arrival_seconds=self.arrival_seconds[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            offsets=self.offsets[: count + 1],
            segment_ids=self.segment_ids[:end],
            segment_tokens=self.segment_tokens[:end],
            content_ids=None if self.content_ids is None else self.content_ids[:end],
            made_offsets=None if self.made_offsets is None else self.made_offsets[: count + 1],
            tenant=None if self.tenant is None else self.tenant[:count],
            max_tokens=None if self.max_tokens is None else self.max_tokens[:count],
        )

    def blocks(self, block_size: int) -> BlockView:
        """Cut the prompts into blocks of ``block_size`` tokens. Raises KVCatchError below one token.

        A block is named by the segment that holds its last token and the token's place in it.
        """
        if block_size < 1:
            raise KVCatchError(f"block size {block_size} is not positive.", "Give --block-size 16 or more.")
        counts = -(-self.prompt_tokens // block_size)
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        exact = block_size % self.grain == 0
        request = np.repeat(np.arange(len(self)), counts)
        last = (np.arange(offsets[-1]) - offsets[request] + 1) * block_size
        last = np.minimum(last, self.prompt_tokens[request]) - 1
        even = len(self.segment_ids) == int((-(-self.prompt_tokens // self.grain)).sum())
        if even and (exact or self.grain % block_size == 0):
            # Segments of equal length: no search needed.
            parts = max(1, self.grain // block_size)
            ids = self.segment_ids[self.offsets[request] + last // self.grain] * parts
            ids += last % self.grain // block_size if parts > 1 else 0
            return BlockView(ids.astype(np.int32), offsets, int(ids.max(initial=-1)) + 1, block_size, exact)
        # Where each segment ends, counted over all prompts put end to end, finds the segment of a token.
        ends = np.cumsum(self.segment_tokens)
        base = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.prompt_tokens, out=base[1:])
        token = base[request] + last
        segment = np.searchsorted(ends, token, side="right")
        place = token - (ends[segment] - self.segment_tokens[segment])
        key = self.segment_ids[segment] * (int(self.segment_tokens.max(initial=1)) + 1) + place
        names, dense = np.unique(key, return_inverse=True)
        return BlockView(dense.astype(np.int32), offsets, len(names), block_size, exact)


def build(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    grain: int,
    notes: Sequence[str] = (),
) -> Workload:
    """A workload from rows with ``arrival``, ``prompt``, ``output``, ``segments``, perhaps ``tenant``, ``made``, ``max_tokens``.

    ``segments`` is a list of (id, tokens) whose tokens add up to the prompt; ids are chained here, so that
    ids of content alone come to name prefixes; ``made`` continues the ids of the whole grains of the prompt with those
    of what was generated. Rows are sorted by arrival when they are not.
    Raises KVCatchError for a row that contradicts itself or a workload without requests.
    """
    if not rows:
        raise KVCatchError(f"{name}: no requests in it.", "Give a trace with at least one request.")
    said = list(notes)
    arrivals = np.array([row["arrival"] for row in rows], np.float64)
    if not np.isfinite(arrivals).all():
        raise KVCatchError(f"{name}: an arrival is not a finite number.", "Mend or drop that record.")
    longest = max(row["prompt"] + row["output"] for row in rows)
    if longest > MAX_TOKENS:
        raise KVCatchError(f"{name}: a request of {longest} tokens.", f"At most {MAX_TOKENS} are believed.")
    order = np.argsort(arrivals, kind="stable")
    if np.any(np.diff(arrivals) < 0):
        said.append("requests were not in order of arrival; sorted")
    names: dict[str, int] = {}
    chained: dict[tuple[int, Any], int] = {}
    contents: dict[Any, int] = {}
    ids: list[int] = []
    raw: list[int] = []
    lengths: list[int] = []
    made: list[int] = []
    offsets, made_offsets = [0], [0]
    for position in order:
        row = rows[position]
        parent, whole, total = -1, -1, 0
        for identity, tokens in row["segments"]:
            parent = chained.setdefault((parent, identity), len(chained))
            whole = parent if tokens == grain else whole
            ids.append(parent)
            raw.append(contents.setdefault(identity, len(contents)))
            lengths.append(tokens)
            total += tokens
        if total != row["prompt"]:
            raise KVCatchError(
                f"{name}: request {position} has {row['prompt']} prompt tokens but its ids cover {total}.",
                "Check the block size of the trace (--trace-block-size).",
            )
        offsets.append(len(ids))
        for identity in row.get("made", ()):
            whole = chained.setdefault((whole, identity), len(chained))
            contents.setdefault(identity, len(contents))
            made.append(whole)
        made_offsets.append(len(made))
        names.setdefault(str(row.get("tenant", "")), len(names))
    local = len(contents) < len(chained)
    limits = np.array([rows[i].get("max_tokens") or rows[i]["output"] for i in order], np.int64)
    if local:
        said.append("ids name content, not prefixes; chained to prefixes")
    return Workload(
        name=name,
        arrival_seconds=arrivals[order] - arrivals[order[0]],
        prompt_tokens=np.array([rows[i]["prompt"] for i in order], np.int64),
        output_tokens=np.array([rows[i]["output"] for i in order], np.int64),
        offsets=np.array(offsets, np.int64),
        segment_ids=np.array(ids, np.int64),
        segment_tokens=np.array(lengths, np.int64),
        grain=grain,
        tenants=tuple(names),
        tenant=np.array([names[str(rows[i].get("tenant", ""))] for i in order], np.int32),
        content_ids=np.array(raw, np.int64) if local else None,
        made_offsets=np.array(made_offsets, np.int64) if made else None,
        made_ids=np.array(made, np.int64) if made else None,
        max_tokens=limits if any(row.get("max_tokens") for row in rows) else None,
        notes=tuple(said),
    )

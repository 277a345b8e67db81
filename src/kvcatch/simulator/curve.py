"""Hits at every capacity from one pass over the trace.

Why one pass is enough: requests share prefixes, so the ids that a request was the last to use are always the
tail of its chain. The recency order is then a list of requests with a count each, and the stack distance of a
whole run of ids follows from one prefix sum over requests (Fenwick tree).

The stack property (what a smaller cache keeps, a larger one keeps too) holds for least-recently-used over ids.
For the engine's pool it holds from the largest request upwards, except where a prompt of whole blocks repeats:
its last block is computed again into a second copy (``Curve.exact`` is False then, and the error is measured
in the tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.results import Result
from kvcatch.simulator.jit import compiled
from kvcatch.workload import BlockView, Workload

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Curve:
    """Hits against capacity.

    hit_blocks[c], hit_tokens[c]: with room for c blocks (the null block not counted); constant above the end.
    first: smallest capacity for which the numbers hold, the largest request.
    step: capacities from one entry of the arrays to the next; more than 1 in a sampled curve, whose entry i holds for
    capacity ``(i - 1) * step + 1``. errors: half the width of the 95 % interval of the share of tokens hit, an entry
    each; None where the curve is no estimate. sampled: references that were looked at, None for all.
    """

    hit_blocks: npt.NDArray[np.int64]
    hit_tokens: npt.NDArray[np.int64]
    queried_blocks: int
    queried_tokens: int
    block_size: int
    first: int
    exact: bool
    step: int = 1
    errors: npt.NDArray[np.float64] | None = None
    sampled: int | None = None

    def _index(self, capacity: int) -> int:
        return min(max(-(-capacity // self.step) if self.step > 1 else capacity, 0), len(self.hit_blocks) - 1)

    def at(self, capacity: int) -> tuple[int, int]:
        """Blocks and tokens hit with room for ``capacity`` blocks."""
        index = self._index(capacity)
        return int(self.hit_blocks[index]), int(self.hit_tokens[index])

    def ratio(self, capacity: int) -> float:
        """Share of the prompt tokens hit, 0 to 1."""
        return self.at(capacity)[1] / self.queried_tokens if self.queried_tokens else 0.0

    def error(self, capacity: int) -> float:
        """Half the width of the 95 % interval around ``ratio``; 0 where nothing was sampled."""
        return 0.0 if self.errors is None else float(self.errors[self._index(capacity)])

    def reaching(self, ratio: float) -> int:
        """The smallest capacity that hits this share of the prompt tokens; past the end when none does."""
        index = int(np.searchsorted(self.hit_tokens, ratio * self.queried_tokens))
        return (index - 1) * self.step + 1 if index else 0

    @property
    def saturated_at(self) -> int:
        """The smallest capacity beyond which more room wins nothing."""
        index = int(np.searchsorted(self.hit_blocks, self.hit_blocks[-1]))
        return (index - 1) * self.step + 1 if index else 0

    def capacities(self, count: int = 48) -> list[int]:
        """Capacities worth drawing, evenly spaced on a log scale from ``first`` to where the curve is flat."""
        low, high = max(self.first, 1), max(self.saturated_at, self.first + 1, 2)
        return sorted({round(x) for x in np.geomspace(low, high, count)})


class HostTier(Result, frozen=True):
    """What a second tier behind the pool would add: it keeps what the pool evicts, least recent first out.

    Pool and tier together are one recency list, so the hits are those of their summed capacity. transfer_seconds:
    to read the tier's hits back; None where the block's bytes or the bandwidth are unknown.
    """

    host_blocks: int
    token_hit_ratio: float
    host_hit_tokens: int
    transfer_seconds: float | None


def host_tier(
    curve: Curve, usable: int, host_blocks: int, *, bytes_per_token: int | None, bytes_per_second: int | None
) -> HostTier:
    """Hits of a pool of ``usable`` blocks with ``host_blocks`` behind it, and what reading them back costs."""
    extra = curve.at(usable + host_blocks)[1] - curve.at(usable)[1]
    known = bytes_per_token is not None and bytes_per_second
    return HostTier(
        host_blocks=host_blocks,
        token_hit_ratio=curve.ratio(usable + host_blocks),
        host_hit_tokens=extra,
        transfer_seconds=extra * (bytes_per_token or 0) / (bytes_per_second or 1) if known else None,
    )


def hit_curve(workload: Workload, block_size: int, *, engine_rules: bool = True) -> Curve:
    """The hit curve of a workload whose requests come one after the other.

    Args:
        workload: the requests.
        block_size: tokens a block.
        engine_rules: as vLLM's pool counts (last token computed, generated blocks take room, a partial block
            cannot hit); False: least-recently-used over the ids as listed.
    """
    return curve_of(workload, workload.blocks(block_size), engine_rules=engine_rules)


def curve_of(workload: Workload, view: BlockView, *, engine_rules: bool) -> Curve:
    """The same for a workload whose blocks are at hand."""
    prompt, block_size = workload.prompt_tokens, view.block_size
    if engine_rules:
        look, used, keep, room = extents(workload, block_size)
    else:
        used = look = keep = room = np.diff(view.offsets)
    blocks, tokens, repeats = distances(
        view.ids, view.offsets, prompt, look, used, keep, room, view.num_ids, block_size, engine_rules
    )
    first = int(room.max(initial=1)) if engine_rules else 1
    return Curve(
        hit_blocks=np.cumsum(blocks),
        hit_tokens=np.cumsum(tokens),
        queried_blocks=len(view.ids),
        queried_tokens=int(prompt.sum()),
        block_size=block_size,
        first=first,
        exact=repeats == 0,
    )


def extents(workload: Workload, block_size: int) -> tuple[Array, Array, Array, Array]:
    """Blocks per request under the engine's rules: leading ones that may hit, whole ones of the prompt, kept, held."""
    prompt = workload.prompt_tokens
    held = prompt + np.maximum(workload.output_tokens, 1) - 1
    return (prompt - 1) // block_size, prompt // block_size, held // block_size, -(-held // block_size)


@compiled
def distances(
    ids: Array, offsets: Array, prompt: Array, look: Array, used: Array, keep: Array, room: Array, num_ids: int,
    block_size: int, engine: bool,
) -> tuple[Array, Array, int]:  # fmt: skip
    """Blocks and tokens that hit from each capacity on, and the number of repeated whole-block prompts.

    look: leading blocks that may hit. used: blocks that are referenced. keep: blocks that stay cached,
    generated ones included. room: blocks needed while it runs.
    """
    count = len(prompt)
    size = 2
    for request in range(count):
        size += keep[request]
    floor = 1
    if engine:
        for request in range(count):
            floor = max(floor, room[request])
    size = max(size, floor) + 2
    by_blocks = np.zeros(size + 1, np.int64)
    by_tokens = np.zeros(size + 1, np.int64)
    owner = np.full(num_ids, -1, np.int32)  # the request that used the id last
    taken = np.zeros(count, np.int32)  # ids of a request that later requests took over: its leading ones
    tree = np.zeros(count + 1, np.int64)  # Fenwick tree of the ids that each request still owns
    live = 0
    partial_before = 0  # owners below this saw a request with a partial block since (see below)
    repeats = 0
    for request in range(count):
        start = offsets[request]
        needed = 0
        at = 0
        end = used[request]
        deepest = count  # oldest owner that was touched
        fresh = keep[request] > end
        while at < end:
            who = owner[ids[start + at]]
            if who < 0:
                fresh = True
                break
            stop = at + 1
            while stop < end and owner[ids[start + stop]] == who:
                stop += 1
            # Ids more recent than all that ``who`` owns; the leading ``at`` of this request are among them,
            # because whoever used an id used the ids before it too.
            newer = live + at
            walk = who + 1
            while walk > 0:
                newer -= tree[walk]
                walk -= walk & -walk
            last = min(stop, look[request])
            if engine:
                # Freed tail first: a request's head is its most recent block. A request with a partial block
                # leaves one block less for cached ones.
                spare = 1 if who < partial_before else 0
                for position in range(at, last):
                    distance = max(floor, newer + position - at + 1 + spare)
                    by_blocks[distance] += 1
                    by_tokens[distance] += block_size
                if stop > last:
                    repeats += 1
            else:
                # Touched head first: a request's tail is its most recent id, and a hit needs all before it.
                needed = max(needed, newer + keep[who] - at)
                by_blocks[needed] += last - at
                by_tokens[needed] += min(last * block_size, prompt[request]) - at * block_size
            taken[who] += stop - at
            live -= stop - at
            walk = who + 1
            while walk <= count:
                tree[walk] -= stop - at
                walk += walk & -walk
            deepest = who
            at = stop
        for position in range(end):
            owner[ids[start + position]] = request
        live += keep[request]
        walk = request + 1
        while walk <= count:
            tree[walk] += keep[request]
            walk += walk & -walk
        if room[request] > keep[request]:
            partial_before = request
        elif fresh:
            partial_before = 0
        else:
            partial_before = min(partial_before, deepest + 1)
    return by_blocks, by_tokens, repeats

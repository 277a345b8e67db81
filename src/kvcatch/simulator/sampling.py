"""The hit curve of a very large trace from a sample of its blocks, with an error bar.

SHARDS (Waldspurger and others, "Efficient MRC Construction with SHARDS", FAST 2015): a block is in the sample when the
hash of its name is below a threshold, so either all references to it are or none, and the distances among sampled
blocks are the real ones, thinned.

Blocks are sampled one by one, not chains: what is left of a chain is a chain again (who uses a block uses the sampled
ones before it too), so the exact pass of ``curve`` runs on the sample as it is. Whole chains would be few and of very
different length, and a tree that many requests share would be in the sample as a whole or not at all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.simulator.curve import Curve, distances, extents
from kvcatch.simulator.jit import compiled
from kvcatch.workload import Workload

Array = npt.NDArray[Any]

#: parts of the sample that are samples of their own; from their spread comes the error bar
GROUPS = 8
#: of Student's distribution with GROUPS - 1 degrees of freedom, 95 %
STUDENT = 2.365
#: of the hash that decides
SPACE = 1 << 32


@dataclass(frozen=True, eq=False)
class _Sample:
    """Sampled blocks in order of use: name, hash, request, whether it may hit. generated: of each request, all of them."""

    names: Array
    hashes: Array
    owners: Array
    within: Array
    generated: Array

    def part(self, low: int, high: int) -> _Sample:
        """Those whose hash is in [low, high)."""
        mask = (self.hashes >= low) & (self.hashes < high)
        return replace(
            self, names=self.names[mask], hashes=self.hashes[mask], owners=self.owners[mask],
            within=self.within[mask],
        )  # fmt: skip


def sampled_curve(workload: Workload, block_size: int, *, rate: float, seed: int = 0) -> Curve:
    """The hit curve of ``curve.hit_curve`` under the engine's rules, estimated.

    Hits that the sample has too few or too many against what the whole trace can hit, which is counted, are put
    right at the smallest capacity (SHARDS-adj): they are mostly those of the few blocks that everybody uses.

    Args:
        workload: requests one after the other.
        block_size: tokens a block.
        rate: share of the blocks to look at, above 0 up to 0.5; one over a whole number is taken.
        seed: of the hash.

    Raises:
        KVCatchError: the rate or the block size is out of range.
    """
    if not 0 < rate <= 0.5:
        raise KVCatchError(f"sampling rate {rate} is not in (0, 0.5].", "Write for example --sample 0.01.")
    if block_size < 1:
        raise KVCatchError(f"block size {block_size} is not positive.", "Give --block-size 16 or more.")
    step = round(1 / rate)
    look, used, keep, room = extents(workload, block_size)
    names, hashes, owners, within, total = _thin(
        workload.segment_ids, workload.segment_tokens, workload.offsets, look, block_size,
        int(workload.segment_ids.max(initial=-1)) + 1, seed, SPACE // step,
    )  # fmt: skip
    sample = _Sample(names, hashes, owners, within, keep - used)
    whole = Curve(
        hit_blocks=np.zeros(1, np.int64),
        hit_tokens=np.zeros(1, np.int64),
        queried_blocks=int((-(-workload.prompt_tokens // block_size)).sum()),
        queried_tokens=int(workload.prompt_tokens.sum()),
        block_size=block_size,
        first=int(room.max(initial=1)),
        exact=False,
        sampled=len(names),
    )
    chance = np.random.default_rng(seed)
    estimate = _estimate(whole, sample, step, total, chance)
    edges = [SPACE // step * group // GROUPS for group in range(GROUPS + 1)]
    parts = [
        _estimate(whole, sample.part(low, high), step * GROUPS, total, chance)
        for low, high in itertools.pairwise(edges)
    ]
    rooms = _rooms(estimate)
    # Straight lines between the entries, which are farther apart here.
    tokens = np.stack([np.interp(rooms, _rooms(part), part.hit_tokens) for part in parts])
    spread = (tokens / max(whole.queried_tokens, 1)).std(axis=0, ddof=1)
    return replace(estimate, errors=STUDENT * spread / np.sqrt(GROUPS))


def _rooms(curve: Curve) -> Array:
    """The capacities that the entries stand for."""
    rooms: Array = (np.arange(len(curve.hit_tokens)) - 1) * curve.step + 1
    return rooms


def _estimate(whole: Curve, sample: _Sample, step: int, total: int, chance: np.random.Generator) -> Curve:
    """The curve that one block in ``step`` tells; ``total``: blocks of the whole trace that can hit."""
    used = np.bincount(sample.owners, minlength=len(sample.generated))
    look = np.bincount(sample.owners[sample.within], minlength=len(used))
    # Generated blocks only take room: the expected number of them, rounded at random.
    keep = used + np.floor(sample.generated / step + chance.random(len(used))).astype(np.int64)
    some = keep > 0
    names, dense = np.unique(sample.names, return_inverse=True)
    offsets = np.zeros(int(some.sum()) + 1, np.int64)
    np.cumsum(used[some], out=offsets[1:])
    nothing = np.zeros(
        len(offsets) - 1, np.int64
    )  # below ``first`` nothing is told, and prompts play no part
    blocks, _, _ = distances(
        dense.astype(np.int32), offsets, nothing, look[some], used[some], keep[some], nothing, len(names),
        whole.block_size, True,
    )  # fmt: skip
    hits = np.cumsum(blocks) * step
    hits = np.clip(hits + (total - hits[-1]), 0, total)
    start = min(-(-whole.first // step), len(hits) - 1)
    hits[:start] = 0
    return replace(whole, hit_blocks=hits, hit_tokens=hits * whole.block_size, step=step)


@compiled
def _thin(
    segment_ids: Array, segment_tokens: Array, offsets: Array, look: Array, block_size: int, num_ids: int, seed: int,
    limit: int,
) -> tuple[Array, Array, Array, Array, int]:  # fmt: skip
    """Whole blocks whose hash is below ``limit``: name, hash, request, whether it may hit; and how many of all can.

    A block is named as in ``Workload.blocks``: by the segment of its last token, and its place, which the segment fixes.
    """
    names = np.empty(1024, np.int64)
    hashes = np.empty(1024, np.int64)
    owners = np.empty(1024, np.int64)
    within = np.empty(1024, np.bool_)
    seen = np.zeros(num_ids, np.bool_)
    total = 0
    size = 0
    for request in range(len(look)):
        end = 0
        for at in range(offsets[request], offsets[request + 1]):
            segment = segment_ids[at]
            first = end // block_size
            end += segment_tokens[at]
            last = end // block_size
            if seen[segment]:
                total += max(0, min(last, look[request]) - first)
            seen[segment] = True
            for place in range(first, last):
                # SplitMix64's mixer.
                name = (np.uint64(segment) << np.uint64(26)) | np.uint64(place)
                word = name + (np.uint64(seed) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
                word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                value = np.int64((word ^ (word >> np.uint64(31))) >> np.uint64(32))
                if value >= limit:
                    continue
                if size == len(names):
                    names = np.concatenate((names, names))
                    hashes = np.concatenate((hashes, hashes))
                    owners = np.concatenate((owners, owners))
                    within = np.concatenate((within, within))
                names[size] = np.int64(name)
                hashes[size] = value
                owners[size] = request
                within[size] = place < look[request]
                size += 1
    return names[:size], hashes[:size], owners[:size], within[:size], total

"""Hash chains and prefill progress of a whole recording, gathered as columns beside ``store/columns.py``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcatch.store import layout as L

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Chains:
    """CHAIN records in order. A record is a path: its first block follows node ``parent``, each next one the one before.

    Nodes are numbered from 1 within an epoch; node n of epoch e has its hash at ``base[e] + n - 1``. names: dense
    numbers of the hashes. Progress: scheduled prompt tokens, one row per request and step; ``reset`` rows say what a
    request starts from (admitted or resumed). order: place of the record among all records.
    """

    rid: Ints
    parent: Ints
    start: Ints  # global place of the first hash
    count: Ints
    epoch: Ints
    base: Ints
    names: Ints
    num_names: int
    admitted: Ints  # rows of (order, rid, hit tokens, queried tokens)
    progress: Ints  # rows of (rid, order, tokens, reset)

    def paths(self) -> dict[int, Ints]:
        """The longest chain of each request, as dense numbers of its blocks."""
        result: dict[int, Ints] = {}
        firsts = [self.start[self.epoch == number] for number in range(len(self.base))]
        rows_of = [np.flatnonzero(self.epoch == number) for number in range(len(self.base))]
        start, count, parent = self.start.tolist(), self.count.tolist(), self.parent.tolist()
        # The last record of a request in an epoch has its whole chain behind it.
        ends: dict[tuple[int, int], int] = {}
        for row, key in enumerate(zip(self.rid.tolist(), self.epoch.tolist(), strict=True)):
            ends[key] = row
        for (rid, epoch), row in ends.items():
            pieces = [self.names[start[row] : start[row] + count[row]]]
            node, base = parent[row], int(self.base[epoch])
            while node > 0:
                place = base + node - 1
                at = int(np.searchsorted(firsts[epoch], place, side="right")) - 1
                # Records without hashes share their start with the next one.
                while at >= 0 and start[rows_of[epoch][at]] + count[rows_of[epoch][at]] <= place:
                    at -= 1
                if at < 0:
                    break
                before = int(rows_of[epoch][at])
                pieces.append(self.names[start[before] : place + 1])
                node = parent[before]
            path = np.concatenate(pieces[::-1]) if len(pieces) > 1 else pieces[0]
            if node == 0 and len(path) > len(result.get(rid, ())):
                result[rid] = path
        return result


class ChainGather:
    """Collects chains and progress piece by piece."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []  # rid, parent, start, count, epoch
        self.hashes: list[npt.NDArray[np.uint64]] = []
        self.total = 0
        self.bases = [0]
        self.admitted: list[Ints] = []
        self.progress: list[Ints] = []

    def forget(self) -> None:
        """A new epoch: the writer numbers nodes from 1 again."""
        self.bases.append(self.total)

    def take(self, words: Words, starts: Ints, kinds: Ints, sizes: Ints, order: Ints) -> None:
        """The records of one piece."""
        self._progress(words, starts, kinds, sizes, order)
        epochs = order[kinds == L.EPOCH]
        chosen = (kinds == L.CHAIN) & (sizes > 3)
        at, size = starts[chosen], sizes[chosen]
        if not len(at):
            for _ in epochs:
                self.forget()
            return
        count = (size - 4) // 2
        first = at + 4
        places = np.repeat(first - 2 * np.concatenate([[0], np.cumsum(count)[:-1]]), count) + 2 * np.arange(
            count.sum()
        )
        low, high = words[places].astype(np.uint64), words[places + 1].astype(np.uint64)
        begins = self.total + np.concatenate([[0], np.cumsum(count)[:-1]])
        # An epoch begins where the records after its EPOCH record do.
        before = np.searchsorted(epochs, order[chosen])
        ends = self.total + np.concatenate([[0], np.cumsum(count)])
        number = len(self.bases) - 1 + before
        self.bases += ends[np.searchsorted(order[chosen], epochs)].tolist()
        self.rows.append(
            np.stack(
                [words[at + 1].astype(np.int64), words[at + 2].astype(np.int64), begins, count, number],
                axis=1,
            )
        )
        self.hashes.append(low | high << np.uint64(32))
        self.total += int(count.sum())

    def _progress(self, words: Words, starts: Ints, kinds: Ints, sizes: Ints, order: Ints) -> None:
        for kind, width in ((L.NEW, 3), (L.RESUME, 2)):
            chosen = (kinds == kind) & (sizes > width)
            at, when = starts[chosen], order[chosen]
            if len(at):
                rid, hit = words[at + 1].astype(np.int64), words[at + 2].astype(np.int64)
                self.progress.append(np.stack([rid, when, hit, np.ones_like(rid)], axis=1))
                if kind == L.NEW:
                    self.admitted.append(np.stack([when, rid, hit, words[at + 3].astype(np.int64)], axis=1))
        chosen = (kinds == L.TOKENS) & (sizes > 2)
        at, pairs = starts[chosen], (sizes[chosen] - 1) // 2
        if len(at):
            places = np.repeat(
                at + 1 - 2 * np.concatenate([[0], np.cumsum(pairs)[:-1]]), pairs
            ) + 2 * np.arange(pairs.sum())
            rid, tokens = (
                words[places].astype(np.int64),
                (words[places + 1] & ~np.uint32(L.DONE)).astype(np.int64),
            )
            when = np.repeat(order[chosen], pairs)
            self.progress.append(np.stack([rid, when, tokens, np.zeros_like(rid)], axis=1))

    def finish(self) -> Chains:
        """Everything, with hashes named."""
        rows = np.concatenate(self.rows) if self.rows else np.zeros((0, 5), np.int64)
        hashes = np.concatenate(self.hashes) if self.hashes else np.zeros(0, np.uint64)
        names, first, dense = np.unique(hashes, return_index=True, return_inverse=True)
        # Numbered as they first came, so that their order means something.
        rank = np.empty(len(names), np.int64)
        rank[np.argsort(first)] = np.arange(len(names))
        dense = rank[dense]
        progress = np.concatenate(self.progress) if self.progress else np.zeros((0, 4), np.int64)
        # By request, then as it happened; what a request starts from stands before the tokens of the same step.
        progress = progress[np.lexsort((1 - progress[:, 3], progress[:, 1], progress[:, 0]))]
        admitted = np.concatenate(self.admitted) if self.admitted else np.zeros((0, 4), np.int64)
        return Chains(
            rid=rows[:, 0], parent=rows[:, 1], start=rows[:, 2], count=rows[:, 3], epoch=rows[:, 4],
            base=np.array(self.bases, np.int64), names=dense.astype(np.int64), num_names=len(names),
            admitted=admitted, progress=progress,
        )  # fmt: skip

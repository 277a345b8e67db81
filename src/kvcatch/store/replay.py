"""Step through a capture: the engine's state after every recorded step."""

from __future__ import annotations

from collections.abc import Iterator

from kvcatch.store.base import BOUNDS
from kvcatch.store.capture import ReplayCapture
from kvcatch.store.state import DECODING, RUNNING, State


class Step:
    """The engine after one recorded step; read it before going on to the next."""

    def __init__(self, state: State) -> None:
        row = state.row
        self._state = state
        self.step = row[0]
        self.mono_ns = row[1] | row[2] << 32
        self.active_blocks, self.cached_blocks, self.free_blocks = row[10], row[11], row[12]
        self.held_tokens = row[13]
        self.num_running, self.num_waiting = row[6], row[7]
        self.bound = BOUNDS[row[21]]
        self.preemptions = state.totals["preemptions"]
        self.recomputed = state.totals["recomputed_tokens"]
        self.queried_tokens = state.totals["queried_tokens"]
        self.hit_tokens = state.totals["hit_tokens"]
        self.evicted_blocks = state.totals["evicted_blocks"]

    @property
    def running(self) -> set[str]:
        """Engine ids of running requests."""
        return {r.key for r in self._state.requests.values() if r.state in (RUNNING, DECODING)}

    @property
    def waiting(self) -> set[str]:
        """Engine ids of waiting and preempted requests."""
        return {r.key for r in self._state.requests.values() if r.state not in (RUNNING, DECODING)}

    @property
    def blocks(self) -> dict[str, list[list[int]]]:
        """Engine id -> per KV cache group the ids of its blocks, the null block left out."""
        return {
            request.key: [[block for block in group if block] for group in request.blocks]
            for request in self._state.requests.values()
            if any(any(group) for group in request.blocks)
        }

    @property
    def computed_tokens(self) -> dict[str, int]:
        """Engine id -> tokens whose KV is computed or scheduled."""
        state = self._state
        return {r.key: state.computed_tokens(r) for r in state.requests.values()}

    @property
    def num_tokens(self) -> dict[str, int]:
        """Engine id -> prompt and output tokens."""
        state = self._state
        return {r.key: state.num_tokens(r) for r in state.requests.values()}


class Replay:
    """Iterates over the recorded steps of a ``.kvring`` or ``.kvcap`` file. Raises KVCatchError."""

    def __init__(self, path: str) -> None:
        from kvcatch.store.feeds import open_feed

        self.capture = ReplayCapture(path, open_feed(path))

    def __iter__(self) -> Iterator[Step]:
        for state in self.capture.steps():
            yield Step(state)

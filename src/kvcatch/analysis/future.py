"""What running requests will hold until they leave, and what fits beside them all the way.

Past-future scheduling (LightLLM, arXiv 2507.10150) counted in blocks: every running request grows by one
token a step to its ``max_tokens`` and then leaves, so the pool is fullest at one of the departures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from kvcatch.events import EngineInfo
from kvcatch.results import RequestView

Blocks = Callable[[int], int]


class Running(NamedTuple):
    """One running request: token slots now and at its end, steps until it leaves, blocks it shares."""

    held: int
    total: int
    steps: int
    shared: int


def running_requests(info: EngineInfo, requests: Iterable[RequestView]) -> list[Running] | None:
    """The running ones as demand; None when the length of one is unknown.

    The last sampled token has no slot: a request of P prompt tokens that has generated n holds P + n - 1.
    """
    found = []
    for view in requests:
        if view.status != "running":
            continue
        if view.prompt_tokens is None or view.max_tokens is None:
            return None
        done = view.output_tokens or 0
        longest = view.prompt_tokens + view.max_tokens
        if info.max_model_len is not None:
            longest = min(longest, info.max_model_len)
        held = view.prompt_tokens + max(0, done - 1)
        steps = max(0, longest - view.prompt_tokens - done)
        found.append(Running(held, max(held, longest - 1), steps, view.shared_blocks or 0))
    return found


def fits_beside(
    running: Sequence[Running],
    blocks: Blocks,
    free: int,
    usable: int,
    size: tuple[int, int],
    info: EngineInfo,
    delay_steps: int,
) -> int:
    """How many requests of ``size`` (prompt, output tokens) can start soon and never meet a full pool.

    Args:
        running: what runs, with its future.
        blocks: blocks a request of n tokens holds.
        free: blocks nobody references now.
        usable: blocks of the pool.
        size: one new request.
        info: ``max_num_batched_tokens`` bounds how much later the last of them starts.
        delay_steps: the first may start this many steps from now; every start up to then must be safe.
    """
    count_blocks = lru_cache(maxsize=None)(blocks)
    beside = _Beside(running, count_blocks, usable - free)
    low, high = 0, free // max(1, count_blocks(size[0]))
    while low < high:
        count = (low + high + 1) // 2
        late = _late(count, size[0], info) + delay_steps
        if _fits(count, beside, count_blocks, usable, size, late):
            low = count
        else:
            high = count - 1
    return low


class _Beside:
    """Blocks of what runs, at any number of steps from now; each moment is worked out once."""

    def __init__(self, running: Sequence[Running], blocks: Blocks, active: int) -> None:
        self.departures = sorted({one.steps for one in running})
        self._running = running
        self._blocks = blocks
        # Blocks that several requests share are held once; a share may end with each request that leaves.
        self._twice = max(0, sum(blocks(one.held) for one in running) - active)
        self._known: dict[int, int] = {}

    def held(self, moment: int) -> int:
        """Blocks held ``moment`` steps from now by those that are still there."""
        if moment not in self._known:
            blocks, gone, total = self._blocks, 0, 0
            for one in self._running:
                if one.steps < moment:
                    gone += one.shared
                else:
                    total += blocks(min(one.held + moment, one.total))
            self._known[moment] = total - max(0, self._twice - gone)
        return self._known[moment]


def _late(count: int, prompt: int, info: EngineInfo) -> int:
    """Steps between the start of the first and of the last of these prompts."""
    if not info.max_num_batched_tokens:
        return 0
    return max(0, -(-count * prompt // info.max_num_batched_tokens) - 1)


def _fits(count: int, beside: _Beside, blocks: Blocks, usable: int, size: tuple[int, int], late: int) -> bool:
    prompt, output = size
    # What runs takes its next step before anyone new is admitted, so the new ones are one step behind. Those
    # that start late are counted as if they had started at once, and stay as long as if they had started last.
    end = output + late
    for moment in (0, *(steps for steps in beside.departures if steps < end), end):
        new = count * blocks(prompt + min(max(0, moment - 1), output - 1))
        if beside.held(moment) + new > usable:
            return False
    return True

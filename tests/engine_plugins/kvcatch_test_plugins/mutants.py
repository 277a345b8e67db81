"""Deliberate mistakes in the recorder's hooks, to see that the tests notice: KVCATCH_TEST_MUTANT=NAME.

drop-frees    every 1000th call of free_blocks goes unseen
shared-twice  a block that another request holds already counts again when it is touched
blind-window  blocks that left a sliding window stay attributed
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

DROP_EVERY = 1000


def register() -> None:
    """Apply the wanted mistake to the recorder's classes; call it before a recorder is made."""
    name = os.environ.get("KVCATCH_TEST_MUTANT")
    if not name:
        return
    from kvcatch.capture.poolwatch import PoolWatch

    {"drop-frees": _drop_frees, "shared-twice": _shared_twice, "blind-window": _blind_window}[name](PoolWatch)


def _drop_frees(watch: Any) -> None:
    make = watch._free_blocks

    def mutant(self: Any, original: Any) -> Any:
        hook, calls = make(self, original), 0

        def free_blocks(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return (original if calls % DROP_EVERY == 0 else hook)(*args, **kwargs)

        return free_blocks

    watch._free_blocks = mutant


def _shared_twice(watch: Any) -> None:
    make = watch._touch

    def mutant(self: Any, original: Any) -> Any:
        hook = make(self, original)

        def touch(blocks: Any, *args: Any, **kwargs: Any) -> Any:
            again = sum(block.ref_cnt > 0 for block in _flat(blocks))
            result = hook(blocks, *args, **kwargs)
            self.cached -= again
            return result

        return touch

    watch._touch = mutant


def _flat(blocks: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for block in blocks:
        flat += _flat(block) if isinstance(block, (list, tuple)) else [block]
    return flat


def _blind_window(_: Any) -> None:
    from kvcatch.capture.windows import Windows

    Windows.scan_sliding = lambda self, out, running, slots: None

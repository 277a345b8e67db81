"""Planning: KV capacity of a model on a card, before any engine runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcatch.planner.planning import plan

__all__ = ["plan"]


def __getattr__(name: str) -> Any:
    if name != "plan":
        raise AttributeError(f"module 'kvcatch.planner' has no attribute {name!r}")
    from kvcatch.planner.planning import plan

    return plan

"""Wrapping methods of live objects, and taking the wraps off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hooks:
    """Hooks on instances, never on classes; ``remove`` leaves the objects as if they had never been touched."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def add(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(original)``."""
        original = getattr(owner, name)
        self._originals.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, make(original))

    def remove(self) -> None:
        """Put the originals back."""
        for owner, name, had in self._originals:
            if had is None:
                owner.__dict__.pop(name, None)
            else:
                setattr(owner, name, had)
        self._originals = []

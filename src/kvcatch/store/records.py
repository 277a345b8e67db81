"""Splitting words into records."""

from __future__ import annotations

from collections.abc import Iterator

from kvcatch.store import layout


class DamagedError(ValueError):
    """A record that cannot be: ``offset`` is its word offset."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"word {offset}: {reason}")
        self.offset = offset


def split(words: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """(kind, aux, payload) of each record; stops at an incomplete tail. Raises DamagedError."""
    position, end = 0, len(words)
    while position < end:
        head = words[position]
        size = head >> 16
        kind = head & 0xFF
        if size == 0 or kind not in layout.KIND_NAMES:
            raise DamagedError(position, f"kind {kind}, {size} words")
        if position + size > end:
            return
        yield kind, (head >> 8) & 0xFF, words[position + 1 : position + size]
        position += size


def text_at(payload: list[int], index: int) -> bytes:
    """The bytes that layout.text_bytes wrote at ``index``; empty when out of range."""
    if index >= len(payload):
        return b""
    size = payload[index]
    words = payload[index + 1 : index + 1 + (size + 3) // 4]
    return b"".join(word.to_bytes(4, "little") for word in words)[:size]

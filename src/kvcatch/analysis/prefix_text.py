"""What breaks a shared prefix: which characters, what they look like, and the prompt with them moved to its end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: characters of one step of the index over earlier texts
_STEP = 64
#: equal characters behind a difference that make two texts run together again
_SYNC = 24
#: the same at the end of both
_TAIL = 8
#: a changing piece is at most this long
_REACH = 512
_PIECES = 8

#: what a changing piece may be, tried in this order on the text around it
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("a date or time", re.compile(
        r"\d{4}-\d{2}-\d{2}(?:[T ,]+\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
        r"|\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AP]M)?"
        r"|(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? (?:\d{1,2} )?[A-Z][a-z]+(?: \d{1,2})?,?(?: \d{4})?"
        r"|(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{1,2},? \d{4}"
        r"|\b1[6-9]\d{8}(?:\d{3}|\.\d+)?\b")),
    ("a UUID", re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")),
    ("a random id", re.compile(r"\b(?=[0-9a-zA-Z_-]*\d)(?=[0-9a-zA-Z_-]*[a-zA-Z])[0-9a-zA-Z_-]{12,}\b")),
    ("a counter", re.compile(r"\b\d+\b")),
    ("an address or user name", re.compile(r"[\w.+-]+@[\w.-]+")),
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A difference between a text and the nearest earlier one. Offsets are in the later text, ``text`` is its own.

    start: where the changing piece begins, widened to the whole date, id or word. stop: where both run on equally.
    same: equal characters from there on.
    """

    start: int
    stop: int
    same: int
    before: str
    after: str
    what: str


@dataclass(frozen=True)
class Comparison:
    """A text against the nearest earlier one. nearest: its number, None when nothing is shared."""

    nearest: int | None
    shared: int
    pieces: tuple[Piece, ...]


class Index:
    """Earlier texts by their beginnings, one entry a step of 64 characters."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._texts: list[str] = []

    def compare(self, text: str) -> Comparison:
        """The nearest earlier text and where it differs; then the text joins the index."""
        key, steps, nearest = 0, 0, None
        keys = []
        for start in range(0, len(text) - _STEP + 1, _STEP):
            key = hash((key, text[start : start + _STEP]))
            keys.append((start, key))
        for place in keys:
            found = self._latest.get(place)
            if found is None:
                break
            nearest, steps = found, steps + 1
        if nearest is None and self._texts:
            nearest = len(self._texts) - 1
        shared = common(text, self._texts[nearest]) if nearest is not None else 0
        pieces = differences(text, self._texts[nearest], shared) if nearest is not None else ()
        for place in keys:
            self._latest[place] = len(self._texts)
        self._texts.append(text)
        return Comparison(nearest if shared else None, shared, pieces)


def common(one: str, other: str, start: int = 0, begin: int = 0) -> int:
    """Length of the common beginning of ``one[start:]`` and ``other[begin:]``."""
    low, high = 0, min(len(one) - start, len(other) - begin)
    while low < high:
        middle = (low + high + 1) // 2
        if one[start + low : start + middle] == other[begin + low : begin + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def differences(text: str, earlier: str, shared: int) -> tuple[Piece, ...]:
    """Where ``text`` leaves ``earlier`` and comes back to it; at most eight times."""
    if _reordered(text, earlier):
        some = slice(shared, shared + 80)
        return (Piece(shared, len(text), 0, earlier[some], text[some], "another order of the same parts"),)
    pieces: list[Piece] = []
    here, there = shared, shared
    floor = 0
    while len(pieces) < _PIECES and here < len(text) and there < len(earlier):
        found = _meet(text, earlier, here, there)
        if found is None:
            break
        ours, theirs = found
        same = common(text, earlier, ours, theirs)
        start, stop, what = widen(text, here, ours, floor)
        began = there - (here - start)
        pieces.append(
            Piece(
                start,
                stop,
                same - (stop - ours),
                earlier[began : theirs + stop - ours],
                text[start:stop],
                what,
            )
        )
        floor = stop
        here, there = ours + same, theirs + same
    return tuple(pieces)


def _meet(text: str, earlier: str, here: int, there: int) -> tuple[int, int] | None:
    """The nearest places from which both texts are equal for 24 characters or more."""
    best: tuple[int, int] | None = None
    for skip in range(_REACH):
        probe = earlier[there + skip : there + skip + _SYNC]
        if len(probe) < _SYNC:
            break
        if best is not None and skip >= best[0] - here + best[1] - there:
            break
        found = text.find(probe, here, here + _REACH + _SYNC)
        if found >= 0 and (best is None or found - here + skip < best[0] - here + best[1] - there):
            best = found, there + skip
    if best is None:
        # Near the end less is left than a meeting needs: equal ends will do.
        most = min(len(text) - here, len(earlier) - there)
        equal = common(text[: here - 1 if here else None : -1], earlier[: there - 1 if there else None : -1])
        if _TAIL <= equal < most + 1 and equal <= _REACH:
            best = len(text) - equal, len(earlier) - equal
    return best


def widen(text: str, start: int, stop: int, floor: int) -> tuple[int, int, str]:
    """The whole date, id, number or word that a difference is part of, and what it is."""
    if not text[start:stop].strip() and (start == stop or text[start:stop]):
        around = text[max(floor, start - 1) : stop + 1]
        if not around.strip() or start != stop:
            return start, stop, "white space"
    left, right = max(floor, start - 64), min(len(text), stop + 64)
    window = text[left:right]
    for what, pattern in KINDS:
        for match in pattern.finditer(window):
            begin, end = left + match.start(), left + match.end()
            if begin <= start < end or begin < stop <= end:
                return min(begin, start), max(end, stop), what
    while start > floor and not text[start - 1].isspace():
        start -= 1
    while stop < len(text) and not text[stop].isspace():
        stop += 1
    return start, stop, "a name or word" if stop - start <= 40 else "changing text"


def _reordered(one: str, other: str) -> bool:
    """Whether the first lines or JSON objects that differ are the same ones in another order."""
    parts, others = ([part for part in re.split(r"[\n{}]+", text) if len(part) > 8] for text in (one, other))
    start = next((n for n, pair in enumerate(zip(parts, others, strict=False)) if pair[0] != pair[1]), None)
    if start is None:
        return False
    return any(
        sorted(parts[start:stop]) == sorted(others[start:stop])
        for stop in range(start + 2, min(len(parts), len(others), start + 64) + 1)
    )


@dataclass(frozen=True)
class Rule:
    """A rewrite: in texts that begin with ``head``, what stands before ``tail`` goes to the end."""

    head: str
    tail: str
    what: str
    example: str

    def apply(self, text: str) -> str:
        """The text with the changing piece behind everything else."""
        if not text.startswith(self.head):
            return text
        at = text.find(self.tail, len(self.head), len(self.head) + _REACH + len(self.tail))
        if at <= len(self.head):
            return text
        return f"{text[: len(self.head)]}{text[at:]}\n{text[len(self.head) : at]}"


def rules(texts: Sequence[str], comparisons: Sequence[Comparison], most: int = 3) -> list[Rule]:
    """Rewrites for the first changing piece of each text, those that move most shared text forward first."""
    weight: dict[tuple[str, str], int] = {}
    named: dict[tuple[str, str], Rule] = {}
    for text, comparison in zip(texts, comparisons, strict=True):
        if not comparison.pieces or comparison.pieces[0].same < _SYNC:
            continue
        piece = comparison.pieces[0]
        tail = text[piece.stop : piece.stop + min(piece.same, 64)]
        key = text[: piece.start], tail
        weight[key] = weight.get(key, 0) + sum(part.same for part in comparison.pieces)
        named.setdefault(key, Rule(*key, piece.what, piece.after))
    best = sorted(weight, key=lambda key: -weight[key])[:most]
    return [named[key] for key in best]


Encode = Callable[[str], tuple[list[int], list[int]]]


def estimate(text: str) -> tuple[list[int], list[int]]:
    """Four characters a token: (ids, start of each token)."""
    starts = list(range(0, len(text), 4)) or [0]
    return [hash(text[start : start + 4]) for start in starts], starts


def render(record: dict[str, Any]) -> str:
    """The text of a request body without a chat template: tools first, then the messages with their roles."""
    parts = []
    if record.get("tools"):
        parts.append(json.dumps(record["tools"], ensure_ascii=False))
    if "messages" in record:
        for message in record["messages"]:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(str(part.get("text", f"[{part.get('type')}]")) for part in content)
            parts.append(f"{message.get('role', '')}: {content}")
    else:
        parts.append(str(record.get("prompt", "")))
    return "\n".join(parts)


def as_text(ids: Sequence[int]) -> str:
    """Token ids as characters, so that the same search works on them."""
    # Surrogates cannot be characters of a string that is searched.
    return "".join(chr(value + 0x100 if value + 0x100 < 0xD800 else value + 0x1000) for value in ids)

"""One look everywhere: a colour and a glyph per concept, so that no meaning hangs on colour alone.

The hues are the colour-blind safe set of Okabe and Ito (2008), lightened where they carry text.
"""

from __future__ import annotations

from dataclasses import dataclass

#: role -> (hex for screens and pages, xterm-256 index for plain terminals, bold); without a colour the
#: terminal's own is kept, light or dark
ROLES: dict[str, tuple[str, int | None, bool]] = {
    "active": ("#3b8fd6", 32, False),
    "cached": ("#1fa88c", 36, False),
    "free": ("#8a8f98", 245, False),
    "evicted": ("#e69f00", 214, False),
    "preempted": ("#e0552b", 166, True),
    "watermark": ("", None, True),
    "title": ("", None, True),
    "dim": ("#8a8f98", 245, False),
    "info": ("#56b4e9", 74, False),
    "warning": ("#e69f00", 214, True),
    "critical": ("#e0552b", 202, True),
}

#: names of the states of a target, as the header shows them
STATES = ("connecting", "live", "idle", "stale", "disconnected", "ended", "past")
STATE_ROLE = {"live": "active", "idle": "cached", "stale": "warning", "disconnected": "critical"}


@dataclass(frozen=True)
class Glyphs:
    """The drawing characters of one character set."""

    active: str
    cached: str
    free: str
    watermark: str
    spark: str
    state: dict[str, str]
    severity: dict[str, str]
    mark: dict[str, str]
    dot: str
    times: str
    cut: str


UNICODE = Glyphs(
    active="█",
    cached="▒",
    free="·",
    watermark="┊",
    spark="▁▂▃▄▅▆▇█",
    state={
        "connecting": "…",
        "live": "●",
        "idle": "○",
        "stale": "◐",
        "disconnected": "✕",
        "ended": "■",
        "past": "◷",
    },
    severity={"critical": "✖", "warning": "▲", "info": "ℹ"},
    mark={"arrival": "A", "scheduled": "S", "first": "F", "preempted": "✕", "finish": "■", "now": "▶"},
    dot="·",
    times="×",
    cut="…",
)
ASCII = Glyphs(
    active="#",
    cached="=",
    free=".",
    watermark="|",
    spark="_.-~=*%#",
    state={
        "connecting": "?",
        "live": "*",
        "idle": "o",
        "stale": "~",
        "disconnected": "x",
        "ended": "#",
        "past": "@",
    },
    severity={"critical": "X", "warning": "!", "info": "i"},
    mark={"arrival": "A", "scheduled": "S", "first": "F", "preempted": "x", "finish": "#", "now": ">"},
    dot="-",
    times="x",
    cut="~",
)

#: one line of a view: (text, role) pairs; the role "" is plain text
Line = list[tuple[str, str]]


@dataclass(frozen=True)
class Look:
    """How to draw: width in columns, and whether only ASCII may be used."""

    width: int = 80
    ascii: bool = False

    @property
    def glyphs(self) -> Glyphs:
        """The characters to draw with."""
        return ASCII if self.ascii else UNICODE


def plain(line: Line) -> str:
    """The text of a line without roles."""
    return "".join(text for text, _ in line)


def clip(line: Line, width: int, cut: str = "…") -> Line:
    """The line cut to ``width`` columns, with ``cut`` at the end when something is missing."""
    if sum(len(text) for text, _ in line) <= width:
        return line
    kept: Line = []
    left = max(0, width - len(cut))
    for text, role in line:
        if left <= 0:
            break
        kept.append((text[:left], role))
        left -= len(text)
    return [*kept, (cut[:width], "dim")]


def clean(text: str, ascii_only: bool = False) -> str:
    """Text that is safe on a terminal: names come from clients and may carry control characters."""
    if ascii_only:
        text = text.replace("µ", "u").encode("ascii", "replace").decode()
    return text if text.isprintable() else "".join(ch if ch.isprintable() else "?" for ch in text)


def ansi(lines: list[Line], *, color: bool, ascii_only: bool = False) -> str:
    """Lines for a terminal, one newline each; escape sequences only when ``color``."""
    safe = [[(clean(text, ascii_only), role) for text, role in line] for line in lines]
    return "".join("".join(_paint(*part, color) for part in line).rstrip() + "\n" for line in safe)


def _paint(text: str, role: str, color: bool) -> str:
    if not color or role not in ROLES or not text:
        return text
    _, index, bold = ROLES[role]
    codes = (["1"] if bold else []) + ([] if index is None else [f"38;5;{index}"])
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"

"""Lines of (text, role) as rich text."""

from __future__ import annotations

from rich.text import Text

from kvcatch.views.palette import ROLES, Line, clean


def rich_text(lines: list[Line], *, ascii_only: bool = False) -> Text:
    """Lines of (text, role) as one rich text."""
    text = Text(no_wrap=True, end="")
    for number, line in enumerate(lines):
        if number:
            text.append("\n")
        for words, role in line:
            text.append(clean(words, ascii_only), style_of(role))
    return text


def style_of(role: str) -> str:
    """The rich style of a role; roles without a colour keep the terminal's own."""
    color, _, bold = ROLES.get(role, ("", None, False))
    return " ".join(word for word in ("bold" if bold else "", color) if word)

"""Pages that lie over the table: one request in detail, and the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Static

from kvcatch.views.palette import Line
from kvcatch.views.tui.text import rich_text

HELP = """\
kvcatch top: who holds the KV cache, now

  q        quit                   enter    one request (a tenant: its requests)
  ?        this page              esc      back, or clear the filter
  space    pause, go on           /        filter: id, tenant, status, tag=value
  s  S     sort by the next column; turn the order
  v        next view: capacity, requests, reuse, scheduling, fragmentation
  t        next table: requests, tenants, ranks, groups
  f        findings in full       w        write this state to a JSON file
  tab      next target

What the pool bar says
  active   blocks held by requests; shared blocks count once
  cached   blocks nobody holds with a reusable prefix, taken when room is needed
  free     empty blocks
  watermark  the used fraction above which latency is expected to bend;
             85% is assumed until it was measured

"max" is the maximum since the previous sample. "n/a" means unknown, never zero.
Blocks of a request count shared blocks too; "own" are those nobody else holds.
"""

_LAST_KEY = "  tab      next target\n"
OPERATE = """\
  a        abort the request       h        hold its tenant; both ask first
"""


class Page(Screen[None]):
    """A scrollable page of lines; ``lines`` is asked again on every ``redraw``."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,backspace", "app.pop_screen", "back"),
        Binding("q", "app.quit", "quit"),
        Binding("question_mark", "app.pop_screen", "back"),
    ]
    DEFAULT_CSS = "Page > #keys { dock: bottom; height: 1; } Page > VerticalScroll { height: 1fr; }"

    def __init__(self, lines: Callable[[], list[Line]], *, ascii_only: bool = False) -> None:
        super().__init__()
        self._lines = lines
        self._ascii_only = ascii_only

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="body", markup=False)
        yield Static("esc back  q quit", id="keys", markup=False)

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    def redraw(self) -> None:
        """Ask for the lines again and show them."""
        for body in self.query("#body").results(Static):  # none yet while the page is being opened
            body.update(rich_text(self._lines(), ascii_only=self._ascii_only))


def help_lines(*, operator: bool = False) -> list[Line]:
    """The keys and the words of the screen, with those that change something when they are offered."""
    text = HELP.replace(_LAST_KEY, _LAST_KEY + OPERATE) if operator else HELP
    return [[(line, "")] for line in text.splitlines()]

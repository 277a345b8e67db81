"""A table with a cursor that draws only what is visible, so that thousands of requests cost no more than forty."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widget import Widget

from kvcatch.results import RequestView, Snapshot, TenantView
from kvcatch.views.palette import Line, clip
from kvcatch.views.tables import Table, row_line
from kvcatch.views.tui.text import rich_text


class Rows(Widget, can_focus=True):
    """The rows of one ``Table``. The cursor stays on its row when the order changes, or at the top."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up"),
        Binding("down,j", "move(1)", "down"),
        Binding("pageup", "page(-1)", "page up"),
        Binding("pagedown", "page(1)", "page down"),
        Binding("home", "move(-1000000)", "top"),
        Binding("end", "move(1000000)", "bottom"),
        Binding("enter", "open", "open"),
    ]

    class Opened(Message):
        """A row was chosen."""

        def __init__(self, row: Any) -> None:
            super().__init__()
            self.row = row

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.table: Table | None = None
        self.snapshot = Snapshot()
        self.ascii_only = False
        self.cursor = 0
        self.top = 0

    def show(self, table: Table, snapshot: Snapshot, *, ascii_only: bool = False) -> None:
        """Take new rows and draw them."""
        before = self.row
        same = self.table is not None and self.table.name == table.name
        self.table, self.snapshot, self.ascii_only = table, snapshot, ascii_only
        self.cursor = self._find(before) if same and self.cursor > 0 else 0
        self._follow()

    @property
    def row(self) -> Any:
        """The row under the cursor, None when there is none."""
        if self.table is None or not 0 <= self.cursor < len(self.table.rows):
            return None
        return self.table.rows[self.cursor]

    @property
    def page_rows(self) -> int:
        """Rows that fit below the titles."""
        return max(1, self.size.height - 1)

    def _find(self, wanted: Any) -> int:
        rows = self.table.rows if self.table is not None else ()
        key = row_key(wanted)
        return next((index for index, row in enumerate(rows) if row_key(row) == key), 0)

    def _follow(self) -> None:
        """Scroll so that the cursor is on screen, and draw."""
        count = len(self.table.rows) if self.table is not None else 0
        self.cursor = max(0, min(self.cursor, count - 1))
        self.top = min(self.top, self.cursor, max(0, count - self.page_rows))
        self.top = max(self.top, self.cursor - self.page_rows + 1)
        self.refresh()

    def render(self) -> Text:
        table = self.table
        if table is None or not table.rows:
            return rich_text([[(table.empty if table else "", "dim")]], ascii_only=self.ascii_only)
        lines: list[Line] = [[("  ".join(table.titles()), "title")]]
        lines += [
            row_line(table, row, self.snapshot) for row in table.rows[self.top : self.top + self.page_rows]
        ]
        lines = [clip(line, self.size.width) for line in lines]
        text = rich_text(lines, ascii_only=self.ascii_only)
        start = sum(sum(len(part) for part, _ in line) + 1 for line in lines[: self.cursor - self.top + 1])
        text.stylize(
            "reverse", start, start + sum(len(part) for part, _ in lines[self.cursor - self.top + 1])
        )
        return text

    def on_resize(self) -> None:
        self._follow()

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        self.cursor += rows
        self._follow()

    def action_page(self, pages: int) -> None:
        """Move the cursor by a screen."""
        self.action_move(pages * self.page_rows)

    def action_open(self) -> None:
        """Choose the row under the cursor."""
        if self.row is not None:
            self.post_message(self.Opened(self.row))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-3)

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor, a double click opens."""
        if event.y > 0:
            self.cursor = self.top + event.y - 1
            self._follow()
            if event.chain == 2:
                self.action_open()


def row_key(row: object) -> str:
    """What makes a row the same row in the next look."""
    if isinstance(row, RequestView):
        return row.engine_request_id
    return row.tenant if isinstance(row, TenantView) else repr(row)

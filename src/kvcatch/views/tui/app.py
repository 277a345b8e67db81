"""The live screen: polls its targets in a thread and draws the same lines that ``--once`` prints."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static

from kvcatch.errors import KVCatchError
from kvcatch.results import RequestView, Snapshot, TenantView
from kvcatch.views import panels, tables
from kvcatch.views.lifeline import Life, detail_lines, grown, life_of
from kvcatch.views.live import Watch
from kvcatch.views.palette import Line, Look, clip
from kvcatch.views.text import told_lines
from kvcatch.views.tui.confirm import HOLD_SECONDS, Confirm, Operator
from kvcatch.views.tui.rows import Rows
from kvcatch.views.tui.screens import Page, help_lines
from kvcatch.views.tui.text import rich_text

#: what each table is sorted by until the user says otherwise
FIRST_SORT = {
    "requests": ("blocks", True),
    "tenants": ("blocks", True),
    "ranks": ("rank", False),
    "groups": ("", False),
}


class TopApp(App[int]):
    """``kvcatch top`` as a screen.

    Args:
        watches: one per target, at least one.
        interval: seconds between two looks.
        view: the first view, one of ``tables.VIEWS``.
        ascii_only: draw with ASCII characters.
        readonly: write nothing to disk, change nothing.
        operator: who aborts and holds; None or readonly hides both.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #head { height: auto; }
    #table { height: 1fr; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #keys { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", priority=True),
        Binding("question_mark", "help", "help"),
        Binding("space", "pause", "pause"),
        Binding("slash", "filter", "filter"),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "order"),
        Binding("f", "findings", "findings"),
        Binding("v", "view", "view"),
        Binding("t", "table", "table"),
        Binding("tab", "target", "target", priority=True),
        Binding("w", "write", "write"),
        Binding("a", "abort", "abort"),
        Binding("h", "hold", "hold"),
        Binding("escape", "back", "back"),
    ]

    def __init__(
        self,
        watches: Sequence[Watch],
        *,
        interval: float = 1.0,
        view: str = "capacity",
        ascii_only: bool = False,
        readonly: bool = False,
        operator: Operator | None = None,
    ) -> None:
        super().__init__(ansi_color=True)
        self.watches = list(watches)
        self.interval = interval
        self.view = view
        self.ascii_only = ascii_only
        self.readonly = readonly
        self.operator = None if readonly else operator
        self.current = 0
        self.table_name = "requests"
        self.sorts = dict(FIRST_SORT)
        self.needle = ""
        self.note = ""
        self.paused = False
        self.snapshots = [Snapshot(target=watch.name, state="connecting") for watch in self.watches]
        self.curve = panels.Curves()
        self.detail: tuple[RequestView, Life] | None = None
        self._detail_page: Page | None = None
        self._busy = False

    # -- what is shown -------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The state of the target on screen."""
        return self.snapshots[self.current]

    @property
    def look(self) -> Look:
        """The drawing rules for this terminal."""
        return Look(width=max(40, self.size.width), ascii=self.ascii_only)

    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Rows(id="table")
        yield Input(id="filter", placeholder="filter: id, tenant, status or tag=value", compact=True)
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        self.query_one(Rows).focus()
        self.redraw()
        self._look()
        self.set_interval(self.interval, self._look)

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    def _look(self) -> None:
        if not self.paused and not self._busy:
            self.run_worker(self.look_once(), exclusive=False)

    async def look_once(self) -> None:
        """Poll every target and redraw. A slow target delays its own numbers, never a key press."""
        self._busy = True
        try:
            self.snapshots, self.curve = await asyncio.to_thread(self._poll)
        finally:
            self._busy = False
        self._grow_detail()
        self.redraw()

    def _poll(self) -> tuple[list[Snapshot], panels.Curves]:
        snapshots = [watch.poll() for watch in self.watches]
        return snapshots, self.watches[self.current].curves(panels.curve_width(self.look))

    def redraw(self) -> None:
        """Draw everything from what was last seen."""
        page = self.screen
        if isinstance(page, Page):
            page.redraw()
            return
        self.query_one("#head", Static).update(rich_text(self.head_lines(), ascii_only=self.ascii_only))
        self._draw_table()
        self.query_one("#keys", Static).update(rich_text([self.key_line()], ascii_only=self.ascii_only))

    def head_lines(self) -> list[Line]:
        """Header, pool, numbers and curves."""
        look = self.look
        notes = [f"{self.current + 1}/{len(self.watches)}"] if len(self.watches) > 1 else []
        if self.paused:
            notes.append("PAUSED")
        if self.note:
            notes.append(self.note)
        problem = self.watches[self.current].problem
        lines = panels.header(self.snapshot, look, note="  ".join(notes))
        if problem:
            lines[1] = clip([(problem, "warning")], look.width, look.glyphs.cut)
        lines += panels.pool_bar(self.snapshot, look)
        lines += panels.numbers(self.snapshot, self.view, look)
        return lines + panels.curves(self.curve, look)

    def key_line(self) -> Line:
        """The footer: keys and what they are set to."""
        key, down = self.sorts[self.table_name]
        arrow = ("v" if down else "^") if self.ascii_only else ("↓" if down else "↑")
        built = self.query_one(Rows).table
        count = f"{len(built.rows)}/{built.total}" if built is not None else "0"
        words = [
            ("q", "quit"),
            ("?", "help"),
            ("space", "pause"),
            ("/", self.needle or "filter"),
            ("s", f"{key}{arrow}" if key else "sort"),
            ("v", self.view),
            ("t", f"{self.table_name} {count}"),
            ("enter", "open"),
        ]
        if self.operator is not None:
            words += [("a", "abort"), ("h", "hold")]
        if len(self.watches) > 1:
            words.append(("tab", "target"))
        line: Line = []
        for name, text in words:
            if sum(len(part) for part, _ in line) + len(name) + len(text) + 1 <= self.look.width:
                line += [(name, "title"), (f" {text}  ", "dim")]
        return line

    def _draw_table(self) -> None:
        sort, reverse = self.sorts[self.table_name]
        built = tables.table(
            self.snapshot,
            self.table_name,
            self.look,
            view=self.view,
            sort=sort,
            reverse=reverse,
            needle=self.needle,
        )
        self.query_one(Rows).show(built, self.snapshot, ascii_only=self.ascii_only)

    # -- keys ----------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        """Stop and go on looking; the screen keeps what it has."""
        self.paused = not self.paused
        self.redraw()

    def action_help(self) -> None:
        """Show the keys."""
        offered = self.operator is not None
        self.push_screen(Page(lambda: help_lines(operator=offered), ascii_only=self.ascii_only))

    def action_findings(self) -> None:
        """All findings with cause and remedy, and what is missing from the record."""
        self.push_screen(Page(self._told, ascii_only=self.ascii_only))

    def _told(self) -> list[Line]:
        return told_lines(self.snapshot, self.look) or [[("no finding, nothing missing", "dim")]]

    def action_filter(self) -> None:
        """Type a filter."""
        field = self.query_one(Input)
        field.display = True
        field.value = self.needle
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if self.query_one(Input).display:
            self.needle = event.value.strip()
            self.redraw()

    def on_input_submitted(self) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one(Input).display = False
        self.query_one(Rows).focus()
        self.redraw()

    async def action_back(self) -> None:
        """Close the filter field, else forget the filter."""
        if not self.query_one(Input).display:
            self.needle = ""
        self._close_filter()

    def action_sort(self) -> None:
        """Sort by the next column on screen."""
        built = self.query_one(Rows).table
        if built is None:
            return
        keys = [column.key for column in built.columns]
        current, _ = self.sorts[self.table_name]
        following = keys[(keys.index(current) + 1) % len(keys)] if current in keys else keys[0]
        left = next(column.left for column in built.columns if column.key == following)
        self.sorts[self.table_name] = (following, not left)
        self.redraw()

    def action_reverse(self) -> None:
        """Turn the order around."""
        key, down = self.sorts[self.table_name]
        self.sorts[self.table_name] = (key, not down)
        self.redraw()

    def action_view(self) -> None:
        """The next view."""
        self.view = tables.VIEWS[(tables.VIEWS.index(self.view) + 1) % len(tables.VIEWS)]
        self.redraw()

    def action_table(self) -> None:
        """The next table."""
        names = tables.TABLES
        self.table_name = names[(names.index(self.table_name) + 1) % len(names)]
        self.redraw()

    def action_target(self) -> None:
        """The next target."""
        self.current = (self.current + 1) % len(self.watches)
        self.curve = panels.Curves()
        self.redraw()
        self._look()

    def action_write(self) -> None:
        """Save the state on screen as JSON in the working directory."""
        if self.readonly:
            self.note = "read-only: nothing written"
        else:
            stamp = time.strftime("%Y%m%dT%H%M%S", time.localtime())
            path = Path(f"kvcatch-top-{self.snapshot.pid or 'target'}-{stamp}.json")
            try:
                path.write_text(json.dumps(self.snapshot.to_dict(), indent=1) + "\n", encoding="utf-8")
                self.note = f"wrote {path}"
            except OSError as error:
                self.note = f"cannot write {path}: {error.strerror}"
        self.redraw()

    # -- what changes something ----------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """No abort and no hold without somebody to do it, nor over another page than a request's."""
        if action in {"abort", "hold"}:
            return self.operator is not None and (len(self.screen_stack) <= 1 or self._on_request())
        return super().check_action(action, parameters)

    def _on_request(self) -> bool:
        """Whether a request's own page is on top; ``detail`` outlives it."""
        return self.detail is not None and self.screen is self._detail_page

    def _chosen(self) -> RequestView | TenantView | None:
        on_page = self.detail if self._on_request() else None
        row = on_page[0] if on_page is not None else self.screen_stack[0].query_one(Rows).row
        return row if isinstance(row, RequestView | TenantView) else None

    def _gone(self) -> bool:
        if self.snapshot.state in {"ended", "past"}:
            self.note = "not a running engine: nothing to abort or hold"
            self.redraw()
            return True
        return False

    def action_abort(self) -> None:
        """Ask whether the selected request shall end."""
        row, operator = self._chosen(), self.operator
        if operator is None or self._gone():
            return
        if not isinstance(row, RequestView):
            self.note = "a aborts a request: select one"
            self.redraw()
            return
        name = row.request_id
        held = "n/a" if row.num_blocks is None else f"{row.num_blocks:,}"
        self.push_screen(
            Confirm(
                [f"Abort request {name}?", f"It holds {held} blocks; its client gets an error."],
                {"y": ("abort it", lambda: operator.abort(name))},
                ascii_only=self.ascii_only,
            )
        )

    def action_hold(self) -> None:
        """Ask whether the selected tenant's new requests shall be refused."""
        row, operator = self._chosen(), self.operator
        if operator is None or self._gone():
            return
        tenant = row.tenant if isinstance(row, TenantView) else row.tags.get("tenant") if row else None
        if not tenant:
            self.note = "h holds a tenant: the selected row has none"
            self.redraw()
            return
        self.push_screen(
            Confirm(
                [f"Hold tenant {tenant}?", "Its new requests get 429; those in flight go on."],
                {
                    "y": ("hold it for 10 minutes", lambda: operator.hold(tenant, HOLD_SECONDS)),
                    "r": ("release it", lambda: operator.hold(tenant, 0.0)),
                },
                ascii_only=self.ascii_only,
            )
        )

    # -- one request ---------------------------------------------------------------------------------

    def on_rows_opened(self, event: Rows.Opened) -> None:
        row = event.row
        if isinstance(row, TenantView):
            self.table_name, self.needle = "requests", row.tenant
            self.redraw()
        elif isinstance(row, RequestView):
            self.detail = (row, Life())
            page = self._detail_page = Page(self._detail_lines, ascii_only=self.ascii_only)
            self.push_screen(page, self._left_detail)
            self.run_worker(self._fill_detail(row))

    async def _fill_detail(self, row: RequestView) -> None:
        """Read the request's records. They may be many, so the page is open before and grows meanwhile."""
        capture = self.watches[self.current].capture
        if capture is None:
            return
        start = None if row.arrival_unix_seconds is None else int((row.arrival_unix_seconds - 1) * 1e9)
        try:
            life = await asyncio.to_thread(lambda: life_of(row, capture.events(start)))
        except (KVCatchError, OSError) as error:
            self.note = str(error)
            return
        if self.detail is not None and self.detail[0].engine_request_id == row.engine_request_id:
            self.detail = (self.detail[0], life)
            self.redraw()

    def _grow_detail(self) -> None:
        """Bring the open request up to date with the newest look."""
        if self.detail is None:
            return
        old, life = self.detail
        view = self.watches[self.current].find(old.engine_request_id) or old
        self.detail = (view, grown(life, view, self.snapshot.unix_seconds or time.time()))

    def _left_detail(self, _: None) -> None:
        self.detail = None
        self.redraw()

    def _detail_lines(self) -> list[Line]:
        if self.detail is None:
            return []
        view, life = self.detail
        return detail_lines(view, life, self.snapshot, self.look)

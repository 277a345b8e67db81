"""Columns of the tables that ``top`` shows: one declaration serves the screen and the text print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcatch.results import RankView, RequestView, Snapshot, TenantView
from kvcatch.units import human_bytes, human_count, human_ratio, human_seconds
from kvcatch.views.palette import Line, Look, clean

Getter = Callable[[Any, Snapshot], Any]
VIEWS = ("capacity", "requests", "reuse", "scheduling", "fragmentation")
TABLES = ("requests", "tenants", "ranks", "groups")


@dataclass(frozen=True)
class Column:
    """One column: ``value`` sorts and is None when unknown, ``show`` makes the text."""

    key: str
    title: str
    width: int
    value: Getter
    show: Callable[[Any], str] = human_count
    left: bool = False

    def text(self, row: Any, snapshot: Snapshot) -> str:
        """The cell, ``n/a`` when unknown."""
        value = self.value(row, snapshot)
        return "n/a" if value is None else self.show(value)


def _get(name: str) -> Getter:
    return lambda row, _: getattr(row, name)


def _share(row: RequestView, snapshot: Snapshot) -> float | None:
    pool = snapshot.pool.num_blocks
    return None if row.num_blocks is None or not pool else row.num_blocks / pool


def _slots(row: RequestView, snapshot: Snapshot) -> int | None:
    # Blocks of several groups hold the same tokens, so slots per request mean something for one group only.
    if row.num_blocks is None or not snapshot.pool.block_size or len(snapshot.groups) > 1:
        return None
    return row.num_blocks * snapshot.pool.block_size


def _fill(row: RequestView, snapshot: Snapshot) -> float | None:
    slots = _slots(row, snapshot)
    return None if not slots or row.num_tokens is None else min(1.0, row.num_tokens / slots)


def _unused(row: RequestView, snapshot: Snapshot) -> int | None:
    slots = _slots(row, snapshot)
    return None if slots is None or row.num_tokens is None else max(0, slots - row.num_tokens)


def _hit(row: RequestView | TenantView, _: Snapshot) -> float | None:
    part, whole = (
        (row.hit_tokens, row.queried_tokens)
        if isinstance(row, TenantView)
        else (row.cached_tokens, row.prompt_tokens)
    )
    return None if part is None or not whole else part / whole


def _own(row: RequestView, _: Snapshot) -> int | None:
    return None if row.num_blocks is None else row.num_blocks - (row.shared_blocks or 0)


def _rank(row: RankView, _: Snapshot) -> str:
    names = (("dp", row.dp_rank), ("pp", row.pp_rank), ("tp", row.tp_rank))
    return " ".join(f"{name}{rank}" for name, rank in names if rank is not None) or "n/a"


_REQUEST = {
    column.key: column
    for column in (
        Column("tenant", "tenant", 9, lambda row, _: row.tags.get("tenant"), str, left=True),
        Column("status", "status", 9, _get("status"), str, left=True),
        Column("blocks", "blocks", 6, _get("num_blocks")),
        Column("share", "share", 6, _share, human_ratio),
        Column("own", "own", 6, _own),
        Column("shared", "shared", 6, _get("shared_blocks")),
        Column("tokens", "tokens", 7, _get("num_tokens")),
        Column("prompt", "prompt", 7, _get("prompt_tokens")),
        Column("output", "output", 6, _get("output_tokens")),
        Column("cached", "cached", 7, _get("cached_tokens")),
        Column("hit", "hit", 6, _hit, human_ratio),
        Column("queue", "queue", 8, _get("queue_seconds"), human_seconds),
        Column("ttft", "TTFT", 8, _get("ttft_seconds"), human_seconds),
        Column("preempted", "preempt", 7, _get("num_preemptions")),
        Column("recomputed", "recomp.", 7, _get("recomputed_tokens")),
        Column("slots", "slots", 7, _slots),
        Column("fill", "fill", 6, _fill, human_ratio),
        Column("unused", "unused", 6, _unused),
        Column("age", "age", 8, _get("age_seconds"), human_seconds),
        Column("decision", "decision", 34, _get("decision"), str, left=True),
    )
}
#: per view, the columns by importance; those that do not fit the screen are left out from the right
_ORDER = {
    "capacity": "tenant status blocks share own tokens preempted age prompt output cached ttft queue",
    "requests": "tenant status blocks prompt output cached ttft age share tokens preempted queue",
    "reuse": "tenant blocks shared own prompt cached hit age status ttft tokens",
    "scheduling": "tenant status decision queue ttft preempted recomputed blocks age prompt output share",
    "fragmentation": "tenant blocks tokens slots fill unused age status share own shared",
}
_TENANT = (
    Column("blocks", "blocks", 7, _get("num_blocks")),
    Column("share", "share", 6, _get("share_ratio"), human_ratio),
    Column("running", "running", 7, _get("running")),
    Column("waiting", "waiting", 7, _get("waiting")),
    Column("preempted", "preempt", 7, _get("preemptions")),
    Column("hit", "hit", 6, _hit, human_ratio),
    Column("queried", "queried", 11, _get("queried_tokens")),
    Column("cached", "hit tokens", 11, _get("hit_tokens")),
)
_RANKS = (
    Column("used", "used", 10, _get("memory_used_bytes"), human_bytes),
    Column("peak", "peak", 10, _get("memory_peak_bytes"), human_bytes),
    Column("total", "total", 10, _get("memory_total_bytes"), human_bytes),
    Column("kv", "KV cache", 10, _get("kv_cache_bytes"), human_bytes),
    Column("others", "others", 10, _get("other_processes_bytes"), human_bytes),
    Column("step", "step", 8, _get("step_seconds"), human_seconds),
    Column("step_max", "step max", 8, _get("step_seconds_max"), human_seconds),
    Column("device", "device", 12, _get("device"), str, left=True),
)
_GROUPS = (
    Column("layers", "layers", 7, _get("layers")),
    Column("block_size", "block size", 11, _get("block_size")),
    Column("page", "page bytes", 11, _get("page_bytes")),
    Column("window", "window", 8, _get("window_tokens")),
)


#: the colour of a request's status; the word is there as well
STATUS_ROLE = {"running": "active", "preempted": "preempted", "waiting": "warning", "finished": "dim"}


@dataclass(frozen=True)
class Table:
    """One table of a snapshot, ready to show: sorted and filtered rows under fitting columns."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Any, ...]
    total: int
    empty: str

    def cells(self, row: Any, snapshot: Snapshot) -> Line:
        """One row as aligned texts with their roles."""
        cells = []
        for column in self.columns:
            text = clean(column.text(row, snapshot))
            if len(text) > column.width and column.show is human_count:
                text = _short(column.value(row, snapshot))
            text = text[: column.width].ljust(column.width) if column.left else text.rjust(column.width)
            cells.append((text, STATUS_ROLE.get(row.status, "") if column.key == "status" else ""))
        return cells

    def titles(self) -> list[str]:
        """The column titles, aligned as the cells are."""
        return [
            column.title.ljust(column.width) if column.left else column.title.rjust(column.width)
            for column in self.columns
        ]


def table(
    snapshot: Snapshot,
    name: str,
    look: Look,
    *,
    view: str = "capacity",
    sort: str = "blocks",
    reverse: bool = True,
    needle: str = "",
) -> Table:
    """Build one of TABLES for a screen of ``look.width`` columns."""
    rows: Sequence[Any]
    if name == "requests":
        first = Column("request", "request", 14, _get("request_id"), str, left=True)
        # Only kvcatch's own scheduler says what it decided; with vLLM's the column would be empty.
        governed = any(row.decision for row in snapshot.requests)
        keys = [key for key in _ORDER[view].split() if key != "decision" or governed]
        rows, rest = snapshot.requests, tuple(_REQUEST[key] for key in keys)
    elif name == "tenants":
        first = Column("tenant", "tenant", 14, _get("tenant"), str, left=True)
        rows, rest = snapshot.tenants, _TENANT
    elif name == "ranks":
        first = Column("rank", "rank", 11, _rank, str, left=True)
        rows, rest = snapshot.ranks, _RANKS
    else:
        first = Column("kind", "group", 14, _get("kind"), str, left=True)
        rows, rest = snapshot.groups, _GROUPS
    columns = _fit(first, rest, look.width)
    every = (first, *rest)
    kept = [row for row in rows if _matches(row, every, snapshot, needle)]
    by = next((column for column in every if column.key == sort), None)
    if by is not None:
        kept = _sorted(kept, by, snapshot, reverse)
    return Table(name, columns, tuple(kept), len(rows), _why_empty(snapshot, name, needle))


def _fit(first: Column, rest: tuple[Column, ...], width: int) -> tuple[Column, ...]:
    """As many columns as fit, two spaces apart; what is left over widens the first, up to 40."""
    kept: list[Column] = []
    used = first.width
    for column in rest:
        if used + 2 + column.width > width:
            break
        kept.append(column)
        used += 2 + column.width
    wide = min(40, first.width + max(0, width - used))
    return (Column(first.key, first.title, wide, first.value, first.show, left=True), *kept)


def _matches(row: Any, columns: tuple[Column, ...], snapshot: Snapshot, needle: str) -> bool:
    if not needle:
        return True
    words = [column.text(row, snapshot) for column in columns if column.left]
    if isinstance(row, RequestView):
        words += [row.engine_request_id, *(f"{key}={value}" for key, value in row.tags.items())]
    return any(needle.lower() in word.lower() for word in words)


def _sorted(rows: list[Any], column: Column, snapshot: Snapshot, reverse: bool) -> list[Any]:
    known = [row for row in rows if column.value(row, snapshot) is not None]
    unknown = [row for row in rows if column.value(row, snapshot) is None]
    return sorted(known, key=lambda row: column.value(row, snapshot), reverse=reverse) + unknown


def _why_empty(snapshot: Snapshot, name: str, needle: str) -> str:
    if needle:
        return f"no {name} match {needle!r}"
    if snapshot.state == "connecting":
        return f"{name}: n/a, no answer from the target yet"
    if name in {"requests", "tenants"} and snapshot.source == "scrape":
        return f"{name}: n/a from metrics; 'kvcatch run -- COMMAND' would record them"
    return {
        "requests": "no request holds or waits for blocks",
        "tenants": "no request, no tenant",
        "ranks": "ranks: n/a, no worker has reported",
        "groups": "groups: n/a",
    }[name]


def lines(built: Table, snapshot: Snapshot, limit: int | None = None) -> list[Line]:
    """The table as text: a title line, then one line per row, and how many were left out."""
    if not built.rows:
        return [[(built.empty, "dim")]]
    shown = built.rows if limit is None else built.rows[:limit]
    out: list[Line] = [[("  ".join(built.titles()), "title")]]
    out += [row_line(built, row, snapshot) for row in shown]
    if len(shown) < len(built.rows):
        out.append([(f"and {len(built.rows) - len(shown)} more", "dim")])
    return out


def _short(count: float) -> str:
    """A count in at most six characters, for a column it does not fit."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{unit}"
    return f"{count:.4g}"


def row_line(built: Table, row: Any, snapshot: Snapshot) -> Line:
    """One row as a line, two spaces between the columns."""
    line: Line = []
    for text, role in built.cells(row, snapshot):
        line += [("  " if line else "", ""), (text, role)]
    return line

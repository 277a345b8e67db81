"""A snapshot as text for a terminal or a pipe: the same lines the live screen shows."""

from __future__ import annotations

import textwrap

from kvcatch.results import Finding, Snapshot
from kvcatch.views import panels, tables
from kvcatch.views.palette import Line, Look, clip


def snapshot_lines(
    snapshot: Snapshot,
    look: Look,
    *,
    view: str = "capacity",
    curves: panels.Curves | None = None,
    rows: int | None = 20,
) -> list[Line]:
    """Everything ``top --once`` prints: header, pool, numbers, curves, tables, findings.

    Args:
        snapshot: what to show.
        look: width and character set.
        view: one of ``tables.VIEWS``; it chooses the numbers and the columns.
        curves: utilisation and TTFT over time, left out when nothing was seen.
        rows: at most this many rows per table, None for all.
    """
    out = [*panels.header(snapshot, look), *panels.pool_bar(snapshot, look)]
    out += panels.numbers(snapshot, view, look)
    if curves is not None and any(value is not None for value in curves.utilization):
        out += panels.curves(curves, look)
    for name in tables.TABLES:
        built = tables.table(snapshot, name, look, view=view)
        if built.rows or name == "requests":
            out += [[], *tables.lines(built, snapshot, rows)]
    told = told_lines(snapshot, look)
    if told:
        out += [[], *told]
    return [clip(line, look.width, look.glyphs.cut) for line in out]


def told_lines(snapshot: Snapshot, look: Look) -> list[Line]:
    """All findings in full, then what is missing from the record and what the source cannot know."""
    out = [line for finding in snapshot.findings for line in finding_lines(finding, look)]
    missing = [(f"warning: {text}", "warning") for text in snapshot.loss.warnings]
    if snapshot.loss.unknown:
        missing.append((f"unknown here: {', '.join(snapshot.loss.unknown)}", "dim"))
    for text, role in missing:
        out += [[(part, role)] for part in textwrap.wrap(text, look.width, subsequent_indent="    ")]
    return out


def finding_lines(finding: Finding, look: Look) -> list[Line]:
    """One finding: its title, its cause and what to do."""
    mark = look.glyphs.severity.get(finding.severity, "")
    out: list[Line] = [[(f"{mark} {finding.code} {finding.severity}: {finding.title}", finding.severity)]]
    for label, text in (("cause", finding.cause), ("do", finding.remedy)):
        wrapped = textwrap.wrap(f"{label}: {text}", look.width - 4) if text else []
        out += [[(f"    {part}", "")] for part in wrapped]
    return out

"""The runbook: one section per finding code, and one per alert that is about no finding."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from kvcatch.views.mixin_rules import ALERTS

_HEAD = """# Runbook

What each finding of kvcatch and each of its alerts means, and what to do. The code of a finding is its
anchor here and the `code` label of its alerts. TARGET is what `kvcatch top` was given: a recorder, a pid or
a `/metrics` URL.
"""


def sections() -> dict[str, dict[str, Any]]:
    """Anchor -> name, summary, impact, look, fix, escalate."""
    text = files("kvcatch.views").joinpath("runbook.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def runbook() -> str:
    """The whole page as Markdown."""
    alerts: dict[str, list[str]] = {}
    for row in ALERTS:
        alerts.setdefault(row.anchor, []).append(f"`{row.name}` ({row.severity}, after {row.wait})")
    return "\n".join(
        [_HEAD, *(_section(anchor, row, alerts.get(anchor, [])) for anchor, row in sections().items())]
    )


def _section(anchor: str, row: dict[str, Any], alerts: list[str]) -> str:
    title = f"{anchor.upper()} {row['name']}" if anchor.startswith("kvc") else row["name"].capitalize()
    lines = [f'<a id="{anchor}"></a>', "", f"## {title}", "", f"**Summary.** {row['summary']}", ""]
    if alerts:
        lines += [f"**Alerts.** {', '.join(alerts)}", ""]
    lines += [f"**Impact.** {row['impact']}", "", "**Diagnosis.**", ""]
    lines += [f"- {_code(item)}" for item in row["look"]]
    lines += ["", "**Resolution.**", ""]
    lines += [f"- {item}" for item in row["fix"]]
    lines += ["", f"**Escalation.** {row['escalate']}", ""]
    return "\n".join(lines)


def _code(item: str) -> str:
    """Commands in code style, the remark behind them outside."""
    if not item.startswith(("kvcatch ", "nvidia-smi", "curl ", "kubectl ")):
        return item
    command, space, remark = item.partition(" (")
    return f"`{command}`{space}{remark}"

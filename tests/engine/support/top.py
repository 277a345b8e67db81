"""Running ``kvcatch`` as a user does, and the engine's own metrics page."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from engine.support import env


def kvcatch(
    *arguments: str, seconds: float = 120, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """One verb in a process of its own."""
    return subprocess.run(
        [env.PYTHON, "-m", "kvcatch", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=env.environment(**environment),
        check=False,
    )


def top_json(*arguments: str, directory: str) -> dict[str, Any]:
    """``kvcatch top --once --json`` of the newest recorder of a directory."""
    done = kvcatch("top", "--once", "--json", *arguments, KVCATCH_DIR=directory)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def metric(page: str, name: str, **labels: str) -> float:
    """The sum of one series of a metrics page over all label sets that contain ``labels``."""
    total, found = 0.0, False
    for line in page.splitlines():
        match = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
        if match is None or match.group(1) != name:
            continue
        have = dict(re.findall(r'(\w+)="([^"]*)"', match.group(2) or ""))
        if labels.items() <= have.items():
            total += float(match.group(3))
            found = True
    assert found, f"no series {name} {labels} on the metrics page"
    return total

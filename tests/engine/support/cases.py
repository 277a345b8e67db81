"""Finished model-free cases: where their files are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.support import observed
from engine.support.modelfree import Case


@dataclass(frozen=True)
class Run:
    """One case: what the observer saw and where the recorder wrote."""

    case: Case
    folder: Path

    @property
    def seen(self) -> observed.Observation:
        return observed.read_all(self.folder)[0]

    @property
    def rings(self) -> list[Path]:
        return sorted((self.folder / "rings").glob("*.core0*.kvring"))

    @property
    def ring(self) -> Path:
        (ring,) = self.rings
        return ring

    @property
    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text()

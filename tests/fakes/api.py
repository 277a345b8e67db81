"""A stand-in for ``kvcatch.api`` with chosen targets and recorders."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import kvcatch
from kvcatch.errors import KVCatchError
from kvcatch.store.base import Capture


def install(
    monkeypatch: pytest.MonkeyPatch, targets: dict[str | None, Capture], recorders: list[Any] | None = None
) -> None:
    """Make ``kvcatch.api`` answer from ``targets`` and ``recorders``."""

    def opener(target: str | None = None) -> Capture:
        if target not in targets:
            raise KVCatchError(f"no such target: {target}.", "See: kvcatch ls")
        return targets[target]

    api = SimpleNamespace(open=opener, recorders=lambda: recorders or [])
    monkeypatch.setitem(sys.modules, "kvcatch.api", api)
    monkeypatch.setattr(kvcatch, "api", api, raising=False)

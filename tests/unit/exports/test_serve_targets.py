"""Which engines ``kvcatch serve live`` means."""

from __future__ import annotations

from typing import Any

import pytest

from kvcatch import api
from kvcatch.cli.serve import Opener, expand
from kvcatch.errors import KVCatchError


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the recorders of this machine, newest first."""
    names: list[str] = []

    def recorders() -> list[api.RecorderInfo]:
        return [api.RecorderInfo(name=name, path=f"/x/{name}", state="live") for name in names]

    monkeypatch.setattr(api, "recorders", recorders)
    return names


def test_live_is_every_engine_core_of_the_newest_run(machine: list[str]) -> None:
    machine += ["b.core1", "b.core0", "a.core0", "a.core1", "a.core2"]
    assert expand(["live"]) == ["live#0", "live#1"]
    assert expand(["http://n:1", "live", "x.kvcap"]) == ["http://n:1", "live#0", "live#1", "x.kvcap"]
    assert expand(["http://n:1"]) == ["http://n:1"]


def test_without_a_recorder_yet_one_is_waited_for(machine: list[str]) -> None:
    assert expand(["live"]) == ["live#0"]
    with pytest.raises(KVCatchError, match="no recorder"):
        Opener(1.0)("live#0")


def test_the_core_of_the_newest_run_is_opened(machine: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(api, "open", opened.append)
    machine += ["b.core0", "b.core1", "a.core0"]
    Opener(1.0)("live#1")
    machine[:0] = ["c.core0"]
    Opener(1.0)("live#0")
    assert opened == ["b.core1", "c.core0"]
    with pytest.raises(KVCatchError, match=r"no recorder c\.core1 yet"):
        Opener(1.0)("live#1")

"""Missed prompt tokens by cause, by hand and beside the analysis of ``kvcatch prefix``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvcatch.cli.main import main
from kvcatch.store.capture import ReplayCapture

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis_rules"))

from recordings import record, steady


def causes(capsys: pytest.CaptureFixture[str], path: str) -> dict[str, int]:
    assert main(["prefix", path, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["targets"]
    assert report["queried_tokens"] - report["hit_tokens"] == report["missed_tokens"]
    return {row["cause"]: row["tokens"] for row in report["causes"]} | {"missed": report["missed_tokens"]}


def test_by_hand(tmp_path: Path) -> None:
    # 20 requests of 100 tokens, one after the other, 64 of them the same: 4 blocks hit from the second one on.
    path = record(tmp_path, [(float(n), "t", 100, 4) for n in range(20)], shared=64)
    counted = ReplayCapture.open(path).counters()
    assert counted["missed_capacity_tokens"] == 0
    assert counted["missed_compulsory_tokens"] == 100 + 19 * 36
    assert counted["records"] > 20 * 6


def test_what_was_evicted_is_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The shared head of twelve blocks comes every ten seconds; in between 50 others of 94 blocks pass through 200.
    rows = [(10.0 * n, "t", 200, 4) for n in range(5)]
    others = [
        (at, "batch", prompt, output) for at, _, prompt, output in steady(200, 0.2, prompt=1500, output=20)
    ]
    path = record(tmp_path, [*rows, *others], blocks=201, shared=192, alone="batch")
    counted, said = ReplayCapture.open(path).counters(), causes(capsys, path)
    assert counted["missed_capacity_tokens"] + counted["missed_compulsory_tokens"] == said["missed"]
    lost = sum(said.get(name, 0) for name in ("evicted", "order", "in_flight"))
    assert counted["missed_capacity_tokens"] == lost == 4 * 192

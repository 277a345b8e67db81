"""``compare`` on recordings of the real schedulers of two vLLM releases and of three configurations, without a model.

Steps have no model time here, so only what the scheduler decides is judged: reuse, preemptions, room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.support import modelfree
from engine.support.cases import Run
from engine.support.modelfree import Case
from kvcatch.analysis.compare import Comparison, compare
from kvcatch.cli.compare import open_side
from old_engines import release

DECIDED = (
    "kv_capacity_tokens",
    "preemptions_per_request",
    "recomputed_share",
    "hit_ratio",
    "block_utilization_ratio",
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], str]:
    """label -> recording."""
    folder = tmp_path_factory.mktemp("compare")
    base = Case(model=str(tiny_model), requests=100, num_blocks=260, abort_ratio=0.0, label="base")
    cases = {
        "0.32.0": [
            base,
            dataclasses.replace(base, label="again"),
            dataclasses.replace(base, label="large", block_size=64, num_blocks=66),
            dataclasses.replace(base, label="off", prefix_caching=False),
        ],
        "0.12.0.post2": [dataclasses.replace(base, version="0.12.0.post2", label="old")],
    }
    paths = {}
    for version, wanted in cases.items():
        statuses = modelfree.run_cases(wanted, folder, release(version))
        errors = [(folder / name / "error.txt").read_text() for name, code in statuses.items() if code]
        assert not errors, errors[0]
        paths.update({case.label: str(Run(case, folder / case.name).ring) for case in wanted})
    return lambda label: paths[label]


def against(recorded: Callable[[str], str], one: str, other: str) -> Comparison:
    return compare(open_side(recorded(one)), open_side(recorded(other)))


def decided(comparison: Comparison) -> dict[str, str]:
    return {row.name: row.verdict for row in comparison.metrics if row.name in DECIDED}


def names(comparison: Comparison) -> list[str]:
    return [row.name.rpartition(".")[2] for row in comparison.drift]


def test_the_same_run_twice_differs_in_nothing_that_was_decided(recorded: Callable[[str], str]) -> None:
    comparison = against(recorded, "base", "again")
    assert set(decided(comparison).values()) == {"equal"}
    assert comparison.drift == ()


def test_larger_blocks_are_named(recorded: Callable[[str], str]) -> None:
    comparison = against(recorded, "base", "large")
    assert decided(comparison)["block_utilization_ratio"] == "worse"
    assert "--block-size 16" in comparison.restore_flags
    assert "block_size" in next(one.cause for one in comparison.findings if one.code == "KVC406")


def test_caching_off_is_named(recorded: Callable[[str], str]) -> None:
    comparison = against(recorded, "base", "off")
    assert decided(comparison)["hit_ratio"] == "worse"
    assert "--enable-prefix-caching" in comparison.restore_flags
    assert "enable_prefix_caching" in next(one.cause for one in comparison.findings if one.code == "KVC404")


def test_another_release_is_the_first_drift(recorded: Callable[[str], str]) -> None:
    comparison = against(recorded, "old", "base")
    assert comparison.paired
    assert names(comparison)[0] == "engine_version"
    assert (comparison.drift[0].a, comparison.drift[0].b) == ("0.12.0.post2", "0.32.0")
    found = next(one for one in comparison.findings if one.code == "KVC405")
    assert found.evidence[0].text == "engine_version: 0.12.0.post2 before, 0.32.0 now"
    preempted = comparison.metric("preemptions_per_request")
    assert preempted is not None
    assert preempted.a > 0
    assert preempted.b > 0

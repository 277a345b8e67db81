"""Defaults that changed although no flag did: every one is listed, the guilty one blamed, its flag undoes it."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.support import env
from engine.support.server import Ask, ask_all, server
from kvcatch.analysis.compare import Comparison, compare
from kvcatch.analysis.compare_drift import drift, one_sided
from kvcatch.analysis.engine_flags import SETTABLE
from kvcatch.cli.compare import open_side
from kvcatch.events import EngineInfo
from old_engines import release

FLAGS = ("--block-size", "32", "--num-gpu-blocks-override", "1001", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], dict[str, Any]]:
    """release -> what ``engine.support.config_dump`` says of it with the same flags."""
    folder = tmp_path_factory.mktemp("dumps")

    def of(version: str) -> dict[str, Any]:
        target = folder / f"{version}.json"
        if not target.exists():
            path = [str(env.ROOT / "tests")]
            if version != "0.32.0":
                path.insert(0, str(release(version)))
            done = subprocess.run(
                [env.PYTHON, "-m", "engine.support.config_dump", str(target), "--model", str(tiny_model), *FLAGS],
                env=env.environment(PYTHONPATH=":".join(path), VLLM_PLUGINS=""), capture_output=True, text=True,
                timeout=600, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-3000:]
        loaded: dict[str, Any] = json.loads(target.read_text())
        return loaded

    return of


def fleeting(name: str) -> bool:
    """A process's own port, place or clock, which is no setting."""
    leaf = name.rpartition(".")[2]
    return leaf.startswith("_") or bool({"port", "index", "time", "rank"} & set(leaf.split("_")))


def differing(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that both direct dumps have and that differ."""
    left, right = one["direct"], other["direct"]
    return {
        name: (left[name], right[name])
        for name in left
        if name in right and left[name] != right[name] and not fleeting(name)
    }


VERSIONS = [
    "0.31.0",
    *(pytest.param(v, marks=pytest.mark.soak) for v in ("0.12.0.post2", "0.24.0", "0.33.0")),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_differing_default_is_listed(version: str, dumped: Callable[[str], dict[str, Any]]) -> None:
    old, new = dumped(version), dumped("0.32.0")
    infos = [EngineInfo(config=dump["recorded"]) for dump in (old, new)]
    assert {row.name: (row.a, row.b) for row in drift(*infos)} == differing(old, new)
    # What one of them does not have at all is listed too, new settings with their defaults.
    mine, theirs = one_sided(*infos)
    assert set(mine) <= set(old["direct"]) - set(new["direct"])
    assert set(theirs) <= set(new["direct"]) - set(old["direct"])
    new_switches = {
        name
        for name, value in new["direct"].items()
        if name not in old["direct"] and isinstance(value, (bool, int, float)) and not fleeting(name)
    }
    assert new_switches <= set(theirs)


def test_a_flag_is_proposed_only_where_the_engine_has_one(dumped: Callable[[str], dict[str, Any]]) -> None:
    dump = dumped("0.32.0")
    flags = set(dump["flags"])
    other = {section: dict.fromkeys(values, "other") for section, values in dump["recorded"].items()}
    rows = drift(EngineInfo(config=dump["recorded"]), EngineInfo(config=other))
    proposed = {row.restore.split()[0] for row in rows if row.restore and row.restore.startswith("--")}
    assert len(proposed) >= 100
    whole = {flag for flag in proposed if "." not in flag}
    # One setting of 0.32 got its flag in 0.33.
    assert {flag for flag in whole - flags if not flag.startswith("--no-")} == {"--sleep-mode-backend"}
    assert {flag.partition(".")[0] for flag in proposed - whole} <= flags
    assert len({"--" + name.replace("_", "-") for name in SETTABLE} & flags) >= 0.85 * len(SETTABLE)


# -- real servers -----------------------------------------------------------------------------------------


def _asks() -> list[Ask]:
    rng = random.Random(11)
    return [
        Ask(f"{n:04d} " + "x" * rng.randrange(40, 120), rng.randrange(30, 60), f"r{n}") for n in range(240)
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[..., str]:
    """A recording of one server under the same load as all others."""
    folder = tmp_path_factory.mktemp("defaults")
    done: dict[str, str] = {}

    def of(label: str, *flags: str, **environment: str | None) -> str:
        if label not in done:
            rings = folder / label / "rings"
            with server(
                folder / label, tiny_model, *FLAGS, *flags, KVCATCH="1", KVCATCH_DIR=str(rings), **environment
            ) as running:
                ask_all(running.url, [Ask("warm up", 4) for _ in range(8)])
                # All at once: what each of them waits for is then the engine alone, not the client's pace.
                answers = ask_all(running.url, _asks(), concurrency=240)
                assert {answer.status for answer in answers} == {200}
                (ring,) = rings.glob("*.core0.kvring")
                done[label] = str(ring)
        return done[label]

    return of


def against(one: str, other: str) -> Comparison:
    return compare(open_side(one), open_side(other))


@pytest.mark.soak
def test_real_servers_of_two_releases(
    served: Callable[..., str], dumped: Callable[[str], dict[str, Any]]
) -> None:
    old = served("0.31", PYTHONPATH=str(release("0.31.0", compiled=True)))
    comparison = against(old, served("0.32"))
    assert comparison.paired
    listed = {row.name: (row.a, row.b) for row in comparison.drift}
    assert listed.pop("engine_version") == ("0.31.0", "0.32.0")
    assert listed == differing(dumped("0.31.0"), dumped("0.32.0"))
    new = set(dumped("0.32.0")["direct"]) - set(dumped("0.31.0")["direct"])
    assert set(comparison.only_b) <= new
    assert len(comparison.only_b) >= 5


@pytest.mark.soak
def test_a_changed_default_is_blamed_and_its_flag_undoes_it(served: Callable[..., str]) -> None:
    before = served("0.32")
    after = against(before, served("fewer", KVCATCH_TEST_SEQS="6"))
    (row,) = [row for row in after.drift if row.name == "scheduler.max_num_seqs"]
    assert (row.a, row.b) == (128, 6)
    queue = next(one for one in after.findings if one.code == "KVC403")
    assert "scheduler.max_num_seqs changed from 128 to 6" in queue.cause
    assert queue.remedy.endswith("Restore with: --max-num-seqs 128")
    assert "--max-num-seqs 128" in after.restore_flags
    restored = against(before, served("restored", *row.restore.split(), KVCATCH_TEST_SEQS="6"))
    assert restored.drift == ()
    # What is left is what one run differs from the next on a shared machine: a small part of what the default did.
    caused, left = after.metric("queue_seconds"), restored.metric("queue_seconds")
    assert caused is not None
    assert left is not None
    assert caused.verdict == "worse"
    assert abs(left.difference) <= 0.15 * caused.difference

"""Installing kvcatch beside vLLM: nothing that vLLM has moves, and every supported release allows it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
#: what vLLM itself requires of packages that kvcatch requires too (Requires-Dist of the wheels)
VLLM = {
    "0.12.0": ["numpy", "numba==0.61.2", "prometheus_client>=0.18.0", "msgspec", "pyzmq>=25.0.0", "aiohttp"],
    "0.24.0": [
        "numpy",
        "numba==0.65.0",
        "prometheus_client>=0.18.0",
        "msgspec",
        "pyzmq>=25.0.0",
        "aiohttp>=3.13.3",
    ],
    "0.32.0": [
        "numpy",
        "numba==0.65.0",
        "prometheus_client>=0.18.0",
        "msgspec",
        "pyzmq>=25.0.0",
        "aiohttp>=3.13.3",
    ],
    "0.33.0": [
        "numpy",
        "numba==0.65.0",
        "prometheus_client>=0.18.0",
        "msgspec",
        "pyzmq>=25.0.0",
        "aiohttp>=3.14.4",
    ],
}
#: removed on purpose by tools/engine_env.py
REMOVED = {"torchvision", "torchaudio", "torchcodec"}


def names(folder: Path) -> set[str]:
    """Distributions installed in a site-packages folder."""
    return {re.sub(r"[-_.]+", "-", path.name.split("-")[0]).lower() for path in folder.glob("*.dist-info")}


def test_no_package_of_the_engine_was_replaced() -> None:
    overlay = Path(sys.prefix) / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    engine = Path((overlay / "zz_engine.pth").read_text().strip())
    assert names(overlay) & names(engine) <= {"pip"}
    assert "kvcatch" in names(overlay)
    assert "vllm" in names(engine)


def test_pip_check_is_clean() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in done.stdout.splitlines() if not any(name in line for name in REMOVED)]
    assert complaints in ([], ["No broken requirements found."])


@pytest.mark.parametrize("release", sorted(VLLM))
def test_our_requirements_allow_what_the_release_pins(release: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [Requirement(text) for text in project["dependencies"]]
    ours += [Requirement(t) for extra in project["optional-dependencies"].values() for t in extra]
    theirs = {re.sub(r"[-_.]+", "-", r.name): r for r in map(Requirement, VLLM[release])}
    for requirement in ours:
        assert all(s.operator in (">=", ">") for s in requirement.specifier), f"{requirement}: no upper pins"
        other = theirs.get(re.sub(r"[-_.]+", "-", requirement.name))
        for specifier in other.specifier if other else ():
            assert requirement.specifier.contains(Version(specifier.version)), (
                f"{requirement} against {other}"
            )

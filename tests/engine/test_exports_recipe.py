"""The steps of docs/deploy.md, verbatim, in a clean virtual environment."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_the_steps_of_the_page_run_as_they_stand(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    (script,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    tree = tmp_path / "repository"
    tree.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE", "tests/data/metrics"):
        source, place = ROOT / name, tree / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
    done = subprocess.run(
        ["bash", "-e", "-u", "-m", "-c", script],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"status": "ok"' in done.stdout
    assert re.search(r"kvcatch_kv_cache_capacity_blocks\{.*\} 255\.0", done.stdout)
    assert (tree / "monitoring" / "rules" / "kvcatch-alerts.yml").exists()

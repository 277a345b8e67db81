"""Draws from ServeGen's client parameters have the rates, spreads and lengths that the parameters name."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from kvcatch.errors import KVCatchError
from kvcatch.sources.servegen import is_servegen, read_servegen


def client(folder: Path, number: int, rows: list[str], lengths: dict[str, dict[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"chunk-{number}-trace.csv").write_text("\n".join(rows) + "\n")
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(lengths))


def pool(folder: Path) -> Path:
    client(folder, 0, ["0,2.0,2.0,Gamma,0.25,2.0", "600,0.0,0,,,"], {
        "0": {"input_tokens": "{100: 0.25, 200: 0.75}", "output_tokens": "{10: 1.0}", "reason_ratio": "{0.1: 1.0}"},
    })  # fmt: skip
    client(folder, 1, ["0,1.0,1.0,Weibull,1.0,1.0", "600,5.0,1.0,,,"], {
        "0": {"text_tokens": "{7: 1.0}", "image_tokens": "{50: 1.0}", "image_count": "{2: 1.0}", "output_tokens": "{3: 1.0}"},
    })  # fmt: skip
    return folder


def test_rates_spreads_and_lengths(tmp_path: Path) -> None:
    assert is_servegen(pool(tmp_path / "pool"))
    made = read_servegen(tmp_path / "pool", span=600)
    tenant = np.array(made.tenants)[made.tenant_index]
    gamma = made.arrival_seconds[tenant == "client-0"]
    # Mean gap 0.25 * 2 s, coefficient of variation 1 / sqrt(0.25); 1,200 gaps.
    gaps = np.diff(gamma)
    assert gaps.mean() == pytest.approx(0.5, rel=0.2)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.25)
    assert (tenant == "client-1").sum() == pytest.approx(600, rel=0.15)
    assert set(made.prompt_tokens[tenant == "client-1"]) == {107}
    drawn = made.prompt_tokens[tenant == "client-0"]
    assert (drawn == 200).mean() == pytest.approx(0.75, abs=0.05)
    assert set(made.output_tokens[tenant == "client-0"]) == {10}
    assert np.all(np.diff(made.arrival_seconds) >= 0)


def test_spans_seeds_and_tars(tmp_path: Path) -> None:
    folder = pool(tmp_path / "pool")
    later = read_servegen(folder, start=600, span=300)
    assert set(later.tenants) == {"client-1"}
    assert len(later) == pytest.approx(1500, rel=0.12)
    assert read_servegen(folder).arrival_seconds.tolist() == read_servegen(folder).arrival_seconds.tolist()
    assert (
        read_servegen(folder, seed=1).arrival_seconds.tolist()
        != read_servegen(folder).arrival_seconds.tolist()
    )
    path = tmp_path / "p.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, "reason/r1")
        archive.add(folder, "image/m")
    assert is_servegen(path)
    with pytest.raises(KVCatchError, match="2 pools"):
        read_servegen(path)
    assert len(read_servegen(path, pool="reason")) == len(read_servegen(folder))


def test_bad_input_is_named(tmp_path: Path) -> None:
    assert not is_servegen(tmp_path)
    with pytest.raises(KVCatchError, match="no chunk"):
        read_servegen(tmp_path)
    client(tmp_path / "a", 0, ["0,1.0,1.0,Pareto,1.0,1.0"], {"0": {"output_tokens": "{3: 1.0}"}})
    with pytest.raises(KVCatchError, match="Pareto"):
        read_servegen(tmp_path / "a")
    client(tmp_path / "b", 0, ["0,x"], {})
    with pytest.raises(KVCatchError, match="line 1"):
        read_servegen(tmp_path / "b")
    (tmp_path / "b/chunk-0-trace.csv").write_text("0,1,1,,,\n")
    (tmp_path / "b/chunk-0-dataset.json").write_text("[1]")
    with pytest.raises(KVCatchError, match="damaged"):
        read_servegen(tmp_path / "b")
    with pytest.raises(KVCatchError, match="span"):
        read_servegen(pool(tmp_path / "c"), span=0)

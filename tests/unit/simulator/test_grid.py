"""Sweeps by threads, processes and Ray give one table; the page shows what no other run beats."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.cli.main import main
from kvcatch.data import CONVERSATION
from kvcatch.errors import KVCatchError
from kvcatch.simulator import load
from kvcatch.simulator.engine import EngineSettings, sweep_engine
from kvcatch.simulator.whatif import sweep
from kvcatch.simulator.workers import Workers, run_all
from kvcatch.views.html.pareto import POOL, frontier, page

GRID = [
    EngineSettings(num_blocks=blocks, block_size=512, max_num_seqs=seqs)
    for blocks in (300, 600)
    for seqs in (8, 64)
]


def workload():
    return load(CONVERSATION).head(150)


def test_processes_give_the_table_of_threads() -> None:
    asked = workload()
    expected = sweep_engine(asked, GRID)
    assert sweep_engine(asked, GRID, workers=Workers(jobs=2)) == expected
    seen: list[tuple[int, int]] = []
    again = sweep_engine(asked, GRID, workers=Workers("processes", 2), progress=lambda *at: seen.append(at))
    assert again == expected
    assert seen == [(n, 4) for n in range(1, 5)]


@pytest.mark.soak
def test_a_local_ray_cluster_gives_the_same_table() -> None:
    pytest.importorskip("ray")
    asked = workload()
    assert sweep_engine(asked, GRID, workers=Workers("ray", address="local")) == sweep_engine(asked, GRID)
    cells = ([100, None], [512, 1024], ["lru", "fifo"])
    assert sweep(asked, *cells, workers=Workers("ray", address="local")) == sweep(asked, *cells)


def refuse(shared: str, cell: int) -> int:
    raise KVCatchError(f"{shared} {cell} is refused.")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_error_of_a_run_comes_through_as_it_was(kind: str) -> None:
    with pytest.raises(KVCatchError, match="cell 3 is refused"):
        run_all(refuse, "cell", [3], Workers(kind, 2))


def test_unknown_workers_are_named() -> None:
    with pytest.raises(KVCatchError, match="'cluster'"):
        run_all(refuse, "", [1], Workers("cluster"))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), max_size=25))
def test_the_frontier_is_what_nobody_beats(points: list[tuple[int, int]]) -> None:
    rows = [{"capacity_tokens": cost, "token_hit_ratio": gain / 30} for cost, gain in points]

    def beaten(one: tuple[int, int]) -> bool:
        return any(o[0] <= one[0] and o[1] >= one[1] and o != one for o in points)

    assert sorted(frontier(rows, POOL)) == [n for n, one in enumerate(points) if not beaten(one)]


def test_table_and_page_of_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    words = ["simulate", str(CONVERSATION), "--limit", "150", "--num-blocks", "300,600", "--json"]
    words += ["--engine", "--max-num-seqs", "8,64", "--jobs", "1", "--table"]
    assert main([*words, str(tmp_path / "t.parquet"), "--report", str(tmp_path / "r.html")]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    table = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["num_blocks"] for row in table] == [300, 300, 600, 600]
    assert [row["ttft_p99_seconds"] for row in table] == [row["ttft_seconds"]["p99"] for row in results]
    assert main([*words, str(tmp_path / "t.csv")]) == 0
    with open(tmp_path / "t.csv", newline="") as file:
        assert [row["preemptions"] for row in csv.DictReader(file)] == [
            str(row["preemptions"]) for row in results
        ]
    html = (tmp_path / "r.html").read_text()
    assert html.count("<circle") == 4
    assert "4 runs" in html
    assert not re.search(r"(src|href)=|https?://(?!www\.w3)", html)


def test_a_page_without_numbers_says_so_and_hides_nothing(tmp_path: Path) -> None:
    told = page([{"num_blocks": None, "block_size": 16, "policy": "<lru>", "token_hit_ratio": 0.5}])
    assert "No run has both numbers" in told
    assert "&lt;lru&gt;" not in told or "<lru>" not in told


def test_the_first_in_rank_waits_least(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 64, "output_length": 9, "hash_ids": [2 * n, 2 * n + 1], "block_size": 32,
         "tenant": ("slow", "fast")[n >= 10]}
        for n in range(20)
    ]  # fmt: skip
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    words = ["simulate", str(trace), "--engine", "--num-blocks", "40", "--max-num-seqs", "5", "--json"]
    waits = []
    for more in ([], ["--priority", "fast=-1"]):
        assert main([*words, *more]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        waits.append(
            (result["scheduling"], result["queue_seconds"]["mean"], result["output_tokens_per_second"])
        )
    assert [name for name, _, _ in waits] == ["fcfs", "priority"]
    # Who goes first changes, how much is done does not: all prompts are alike.
    assert waits[0][1:] == pytest.approx(waits[1][1:])
    for bad in ("fast", "fast=x", "nobody=1"):
        assert main([*words, "--priority", bad]) == 2


def test_a_table_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    words = ["simulate", str(CONVERSATION), "--limit", "5", "--table", str(tmp_path / "t.xls")]
    assert main(words) == 2

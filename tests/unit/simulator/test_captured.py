"""A recording becomes a workload, and simulating that workload gives what was recorded."""

from __future__ import annotations

import contextlib
import io
import json

import numpy as np
import pytest

from kvcatch import api
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.simulator.engine import EngineSettings, simulate_engine
from kvcatch.simulator.fit import fit_step_cost
from kvcatch.sources.captured import workload_of


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "demo.kvring"
    page = str(path.with_suffix(".html"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["demo", "--requests", "70", "--json", "-o", str(path), "--report", page]) == 0
    path.with_suffix(".json").write_text(printed.getvalue())
    return path


def test_what_demo_prints_is_what_it_recorded(recording, capsys):
    document = json.loads(recording.with_suffix(".json").read_text())
    assert (document["requests"], document["schema_version"]) == (70, 1)
    pool = document["moment"]["pool"]
    assert pool["active_blocks"] + pool["cached_blocks"] + pool["free_blocks"] == pool["num_blocks"]
    assert document["moment"]["loss"]["dropped_records"] == 0
    assert document["report"] == str(recording.with_suffix(".html"))
    assert {finding["code"] for finding in document["findings"]} >= {"KVC003"}
    assert main(["top", "--once", "--json", str(recording)]) == 0
    assert json.loads(capsys.readouterr().out)["prefix"]["hit_tokens"] == document["hit_tokens"] > 0
    assert main(["demo", "-o", str(recording)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["demo", "--requests", "3"]) == 2


def test_simulating_a_recording_gives_what_was_recorded(recording):
    capture = api.open(str(recording))
    workload, measured = workload_of(capture)
    totals = capture.snapshot()
    assert len(workload) == 70
    assert workload.notes == ()
    assert int(measured.cached_tokens.sum()) == totals.prefix.hit_tokens
    info = capture.info
    settings = EngineSettings(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
    )
    result = simulate_engine(workload, settings)
    assert result.hit_tokens == totals.prefix.hit_tokens
    assert result.queried_tokens == totals.prefix.queried_tokens
    assert result.preemptions == totals.preemption.preemptions
    assert result.recomputed_tokens == totals.preemption.recomputed_tokens
    # The recording was made with the default cost, so the search starts there. Ends are stamped when the next
    # step begins, which is later than the simulation's when the engine falls idle.
    fit = fit_step_cost(workload, settings, measured.first_token, measured.finished)
    assert fit.error_seconds < 0.02


def test_validate_passes_on_its_own_settings_and_fails_on_others(recording, capsys):
    assert main(["simulate", str(recording), "--validate", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    checks = document["traces"][0]["checks"]
    assert {check["what"]: check["within"] for check in checks} == {"hit_tokens": True, "preemptions": True}
    other = ["--num-blocks", "1500", "--step-cost", "fixed=7ms,prefill=25us"]
    assert main(["simulate", str(recording), "--validate", *other]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_engine_sweep_over_a_recording(recording, capsys):
    code = main(
        ["simulate", str(recording), "--engine", "--num-blocks", "9000,40000", "--watermark", "0,0.1",
         "--max-num-seqs", "64", "--speed", "2", "--json"]
    )  # fmt: skip
    results = json.loads(capsys.readouterr().out)["results"]
    assert code == 0
    assert [(r["num_blocks"], r["watermark"]) for r in results] == [
        (9000, 0.0), (9000, 0.1), (40000, 0.0), (40000, 0.1),
    ]  # fmt: skip
    assert results[0]["preemptions"] > results[1]["preemptions"]
    assert results[0]["max_num_batched_tokens"] == 8192  # the recording's own
    assert {tenant["tenant"] for tenant in results[0]["tenants"]} == {
        "assistant", "search", "coding", "contracts",
    }  # fmt: skip


class Events:
    """A capture of a few events."""

    target = "few"

    def __init__(self, events, block_size=16):
        self.info = EngineInfo(block_size=block_size)
        self._events = events

    def events(self):
        return iter(self._events)


def arrive(rid, prompt, at, hashes=2):
    return {
        "kind": "arrive", "rid": rid, "unix_ns": at, "prompt_tokens": prompt, "tags": {}, "num_hashes": hashes,
    }  # fmt: skip


def finish(rid, at):
    return {
        "kind": "finish", "rid": rid, "unix_ns": at, "output_tokens": 4, "preemptions": 1, "recomputed_tokens": 7,
    }  # fmt: skip


def test_chains_branch_and_survive_an_epoch():
    events = [
        arrive(1, 40, 0),
        {"kind": "chain", "rid": 1, "parent_node": 0, "start": 0, "hashes": ["a", "b"]},
        arrive(2, 40, 10**9),
        # The second request shares its first block: its chain hangs on node 1.
        {"kind": "chain", "rid": 2, "parent_node": 1, "start": 1, "hashes": ["c"]},
        {"kind": "first_token", "rid": 1, "unix_ns": 2 * 10**9},
        finish(1, 3 * 10**9),
        {"kind": "epoch"},
        arrive(3, 40, 4 * 10**9),
        {"kind": "chain", "rid": 3, "parent_node": 0, "start": 0, "hashes": ["a", "c"]},
        finish(2, 5 * 10**9),
        finish(3, 6 * 10**9),
        arrive(4, 40, 7 * 10**9),
    ]
    workload, measured = workload_of(Events(events))
    first, second, third = (
        workload.segment_ids[a:b].tolist()
        for a, b in zip(workload.offsets, workload.offsets[1:], strict=False)
    )
    assert first[0] == second[0] == third[0]
    assert second[1] == third[1] != first[1]
    assert len({first[2], second[2], third[2]}) == 3
    assert workload.arrival_seconds.tolist() == [0, 1, 4]
    assert measured.first_token[0] == 2
    assert np.isnan(measured.first_token[1])
    assert (measured.preemptions, measured.recomputed_tokens) == (3, 21)
    assert workload.notes == ("1 requests had not ended and are left out",)


def test_arrivals_keep_their_nanoseconds_whatever_the_date():
    # As seconds since 1970 a double holds half a microsecond; the distance of two arrivals is exact.
    start = 1_796_125_579_697_217_903
    rows = [
        arrive(1, 40, start),
        arrive(2, 40, start + 7_812_501),
        finish(1, start + 10**9),
        finish(2, start + 10**9),
    ]
    assert workload_of(Events(rows))[0].arrival_seconds.tolist() == [0.0, 0.007812501]


def test_what_is_not_known_is_said():
    lone = [arrive(1, 40, 0, hashes=None), finish(1, 1)]
    assert "incomplete" in workload_of(Events(lone))[0].notes[0]
    with pytest.raises(KVCatchError, match="no request that ended"):
        workload_of(Events([arrive(1, 40, 0)]))
    with pytest.raises(KVCatchError, match="block size"):
        workload_of(Events(lone, block_size=0))

"""What a report says of a real run (vLLM 0.32 on a CPU, killed) against slower ways of counting the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch import api
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.store.replay import Replay
from kvcatch.views.html.blocks import residency
from kvcatch.views.html.content import gather
from kvcatch.views.html.page import render
from kvcatch.views.html.thin import Slices, log_histogram

CRASH = str(Path(__file__).parents[2] / "data" / "top" / "crash.kvcap")


@pytest.fixture(scope="module")
def report():
    return gather(CRASH)


@pytest.fixture(scope="module")
def capture():
    opened = api.open(CRASH)
    opened.refresh()
    yield opened
    opened.close()


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1000)), min_size=1, max_size=300),
    st.integers(2, 40),
)
def test_thinning_keeps_every_peak_and_every_count(rows, most):
    times = np.sort(np.array([time for time, _ in rows], np.int64))
    values = np.array([value for _, value in rows])
    slices = Slices(times, most)
    assert len(slices) <= max(most, 1) or len(rows) <= most
    assert slices.highest(values).max() == values.max()
    assert slices.lowest(values).min() == values.min()
    assert slices.total(values).sum() == values.sum()
    assert values[slices.row_of_highest(values)].tolist() == slices.highest(values).tolist()


def test_a_log_histogram_loses_nothing():
    histogram = log_histogram([0.0, 0.001, 0.5, 40.0, 40.0])
    assert sum(histogram["counts"]) == 5
    assert histogram["edges"][0] == pytest.approx(0.001)
    assert log_histogram([]) is None


def test_the_curves_add_up_to_the_totals_of_the_run(report, capture):
    curves, last = report.charts["curves"], capture.snapshot()
    assert max(curves["active"]) == max(capture.samples()["active_blocks"])
    assert sum(curves["preemptions"]) == last.preemption.preemptions == 94
    assert sum(curves["recomputed"]) == last.preemption.recomputed_tokens
    first = [view.ttft_seconds for view in capture.requests() if view.ttft_seconds is not None]
    assert max(curves["ttft"]) == pytest.approx(max(first), rel=1e-3)
    assert len(curves["ttft"]) == len(first)


def test_tenants_hold_at_each_moment_what_a_replay_says(report, capture):
    """The state machine is stepped through; at some moments its block lists are counted by tenant."""
    held, info = report.charts["holders"], capture.info
    offset = info.start_unix_ns - info.start_monotonic_ns - int(capture.samples()["unix_ns"][0])
    wanted = {ms: at for at, ms in enumerate(held["x"]) if at % 20 == 0}
    replay = Replay(CRASH)
    checked = 0
    for state in replay.capture.steps():
        at = wanted.get(((state.row[1] | state.row[2] << 32) + offset) // 1_000_000)
        if at is None:
            continue
        checked += 1
        counted = Counter()
        largest = {}
        for request in state.requests.values():
            blocks = sum(1 for block in request.blocks[0] if block) if request.blocks else 0
            counted[request.tags["tenant"]] += blocks
            largest.setdefault(request.tags["tenant"], []).append(blocks)
        for tenant in held["tenants"]:
            assert tenant["blocks"][at] == counted[tenant["name"]]
            shown = [blocks for _, blocks in tenant["largest"][at]]
            assert shown == sorted((b for b in largest.get(tenant["name"], []) if b), reverse=True)[:12]
    assert checked == len(wanted)


def test_residency_agrees_with_walking_the_events(capture):
    """For each evicted block the time since some request last took it, one event after the other."""
    rows = capture.samples()["unix_ns"]
    taken, times, evicted, pending = {}, [], [], []
    step = 0
    for event in capture.events():
        kind = event["kind"]
        if kind == "blocks":
            pending += event["block_ids"]
        elif kind == "evict":
            evicted += event["block_ids"]
        elif kind == "sample":
            times += [rows[step] - rows[taken.pop(block)] for block in evicted if block in taken]
            taken.update(dict.fromkeys(pending, step))
            pending, evicted = [], []
            step += 1
    found = residency(CRASH, rows)
    assert found["evicted"] == len(times)
    seconds = np.array(times) / 1e9
    assert found["lifetime"]["edges"][0] == pytest.approx(seconds.min(), rel=1e-3)
    expected, _ = np.histogram(seconds, np.geomspace(seconds.min(), seconds.max() * 1.0001, 29))
    assert found["lifetime"]["counts"] == expected.tolist()
    assert sum(found["idle"]["counts"]) == len(times)


def test_the_lives_of_preempted_requests_come_first(report, capture):
    rows = report.charts["lives"]["rows"]
    views = {view.request_id: view for view in capture.requests()}
    assert len(rows) == len(views) == 103
    assert [len(row[11]) for row in rows[:5]] == sorted(
        (v.num_preemptions for v in views.values()), reverse=True
    )[:5]
    for row in rows:
        assert len(row[11]) == views[row[0]].num_preemptions
        for stop, again, _ in row[11]:
            assert again is None or again >= stop


def test_the_verdict_names_the_worst_finding_and_the_number_behind_it(report):
    assert report.severity == "critical"
    assert report.findings[0]["title"] in report.verdict
    assert [name for name, _, _ in report.numbers] == ["Peak cache use", "TTFT p95", "Prefix hits"]
    assert report.numbers[0][1] == "100%"  # 159 of 159 blocks
    assert report.charts["reuse"]["today"] == 159
    assert "2,176 prefill tokens" in report.saved  # 68 blocks of 32


def test_the_page_loads_nothing_and_names_cannot_break_out(report):
    hostile = "</script><img src=x onerror=alert(1)>"
    charts = {**report.charts, "titles": {**report.charts["titles"], "use": hostile}}
    page = render(msgspec.structs.replace(report, verdict=hostile, title=hostile, charts=charts))
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert len(page) < 400_000
    for reference in ("src=", "@import", "url(http", "fetch(", "XMLHttpRequest", "WebSocket"):
        assert reference not in render(report)


def test_a_part_of_the_run(report, capture):
    unix = capture.samples()["unix_ns"]
    middle = int(unix[len(unix) // 2])
    later = gather(CRASH, start=middle)
    assert later.charts["start_unix_ms"] == middle // 1_000_000
    assert later.charts["span_ms"] < report.charts["span_ms"]
    with pytest.raises(KVCatchError, match="no step was recorded"):
        gather(CRASH, start=int(unix[-1]) + 1)


def test_the_verb_writes_once_and_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", CRASH]) == 0
    assert "Wrote kvcatch-report-crash.html" in capsys.readouterr().out
    assert main(["report", CRASH]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["report", CRASH, "--force", "--last", "5s"]) == 0
    assert main(["report", CRASH, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["schema_version"] == 1
    assert document["findings"][0]["code"] == "KVC002"
    page = tmp_path / "a.prom"
    page.write_text("# TYPE vllm:num_requests_running gauge\n")
    assert main(["report", str(page)]) == 2
    assert "not a recording" in capsys.readouterr().err
    assert main(["report", "nowhere.kvcap"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_truncated_recording_gives_what_it_holds_and_says_so(tmp_path):
    cut = tmp_path / "cut.kvcap"
    cut.write_bytes(Path(CRASH).read_bytes()[:30_000])
    part = gather(str(cut))
    assert 0 < part.charts["span_ms"] < 36_000
    assert any("byte" in text for text in part.losses[1:])

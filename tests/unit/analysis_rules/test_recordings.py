"""Rules over recordings: the description's incident, storms, limits; and silence over healthy runs."""

from __future__ import annotations

import json

import msgspec
import pytest
from recordings import record, steady

from kvcatch.analysis.doctor import Diagnosis, glance
from kvcatch.cli.main import main
from kvcatch.diagnosis import find
from kvcatch.store.capture import ReplayCapture


def codes(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.code: finding.severity for finding in diagnosis.findings}


def test_the_incident_is_named_with_request_tenant_time_share_and_remedy(long_one):
    diagnosis = find(long_one)
    (hog,) = [finding for finding in diagnosis.findings if finding.code == "KVC003"]
    assert hog.tenant == "contracts"
    assert hog.severity in ("warning", "critical")
    # 1,900 prompt and up to 400 generated tokens: at least 119, at most 144 of the 400 usable blocks.
    assert 119 <= hog.evidence[0].value <= 144
    assert abs(hog.unix_seconds - (1_764_439_200 + 5.0)) < 1.5
    # The longest usual prompt is 300 tokens; the limit is the next multiple of 256.
    assert hog.remedy == (
        "kvcatch gateway --max-input-tokens 512 --over-long reject --long-share 0.3 --long-concurrency 1"
    )
    assert f"{hog.evidence[0].value / 400:.0%}" in hog.title


def test_a_slice_around_the_incident_says_the_same(long_one, capsys):
    path = long_one
    assert main(["doctor", path, "--json", "--no-prefix"]) == 1
    whole = json.loads(capsys.readouterr().out)
    assert main(["doctor", path, "--json", "--no-prefix", "--from", "1764439203", "--to", "1764439213"]) == 1
    part = json.loads(capsys.readouterr().out)

    def hog(document):
        (one,) = [finding for finding in document["findings"] if finding["code"] == "KVC003"]
        return one["request_id"], one["tenant"], one["remedy"], one["evidence"][0]["value"]

    assert hog(part) == hog(whole)


def test_before_the_incident_there_is_nothing_to_say(long_one, capsys):
    assert main(["doctor", long_one, "--no-prefix", "--to", "1764439204"]) == 0
    assert "Nothing found" in capsys.readouterr().out


def test_a_burst_beyond_the_pool_is_pressure_and_its_growth_a_storm(burst):
    diagnosis = find(burst)
    found = codes(diagnosis)
    assert found["KVC001"] in ("warning", "critical")
    assert found["KVC002"] in ("warning", "critical")
    assert "KVC003" not in found
    (pressure,) = [finding for finding in diagnosis.findings if finding.code == "KVC001"]
    fits = next(row.value for row in pressure.evidence if "mean size" in row.text)
    # 500 tokens are 32 blocks: 95 % of 400 hold 11 or 12 of them.
    assert 11 <= fits <= 12


def test_a_tenant_that_fills_the_pool_is_named(tmp_path):
    # Three tenants; one sends nine of ten requests, and all arrive at once.
    rows = [
        (arrival, "batch" if number % 10 else tenant, prompt, output)
        for number, (arrival, tenant, prompt, output) in enumerate(steady(200, 0.001, output=300, tenants=2))
    ]
    hogs = [one for one in find(record(tmp_path, rows)).findings if one.code == "KVC003"]
    assert [one.tenant for one in hogs] == ["batch"]
    assert 0.75 <= hogs[0].evidence[0].value <= 1.0


def test_a_sequence_limit_is_not_the_pools_fault(tmp_path):
    found = codes(find(record(tmp_path, steady(100, 0.001), max_num_seqs=4)))
    assert found["KVC010"] == "info"
    assert "KVC001" not in found


def test_a_token_budget_is_not_the_pools_fault(tmp_path):
    rows = steady(100, 0.001, prompt=400, output=2)
    found = codes(find(record(tmp_path, rows, blocks=4001, budget=256, max_num_seqs=256)))
    assert found["KVC007"] == "info"
    assert "KVC001" not in found


def test_short_requests_in_large_blocks_fragment(tmp_path):
    # 17 tokens in blocks of 128 leave seven eighths of each block empty.
    rows = steady(300, 0.002, prompt=14, output=6)
    found = codes(find(record(tmp_path, rows, blocks=17, block_size=128)))
    assert "KVC301" in found


HEALTHY = [
    *({"seed": seed, "every": 0.05 + 0.01 * (seed % 5)} for seed in range(12)),
    # Mostly decoding, long outputs, no waiting.
    *({"seed": seed, "every": 0.2, "output": 200, "prompt": 60} for seed in range(6)),
    # Long prompts that are usual here.
    *({"seed": seed, "every": 0.3, "prompt": 900, "output": 20, "blocks": 1001} for seed in range(4)),
    # A shared prefix; the pool fills with cached blocks.
    *({"seed": seed, "every": 0.06, "shared": 64} for seed in range(4)),
    # A burst at the start (warm-up) that waits for the token budget for a moment.
    *({"seed": seed, "every": 0.05, "burst": 12} for seed in range(4)),
    # A pool 95 % full of active blocks in which nothing waits.
    *(
        {"seed": seed, "every": 0.001, "count": 16, "prompt": 200, "output": 100, "exact": True}
        for seed in range(4)
    ),
]


@pytest.mark.parametrize("run", HEALTHY, ids=str)
def test_healthy_runs_give_no_warning(tmp_path, run):
    run = dict(run)
    blocks, shared = run.pop("blocks", 401), run.pop("shared", 0)
    burst, exact = run.pop("burst", 0), run.pop("exact", False)
    rows = steady(run.pop("count", 120), **run)
    rows += [(0.0, "tenant0", 200, 40)] * burst
    if exact:
        need = sum(-(-(prompt + output) // 16) for _, _, prompt, output in rows)
        blocks = round(need / 0.95) + 1
    diagnosis = find(record(tmp_path, rows, blocks=blocks, shared=shared))
    assert [one for one in diagnosis.findings if one.severity != "info"] == []


def test_single_preemptions_are_no_storm(tmp_path):
    # Eight requests whose full lengths exceed the pool by a little: a few are preempted once.
    rows = [(0.0, "t", 200, 230)] * 4 + [(0.01, "t", 180, 230)] * 4 + steady(60, 0.4, seed=3)
    path = record(tmp_path, rows, blocks=205)
    diagnosis = find(path)
    assert "KVC002" not in codes(diagnosis)


def test_a_living_engine_shows_what_its_last_minutes_did(burst):
    capture = ReplayCapture.open(burst)
    # The record has ended; as if the engine still lived.
    snapshot = msgspec.structs.replace(capture.snapshot(), state="live")
    found = {one.code: one for one in glance(snapshot, capture)}
    assert found["KVC002"].severity == "critical"
    assert found["KVC002"].evidence[0].value == capture.state.totals["preemptions"]
    # At its end nothing runs or waits any more.
    assert "KVC001" not in found
    assert glance(capture.snapshot(), capture) == ()


def test_prefix_of_a_span_knows_what_came_before(tmp_path, capsys):
    # Every request shares 64 of its tokens; the first one is before the span.
    path = record(tmp_path, [(float(n), "t", 100, 4) for n in range(20)], shared=64)
    assert main(["prefix", path, "--json", "--from", "1764439210"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["targets"]
    assert report["requests"] in (9, 10)
    assert report["hit_tokens"] == 64 * report["requests"]
    assert (
        sum(row["tokens"] for row in report["causes"]) == report["missed_tokens"] == 36 * report["requests"]
    )

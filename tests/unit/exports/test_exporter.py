"""The exporter against its catalogue, and what it must never show."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fakes.capture import FakeCapture, snapshot
from kvcatch import __version__
from kvcatch.analysis.doctor import glance
from kvcatch.errors import KVCatchError
from kvcatch.metrics import BY_NAME, CATALOGUE, ENGINE_LABELS
from kvcatch.results import Headroom, LossView, Pool, Queues, RankView, Snapshot, TenantView
from kvcatch.sources.cards import Card
from kvcatch.sources.openmetrics import parse
from kvcatch.sources.scrape import ScrapeCapture
from kvcatch.store.base import BOUNDS
from kvcatch.views.prometheus import bounded, memory_owners, registry
from kvcatch.views.targets import Fleet, Target

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def target(state: Snapshot | None = None, rows: list[dict[str, int]] | None = None) -> Target:
    capture = FakeCapture(state)
    capture.rows = rows or []
    one = Target(capture.target, lambda _: capture, interval_seconds=1)
    one.read()
    return one


def exported(*targets: Target) -> Series:
    text = generate_latest(registry(Fleet(targets).observations)).decode()
    got: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in got
            got[key] = sample.value
    return got


def value(series: Series, name: str, **labels: str) -> float | None:
    hits = [
        number
        for (found, pairs), number in series.items()
        if found == name and labels.items() <= dict(pairs).items()
    ]
    assert len(hits) <= 1
    return hits[0] if hits else None


FULL = {
    "pool": Pool(
        num_blocks=100, active_blocks=60, cached_blocks=25, free_blocks=15, block_size=16, active_tokens=930,
        block_bytes=1000, active_blocks_max=72, cached_blocks_max=30, watermark_utilization_ratio=0.78,
        watermark_source="measured",
    ),
    "headroom": Headroom(requests=4, prompt_tokens=64, output_tokens=16, limit="blocks"),
    "queues": Queues(running=3, waiting_for_blocks=2, waiting_other=1, held=5),
    "ranks": (
        RankView(
            tp_rank=0, pp_rank=0, dp_rank=0, device="cuda:0", memory_total_bytes=1000, memory_used_bytes=700,
            memory_peak_bytes=750, kv_cache_bytes=400, other_processes_bytes=50, step_seconds=0.02,
        ),
    ),
}  # fmt: skip
ROW = {
    "unix_ns": 10, "step": 1, "schedule_ns": 500_000, "step_ns": 2_000_000_000, "evicted_blocks": 3,
    "queried_tokens": 100, "hit_tokens": 40, "preemptions": 1, "recomputed_tokens": 64, "bound": 1,
}  # fmt: skip


def test_a_full_observation_fills_every_row_of_the_catalogue_with_its_labels() -> None:
    series = exported(target(snapshot(**FULL), [ROW]))
    for metric in CATALOGUE:
        found = [dict(pairs) for name, pairs in series if name == metric.name]
        if metric.exporter == "serve":
            assert found, metric.name
            assert all(set(labels) == set(metric.all_labels) for labels in found)
    assert {name for name, _ in series} <= set(BY_NAME)


def test_the_numbers_are_those_of_the_snapshot() -> None:
    series = exported(target(snapshot(**FULL), [ROW, {**ROW, "unix_ns": 20, "bound": 0}]))
    for state, blocks in (("active", 60), ("cached", 25), ("free", 15)):
        assert value(series, "kvcatch_kv_cache_blocks", tier="device", state=state) == blocks
        assert value(series, "kvcatch_kv_cache_bytes", tier="device", state=state) == blocks * 1000
    assert value(series, "kvcatch_kv_cache_capacity_blocks") == 100
    assert value(series, "kvcatch_kv_cache_peak_blocks", state="active") == 72
    assert value(series, "kvcatch_kv_cache_tokens") == 930
    assert value(series, "kvcatch_internal_fragmentation_ratio") == pytest.approx(1 - 930 / (60 * 16))
    assert value(series, "kvcatch_watermark_ratio", source="measured") == 0.78
    assert value(series, "kvcatch_headroom_requests") == 4
    assert value(series, "kvcatch_headroom_limit", limit="blocks") == 1
    assert value(series, "kvcatch_requests_waiting", reason="blocks") == 2
    assert value(series, "kvcatch_requests_held") == 5
    # Two steps: one bound by blocks, one by nothing.
    assert value(series, "kvcatch_steps_total", bound="blocks") == 1
    assert value(series, "kvcatch_steps_total", bound="none") == 1
    assert value(series, "kvcatch_steps_total", bound="max_num_seqs") == 0
    assert value(series, "kvcatch_step_seconds_total") == 4.0
    assert value(series, "kvcatch_schedule_seconds_total") == pytest.approx(0.001)
    assert value(series, "kvcatch_kv_block_evictions_total", reason="capacity") == 6
    assert value(series, "kvcatch_prefix_cache_hit_tokens_total") == 80
    assert value(series, "kvcatch_preemption_recomputed_tokens_total") == 128
    owners = {"kv_cache": 400, "engine_other": 300, "other_processes": 50, "free": 250}
    for owner, size in owners.items():
        assert value(series, "kvcatch_device_memory_bytes", owner=owner, device="cuda:0") == size
    assert value(series, "kvcatch_build_info", version=__version__) == 1


def test_committed_demand_counts_what_waits() -> None:
    """60 active; a waiting prompt of 64 tokens needs 4 blocks of 16, a preempted one of 127 needs 8."""
    series = exported(target())
    assert value(series, "kvcatch_committed_ratio") == pytest.approx((60 + 4 + 8) / 100)


def test_without_a_measurement_the_watermark_is_085_and_says_assumed() -> None:
    assert value(exported(target()), "kvcatch_watermark_ratio", source="assumed") == 0.85


def test_a_stored_watermark_is_taken_up_at_the_next_read_and_an_expired_one_says_so() -> None:
    one = target()
    capture = one.watch.capture
    assert isinstance(capture, FakeCapture)
    for source in ("measured", "expired"):
        capture.state = snapshot(
            pool=msgspec.structs.replace(
                capture.state.pool, watermark_utilization_ratio=0.7, watermark_source=source
            )
        )
        one.read()
        assert value(exported(one), "kvcatch_watermark_ratio", source=source) == 0.7
        assert value(exported(one), "kvcatch_watermark_ratio", source="assumed") is None


def test_unknown_is_an_absent_series_never_zero() -> None:
    bare = Snapshot(target="x", state="live", source="recorder", unix_seconds=1.0)
    series = exported(target(bare))
    for name in ("kvcatch_kv_cache_blocks", "kvcatch_headroom_requests", "kvcatch_committed_ratio",
                 "kvcatch_requests_waiting", "kvcatch_tenant_blocks", "kvcatch_device_memory_bytes"):  # fmt: skip
        assert name not in {found for found, _ in series}
    assert value(series, "kvcatch_up") == 1


def test_a_dead_engine_shows_down_and_no_stale_state() -> None:
    one = target(snapshot(**FULL), [ROW])
    capture = one.watch.capture
    assert isinstance(capture, FakeCapture)
    capture.broken = KVCatchError("gone")
    one.read()
    series = exported(one)
    assert value(series, "kvcatch_up") == 0
    assert value(series, "kvcatch_kv_cache_blocks", state="active") is None
    assert value(series, "kvcatch_headroom_requests") is None
    assert value(series, "kvcatch_preemptions_total") == 1
    assert value(series, "kvcatch_engine_info", state="disconnected") == 1


@pytest.mark.parametrize(
    ("state", "source", "up"),
    [("live", "recorder", 1), ("idle", "recorder", 1), ("stale", "recorder", 1), ("ended", "recorder", 0),
     ("live", "scrape", 1), ("stale", "scrape", 0), ("disconnected", "scrape", 0), ("ended", "scrape", 1),
     ("ended", "capture", 1)],
)  # fmt: skip
def test_up_means_an_engine_or_a_file_that_says_how_things_are(state: str, source: str, up: int) -> None:
    """A crashed engine is down, a hanging one is not, and a saved page stays readable."""
    series = exported(target(snapshot(state=state, source=source)))
    assert value(series, "kvcatch_up") == up
    assert (value(series, "kvcatch_kv_cache_blocks", state="active") is not None) == bool(up)


def test_counters_add_each_recorded_step_once() -> None:
    one = target(None, [ROW])
    capture = one.watch.capture
    assert isinstance(capture, FakeCapture)
    for last in (20, 30, 40):
        capture.rows.append({**ROW, "unix_ns": last})
        one.read()
    assert value(exported(one), "kvcatch_preemptions_total") == 4
    one.read()
    assert value(exported(one), "kvcatch_preemptions_total") == 4


def test_a_peak_between_two_reads_stays_visible_for_a_minute() -> None:
    one = target(snapshot(), [{**ROW, "unix_ns": time.time_ns(), "active_blocks": 60}])
    capture = one.watch.capture
    assert isinstance(capture, FakeCapture)
    one.read()
    capture.rows.append({**ROW, "unix_ns": time.time_ns(), "active_blocks": 97})
    for _ in range(5):
        one.read()
    assert value(exported(one), "kvcatch_kv_cache_peak_blocks", state="active") == 97
    assert value(exported(one), "kvcatch_kv_cache_blocks", state="active") == 60


def test_a_recorder_without_a_step_counts_from_zero() -> None:
    """An increase needs a first value: the series must be there before the first step."""
    series = exported(target())
    assert value(series, "kvcatch_steps_total", bound="blocks") == 0
    assert value(series, "kvcatch_preemptions_total") == 0


def test_a_restarted_engine_is_followed_and_counts_anew() -> None:
    """The next life has another recorder; the label stays, so that the series go on."""
    first, second = FakeCapture(snapshot(target="run1.core0")), FakeCapture(snapshot(target="run2.core0"))
    first.rows = [ROW, {**ROW, "unix_ns": 20}]
    newest = [first]
    one = Target("live#0", lambda _: newest[-1], interval_seconds=1, follow=True)
    one.read()
    assert value(exported(one), "kvcatch_preemptions_total", target="live") == 2
    first.state = snapshot(target="run1.core0", state="ended")
    one.read()
    assert value(exported(one), "kvcatch_engine_info", target="live", state="ended") == 1
    newest.append(second)
    one.read()
    assert value(exported(one), "kvcatch_engine_info", target="live", state="live") == 1
    assert value(exported(one), "kvcatch_preemptions_total", target="live") == 0
    assert first.closed


def test_tenants_are_bounded_and_nothing_is_lost() -> None:
    rows = [
        TenantView(tenant=f"t{index:04}", num_blocks=index, running=1, waiting=0) for index in range(5000)
    ]
    rows.append(TenantView(tenant="other", num_blocks=10_000, running=2, waiting=1))
    kept = bounded(rows, top=10)
    assert len(kept) <= 11
    assert kept[0].tenant == "t4999"
    assert sum(row.num_blocks or 0 for row in kept) == sum(row.num_blocks or 0 for row in rows)
    assert sum(row.running or 0 for row in kept) == 5002
    series = exported(target(snapshot(tenants=tuple(rows))))
    assert len([1 for name, _ in series if name == "kvcatch_tenant_blocks"]) <= 11


def test_memory_owners_say_only_what_is_known() -> None:
    assert memory_owners(RankView(memory_used_bytes=5, memory_total_bytes=9)) == {}
    assert memory_owners(RankView(kv_cache_bytes=3)) == {"kv_cache": 3}


def test_the_card_of_a_rank_is_joined_when_the_driver_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"pid": 77, "device": "cuda:0", "memory_used_bytes": 100, "kv_cache_bytes": 60}
    ranks = (RankView(tp_rank=0, **held), RankView(tp_rank=1, **{**held, "pid": 78, "device": "cuda:1"}))
    seen = [
        Card(index=0, memory_total_bytes=200, memory_used_bytes=150, processes={77: 120, 5: 30}),
        Card(index=1, memory_total_bytes=200, memory_used_bytes=190, processes={78: 120, 5: 70}),
    ]
    monkeypatch.setattr("kvcatch.views.targets.cards", lambda: seen)
    series = exported(target(snapshot(ranks=ranks)))
    owners = {"kv_cache": 60, "engine_other": 60, "other_processes": 70, "free": 10}
    for owner, size in owners.items():
        assert value(series, "kvcatch_device_memory_bytes", tp_rank="1", owner=owner) == size
    assert value(series, "kvcatch_binding_device", tp_rank="1", device="cuda:1") == 1
    assert value(series, "kvcatch_binding_device", tp_rank="0") is None


def test_two_targets_of_the_same_engine_do_not_collide() -> None:
    assert exported(target(), target())  # same name twice: shown once
    other = snapshot(target="live:77")
    series = exported(target(), target(other))
    assert value(series, "kvcatch_kv_cache_blocks", target="live:77", state="active") == 60
    assert value(series, "kvcatch_kv_cache_blocks", target="live:4242", state="active") == 60


def test_a_scrape_only_engine_gets_every_row_marked_scraped(tmp_path: Any) -> None:
    from kvcatch.sources.scrape import open_scrape

    text = (
        "# scrape_unix_ms 1700000000000\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 2\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 3\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="101"} 1\n'
        'vllm:request_prompt_tokens_bucket{engine="0",model_name="m",le="+Inf"} 10\n'
        'vllm:request_prompt_tokens_count{engine="0",model_name="m"} 10\n'
        'vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 1000\n'
        'vllm:request_generation_tokens_bucket{engine="0",model_name="m",le="+Inf"} 10\n'
        'vllm:request_generation_tokens_count{engine="0",model_name="m"} 10\n'
        'vllm:request_generation_tokens_sum{engine="0",model_name="m"} 600\n'
        'vllm:kv_offload_store_bytes_total{engine="0",model_name="m"} 2097152\n'
        'vllm:kv_offload_store_time_total{engine="0",model_name="m"} 0.125\n'
    )
    path = tmp_path / "page.prom"
    path.write_text(text)
    one = Target(str(path), lambda name: open_scrape([str(name)]), interval_seconds=1)
    one.read()
    series = exported(one)
    names = {name for name, _ in series}
    expected = {metric.name for metric in CATALOGUE if metric.scraped} - {"kvcatch_findings"}
    assert expected <= names
    moved = {"tier": "offload", "direction": "store"}
    assert value(series, "kvcatch_kv_transfer_bytes_total", **moved) == 2 << 20
    assert value(series, "kvcatch_kv_transfer_seconds_total", **moved) == 0.125
    # Nobody counts loads here, so there is no series of them.
    assert value(series, "kvcatch_kv_transfer_bytes_total", tier="offload", direction="load") is None
    # Typical request: 100 + 60 tokens = 10 blocks at its peak of 159 slots; 50 of 100 blocks are idle.
    assert value(series, "kvcatch_headroom_requests") == 5
    # 3 waiting prompts of 100 tokens need 7 blocks each.
    assert value(series, "kvcatch_committed_ratio") == pytest.approx((50 + 21) / 100)
    assert value(series, "kvcatch_kv_cache_blocks", state="cached") is None


def test_findings_are_those_of_doctor() -> None:
    full = snapshot(
        pool=Pool(num_blocks=100, active_blocks=96, cached_blocks=4, free_blocks=0, block_size=16),
        queues=Queues(running=3, waiting_for_blocks=9, waiting_other=0),
    )
    codes = {(finding.code, finding.severity) for finding in glance(full)}
    assert "KVC001" in {code for code, _ in codes}
    series = exported(target(full))
    shown = {
        (dict(pairs)["code"], dict(pairs)["severity"]) for name, pairs in series if name == "kvcatch_findings"
    }
    assert shown == codes


def test_findings_of_a_scrape_are_taken_over_its_pages() -> None:
    """Nothing runs, the pool is empty, and six wait, page after page: a request that never fits."""
    text = "".join(
        f"# scrape_unix_ms {at}000\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 6\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0\n'
        'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="118"} 1\n'
        for at in range(100, 160, 5)
    )
    one = Target("x", lambda _: ScrapeCapture("x", pages=parse([text.encode()])), interval_seconds=1)
    one.read()
    assert value(exported(one), "kvcatch_findings", code="KVC005", severity="critical") == 1


def test_engines_of_one_page_are_exported_one_by_one_and_compared() -> None:
    """One engine full with requests waiting, the other nearly empty: KVC305 compares them."""
    rows = ((0, 50, 30, 0.99), (1, 2, 0, 0.05))
    text = "".join(
        f"# scrape_unix_ms {at}000\n"
        + "".join(
            f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {run}\n'
            f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} {wait}\n'
            f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} {usage}\n'
            f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="101"}} 1\n'
            for rank, run, wait, usage in rows
        )
        for at in range(100, 200, 5)
    )
    one = Target("x", lambda _: ScrapeCapture("x", pages=parse([text.encode()])), interval_seconds=1)
    one.read()
    series = exported(one)
    for rank, _, _, usage in rows:
        blocks = value(series, "kvcatch_kv_cache_blocks", engine=str(rank), state="active", target="x")
        assert blocks == round(100 * usage)
    assert value(series, "kvcatch_findings", engine="0", code="KVC305") == 1
    assert value(series, "kvcatch_findings", engine="1", code="KVC001") is None


def test_names_follow_the_conventions() -> None:
    for metric in CATALOGUE:
        assert metric.name.startswith("kvcatch_")
        assert ":" not in metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert not {"type", "stage", "service", "env", "zone", "cluster", "pod", "namespace"} & set(
            metric.all_labels
        )
        assert metric.help.endswith(".")
        if metric.unit in ("bytes", "seconds", "ratio"):
            assert metric.unit in metric.name
    assert ENGINE_LABELS == ("target", "model_name", "engine")
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    assert BOUNDS[0] == "none"
    assert LossView().dropped_records == 0

"""One meaning for every name and unit vLLM has used, and refusal of what cannot be true."""

from __future__ import annotations

import pytest
from pages import BLOCK_SIZE, BLOCKS, DATA, build, releases

from kvcatch.sources.openmetrics import parse
from kvcatch.sources.readings import Reading, read

V1_RELEASES = list(releases())


def readings(text: str) -> list[Reading]:
    return list(read(parse([text.encode()])[0]).values())


def one(text: str) -> Reading:
    (reading,) = readings(text)
    return reading


@pytest.mark.parametrize("openmetrics", [False, True], ids=["classic", "openmetrics"])
@pytest.mark.parametrize("release", V1_RELEASES)
def test_every_release_reads_into_the_same_quantities(release: str, openmetrics: bool) -> None:
    got = one(build(release, openmetrics=openmetrics))
    assert (got.running, got.waiting, got.preemptions) == (5, 7, 3)
    assert (got.prompt_tokens, got.generation_tokens) == (4000, 900)
    assert (got.usable_blocks, got.active_blocks, got.block_size) == (BLOCKS - 1, 40, BLOCK_SIZE)
    assert (got.queries, got.hits, got.hit_ratio) == (4000, 1600, 0.4)
    assert got.ttft is not None
    assert got.tpot is not None
    assert (got.ttft.observations, got.ttft.total) == (4, 6)
    assert got.warnings == ()
    by_reason = release in ("0.24.0", "0.28.0", "0.32.0")
    assert (got.waiting_for_blocks, got.waiting_other) == ((4, 3) if by_reason else (None, None))


def test_the_first_engine_had_no_null_block_and_no_prefix_counters() -> None:
    got = one(build("0.8.5.post2", "v0"))
    assert (got.usable_blocks, got.active_blocks) == (BLOCKS, 40)
    assert (got.queries, got.hits) == (None, None)
    assert "queries" in got.unknown


@pytest.mark.parametrize("release", V1_RELEASES)
def test_a_missing_series_is_unknown_never_zero(release: str) -> None:
    text = build(release)
    for word, field in (
        ("num_requests_running", "running"),
        ("num_preemptions", "preemptions"),
        ("cache_usage_perc", "active_blocks"),
        ("prefix_cache_hits", "hits"),
        ("time_to_first_token", "ttft"),
    ):
        got = one("\n".join(line for line in text.splitlines() if word not in line) + "\n")
        assert getattr(got, field) is None
        assert field in got.unknown or field == "active_blocks"


def test_old_and_new_names_side_by_side_count_once() -> None:
    """vLLM 0.10.2 and 0.11.2 publish gpu_prefix_cache_* (deprecated) beside prefix_cache_*."""
    text = build("0.10.2")
    assert "vllm:gpu_prefix_cache_queries_total" in text
    assert "vllm:prefix_cache_queries_total" in text
    assert one(text).queries == 4000
    broken = text.replace('vllm:prefix_cache_queries_total{engine="0",model_name="m"} 4000.0',
                          'vllm:prefix_cache_queries_total{engine="0",model_name="m"} NaN')  # fmt: skip
    assert one(broken).queries == 4000


@pytest.mark.parametrize("release", ["0.8.5.post2", "0.10.2"])
def test_without_help_texts_the_unit_shows_in_the_numbers(release: str) -> None:
    text = "\n".join(
        line for line in build(release, help_lines=False).splitlines() if "vllm:prefix_cache" not in line
    )
    assert one(text + "\n").queries == 4000


def test_a_unit_that_cannot_be_told_leaves_only_the_ratio() -> None:
    text = (
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 900\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 300\n'
    )
    got = one(text)
    assert (got.queries, got.hits) == (None, None)
    assert got.hit_ratio == pytest.approx(1 / 3)
    assert "only their ratio" in got.warnings[0]


@pytest.mark.parametrize("blocks", [256, 102_564])
def test_the_usage_gauge_gives_whole_blocks_by_either_divisor(blocks: int) -> None:
    """BlockPool.get_usage: 1 - free/(total - 1) today; early V1 divided by total, null block held."""
    config = f'vllm:cache_config_info{{engine="0",block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
    for held in (0, 1, 17, blocks - 1):
        today = 1.0 - (blocks - 1 - held) / (blocks - 1)
        first = 1.0 - (blocks - 1 - held) / blocks
        for usage in (today, first):
            text = f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {usage!r}\n' + config
            assert one(text).active_blocks == held


def test_the_published_value_of_an_idle_engine_is_its_null_block() -> None:
    """production-stack issue 617, vLLM 0.10: 9.75010481363281e-06 with 102,563 blocks, nothing running."""
    text = (
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 9.75010481363281e-06\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="102563"} 1.0\n'
    )
    assert one(text).active_blocks == 0


@pytest.mark.parametrize(
    ("line", "field", "reason"),
    [
        ("vllm:kv_cache_usage_perc 82.3", "usage_ratio", "82.3 is not a ratio from 0 to 1"),
        ("vllm:kv_cache_usage_perc -0.1", "usage_ratio", "negative: -0.1"),
        ("vllm:num_requests_running -1", "running", "negative: -1"),
        ("vllm:num_requests_running 1.5", "running", "1.5 is not a whole number"),
        (
            "# TYPE vllm:num_requests_running histogram\nvllm:num_requests_running 3",
            "running",
            "declared a histogram, should be a gauge",
        ),
        (
            "# TYPE vllm:prompt_tokens_total gauge\nvllm:prompt_tokens_total 3",
            "prompt_tokens",
            "declared a gauge, should be a counter",
        ),
        ("vllm:gpu_prefix_cache_hit_rate -1", "hit_ratio", "negative: -1"),
        (
            "vllm:prefix_cache_queries_total 10\nvllm:prefix_cache_hits_total 11",
            "hits",
            "more hits (11) than lookups (10)",
        ),
        (
            'vllm:num_requests_running{pod_ip="a"} 1\nvllm:num_requests_running{pod_ip="b"} 2',
            "running",
            "several series for one engine",
        ),
    ],
)
def test_what_cannot_be_true_is_refused_with_a_reason(line: str, field: str, reason: str) -> None:
    found = parse([f"{line}\nvllm:num_requests_waiting 1\n".encode()])[0]
    (got,) = read(found).values()
    assert getattr(got, field) is None
    assert reason in [row.reason for row in found.rejected]
    assert got.waiting == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('le="+Inf"} 4', 'le="9"} 4'), "without its +Inf bucket"),
        (('le="1"} 3', 'le="1"} 5'), "not cumulative"),
        (("_count 4", "_count 5"), "differs from its +Inf bucket"),
        (("_sum 6", "_sum -6"), "negative or missing sum"),
        (("vllm:time_to_first_token_seconds_count 4\n", ""), "parts missing"),
        (('le="1"', 'le="one"'), "without a readable bound"),
    ],
)
def test_a_histogram_that_contradicts_itself_is_refused(change: tuple[str, str], reason: str) -> None:
    name = "vllm:time_to_first_token_seconds"
    text = f'{name}_bucket{{le="1"}} 3\n{name}_bucket{{le="+Inf"}} 4\n{name}_count 4\n{name}_sum 6\n'
    assert change[0] in text
    found = parse([(text.replace(*change) + "vllm:num_requests_waiting 1\n").encode()])[0]
    (got,) = read(found).values()
    assert got.ttft is None
    assert any(reason in row.reason for row in found.rejected)


def test_retried_admissions_show_as_more_lookups_than_prompts() -> None:
    got = one(
        "vllm:prefix_cache_queries_total 9000\nvllm:prefix_cache_hits_total 100\n"
        "vllm:prompt_tokens_total 2000\n"
    )
    assert "counted again" in got.warnings[0]


def test_engines_of_one_page_stay_apart() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {rank + 1}\n'
        f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="{100 + rank}"}} 1\n'
        for rank in range(3)
    )
    got = readings(text)
    assert [(row.key.engine, row.running, row.usable_blocks) for row in got] == [
        ("0", 1, 99), ("1", 2, 100), ("2", 3, 101),
    ]  # fmt: skip


def test_an_unsized_duplicate_of_the_configuration_is_passed_over() -> None:
    text = (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="50"} 1\n'
        "vllm:num_requests_running 0\n"
    )
    assert one(text).usable_blocks == 49


def test_the_capacity_livelock_page_is_read_as_published() -> None:
    """vllm-metal issue 479: six waiting for capacity, none running, usage 0."""
    text = (
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 6.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 0.0\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0\n'
        'vllm:cache_config_info{engine="0",num_gpu_blocks="118",kv_cache_size_tokens="90000",'
        'kv_cache_max_concurrency="1.0"} 1.0\n'
    )
    got = one(text)
    assert (got.running, got.waiting, got.waiting_for_blocks) == (0, 6, 6)
    assert (got.active_blocks, got.usable_blocks) == (0, 117)
    assert got.block_size is None


def test_sglang_pages_read_into_the_same_quantities() -> None:
    got = one((DATA / "sglang_2025_docs_llama-3.1-8b.prom").read_text())
    assert got.kind == "sglang"
    assert (got.running, got.waiting, got.active_tokens) == (162, 2826, 123_859)
    assert got.usage_ratio == 0.28
    assert got.usable_blocks is None
    newer = (
        'sglang:num_running_reqs{model_name="m",tp_rank="0"} 4\n'
        'sglang:num_running_reqs{model_name="m",tp_rank="1"} 4\n'
        'sglang:num_used_tokens{model_name="m"} 130\nsglang:max_total_num_tokens{model_name="m"} 6400\n'
        'sglang:cache_config_info{page_size="64",num_pages="100"} 1\n'
        'sglang:prompt_tokens_total{model_name="m"} 1000\n'
        'sglang:cached_tokens_total{model_name="m",cache_source="device"} 300\n'
        'sglang:cached_tokens_total{model_name="m",cache_source="host"} 100\n'
        'sglang:num_retracted_requests_total{model_name="m"} 2\n'
    )
    got = one(newer)
    assert (got.running, got.preemptions) == (4, 2)
    assert (got.usable_blocks, got.active_blocks, got.block_size) == (100, 3, 64)
    assert (got.queries, got.hits) == (1000, 400)


def test_transfers_between_tiers_are_read_whichever_connector_counts_them() -> None:
    """vLLM's offloading connector has counters, NIXL histograms whose sums are the totals."""
    from kvcatch.sources.scrape import ScrapeCapture

    label = '{engine="0",model_name="m"}'
    text = "\n".join(
        [
            "# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running{label} 1",
            "# TYPE vllm:kv_offload_load_bytes counter", f"vllm:kv_offload_load_bytes_total{label} 4.194304e+06",
            "# TYPE vllm:kv_offload_load_time counter", f"vllm:kv_offload_load_time_total{label} 0.25",
            "# TYPE vllm:nixl_bytes_transferred histogram",
            'vllm:nixl_bytes_transferred_bucket{engine="0",model_name="m",le="+Inf"} 3',
            f"vllm:nixl_bytes_transferred_sum{label} 3e+06", f"vllm:nixl_bytes_transferred_count{label} 3", "",
        ]
    )  # fmt: skip
    capture = ScrapeCapture("page", list(parse([text.encode()])))
    assert capture.counters() == {
        "transfer_offload_load_bytes": 4_194_304, "transfer_offload_load_seconds": 0.25,
        "transfer_remote_load_bytes": 3e6,
    }  # fmt: skip

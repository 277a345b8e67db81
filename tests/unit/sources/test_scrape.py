"""Pages over time as a Capture: deltas, restarts, windows, faults of the network."""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pages import DATA, build
from servers import FaultServer, fault_server

from kvcatch.errors import KVCatchError
from kvcatch.sources import fetch
from kvcatch.sources.openmetrics import parse
from kvcatch.sources.pages import metrics_url, scrape_once
from kvcatch.sources.scrape import ScrapeCapture, live, open_scrape
from kvcatch.store.base import SAMPLE_COLUMNS


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with fault_server() as running:
        yield running


def real_run(tmp_path: Path) -> tuple[list[str], list[dict[str, float]]]:
    """The half-second scrapes of a real vLLM 0.32 run with 29 preemptions, as saved pages."""
    rows = [json.loads(line) for line in (DATA / "conv_conc_snapshots.jsonl").read_text().splitlines()]
    paths = []
    for index, row in enumerate(rows):
        lines = [f"# scrape_unix_ms {1_700_000_000_000 + round(row['t'] * 1000)}"]
        lines += [
            f'vllm:{name}{{engine="0",model_name="m"}} {value!r}'
            for name, value in row.items()
            if name != "t"
        ]
        lines.append('vllm:cache_config_info{engine="0",block_size="32",num_gpu_blocks="256"} 1.0\n')
        path = tmp_path / f"{index:03}.prom"
        path.write_text("\n".join(lines))
        paths.append(str(path))
    return paths, rows


def test_a_real_run_adds_up_to_what_the_server_counted(tmp_path: Path) -> None:
    paths, rows = real_run(tmp_path)
    capture = open_scrape(paths[::-1])  # the stamps give the order, not the arguments
    samples = capture.samples()
    assert tuple(samples) == SAMPLE_COLUMNS
    assert len(samples["unix_ns"]) == len(rows) == 71
    assert np.nansum(samples["preemptions"]) == 29
    assert np.nansum(samples["prefill_tokens"]) == 179_935
    assert np.nansum(samples["decode_tokens"]) == 28_800
    assert np.nansum(samples["hit_tokens"]) == 9_568
    assert samples["active_blocks"].max() == max(round(row["kv_cache_usage_perc"] * 255) for row in rows)
    assert np.isnan(samples["cached_blocks"]).all()
    got = capture.snapshot(window_seconds=3600)
    assert (got.state, got.source) == ("ended", "scrape")
    assert (got.pool.num_blocks, got.pool.active_blocks, got.pool.cached_blocks) == (255, 0, None)
    assert got.pool.active_blocks_max == samples["active_blocks"].max()
    assert got.queues.waiting_max == max(row["num_requests_waiting"] for row in rows)
    seconds = rows[-1]["t"] - rows[0]["t"]
    assert got.latency.output_tokens_per_second == pytest.approx(28_800 / seconds, rel=1e-3)
    assert got.preemption.preemptions == 29
    assert got.preemption.recomputed_tokens is None
    assert "requests" in got.loss.unknown


def test_a_folder_or_one_file_with_all_pages_is_the_same_series(tmp_path: Path) -> None:
    paths, _ = real_run(tmp_path)
    joined = tmp_path / "all.txt"
    joined.write_text("".join(Path(path).read_text() for path in paths))
    for target in (str(tmp_path), str(joined), str(tmp_path / "*.prom")):
        assert np.nansum(open_scrape([target]).samples()["preemptions"]) == 29


def test_the_loaded_page_ties_in_with_the_run_that_made_it() -> None:
    """300 requests, 179,935 prompt and 9,568 cached tokens, 29 preemptions, 256 blocks of 32."""
    got = open_scrape([str(DATA / "vllm_0.32.0_cpu_loaded.prom")]).snapshot()
    assert (got.pool.num_blocks, got.pool.block_size, got.preemption.preemptions) == (255, 32, 29)
    assert (got.prefix.queried_tokens, got.prefix.hit_tokens) == (179_935, 9_568)
    assert got.latency.ttft_seconds == pytest.approx(290.96134853363037 / 300)
    assert got.latency.window_seconds is None  # one page: since the engine started
    assert got.latency.output_tokens_per_second is None


def test_a_restart_between_two_pages_counts_from_zero() -> None:
    text = "".join(
        f"# scrape_unix_ms {at}000\nvllm:generation_tokens_total {tokens}\nvllm:num_requests_running 1\n"
        for at, tokens in ((100, 50), (110, 90), (120, 30), (130, 70))
    )
    capture = ScrapeCapture("x", pages=parse([text.encode()]))
    assert capture.samples()["decode_tokens"][1:].tolist() == [40, 30, 40]
    # The window must not reach back before the restart.
    assert capture.snapshot().latency.output_tokens_per_second == pytest.approx(40 / 10)


def test_window_and_span_select_pages() -> None:
    text = "".join(
        f"# scrape_unix_ms {at}000\nvllm:generation_tokens_total {at}\nvllm:num_requests_running {run}\n"
        for at, run in ((100, 9), (200, 2), (230, 3), (240, 1))
    )
    capture = ScrapeCapture("x", pages=parse([text.encode()]))
    assert capture.snapshot(window_seconds=60).queues.running_max == 3
    assert capture.snapshot(window_seconds=600).queues.running_max == 9
    assert capture.samples(start=200 * 10**9, stop=240 * 10**9)["running"].tolist() == [2, 3]


def test_latencies_of_the_window_come_from_the_growth_of_the_histograms() -> None:
    name = "vllm:time_to_first_token_seconds"

    def page(at: int, low: int, mid: int, total: float) -> str:
        return (
            f'# scrape_unix_ms {at}000\n{name}_bucket{{le="1"}} {low}\n{name}_bucket{{le="3"}} {mid}\n'
            f'{name}_bucket{{le="+Inf"}} {mid}\n{name}_count {mid}\n{name}_sum {total}\n'
        )

    text = page(100, 100, 100, 10.0) + page(110, 102, 104, 17.0)
    got = ScrapeCapture("x", pages=parse([text.encode()])).snapshot().latency
    assert got.ttft_seconds == 7.0 / 4
    # 4 new ones: 2 up to 1 s, 2 from 1 to 3 s; rank 3.8 lies 1.8 of 2 into the second bucket.
    assert got.ttft_p95_seconds == pytest.approx(1 + 2 * 1.8 / 2)


def test_gauges_that_are_not_fed_are_said() -> None:
    """Requests spent 30 s in the engine in 20 s, yet none was ever seen running (dynamo issue 5796)."""
    name = "vllm:e2e_request_latency_seconds"
    text = "".join(
        f"# scrape_unix_ms {at}000\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"
        f'{name}_bucket{{le="+Inf"}} {at}\n{name}_count {at}\n{name}_sum {1.5 * at}\n'
        for at in (100, 105, 110, 120)
    )
    got = ScrapeCapture("x", pages=parse([text.encode()])).snapshot()
    assert any("stand at zero although requests were served" in text for text in got.loss.warnings)
    assert (got.queues.running, got.pool.utilization_ratio) == (None, None)
    busy = text.replace("running 0", "running 1", 1)
    assert ScrapeCapture("x", pages=parse([busy.encode()])).loss.warnings == ()


def test_without_latencies_the_flow_of_tokens_gives_a_stuck_gauge_away() -> None:
    def pages(count: int, running: int = 0) -> ScrapeCapture:
        text = "".join(
            f"# scrape_unix_ms {at}000\nvllm:num_requests_running {running}\nvllm:kv_cache_usage_perc 0\n"
            f"vllm:generation_tokens_total {50 * at}\n"
            for at in range(100, 100 + count)
        )
        return ScrapeCapture("x", pages=parse([text.encode()]))

    assert pages(6).snapshot().queues.running is None
    assert pages(3).snapshot().queues.running == 0  # too few to be sure
    assert pages(6, running=1).snapshot().queues.running == 1


def test_data_parallel_engines_add_up_and_can_be_told_apart() -> None:
    rows = ((0, 51, 117, 1.0), (1, 31, 108, 0.98))
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {run}\n'
        f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} {wait}\n'
        f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} {usage}\n'
        f'vllm:cache_config_info{{engine="{rank}",block_size="16",num_gpu_blocks="101"}} 1\n'
        for rank, run, wait, usage in rows
    )
    capture = ScrapeCapture("dp", pages=parse([text.encode()]))
    got = capture.snapshot()
    assert (got.queues.running, got.queues.waiting) == (82, 225)
    assert (got.pool.num_blocks, got.pool.active_blocks) == (200, 198)
    assert capture.info.dp_size == 2
    each = [engine.snapshot() for engine in capture.engines()]
    assert [(one.target, one.queues.running, one.pool.active_blocks) for one in each] == [
        ("dp#engine=0", 51, 100), ("dp#engine=1", 31, 98),
    ]  # fmt: skip


def test_refused_series_are_named_in_the_loss() -> None:
    text = build("0.32.0").replace('vllm:num_requests_running{engine="0",model_name="m"} 5.0',
                                   'vllm:num_requests_running{engine="0",model_name="m"} NaN')  # fmt: skip
    got = ScrapeCapture("x", pages=parse([text.encode()])).snapshot()
    assert got.queues.running is None
    assert "vllm:num_requests_running: value is NaN" in got.loss.warnings
    assert "running" in got.loss.unknown


def test_a_live_target_that_fails_keeps_its_last_data_and_says_so(server: FaultServer) -> None:
    server.page = build("0.32.0").encode()
    capture = live(server.url)
    assert capture.snapshot().state == "connecting"
    capture.refresh()
    assert (capture.snapshot().state, capture.snapshot().queues.running) == ("live", 5)
    server.page = b"<html>maintenance</html>"
    capture.refresh()
    got = capture.snapshot()
    assert (got.state, got.queues.running) == ("disconnected", 5)
    assert "HTML" in got.loss.warnings[0]


def test_opening_a_url_reads_a_first_page(server: FaultServer) -> None:
    server.page = build("0.32.0").encode()
    assert open_scrape([server.url + "/metrics"]).snapshot().pool.num_blocks == 100


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/html", "an HTML page"),
        ("/nothing", "HTTP 404"),
        ("/error", "HTTP 500"),
        ("/loop", "more than 3 redirects"),
        ("/elsewhere", "not an http:// or https:// address"),
        ("/short", "stopped after 28 of 1,028 bytes"),
        ("/silent", "no answer in time"),
        ("/drips", "no answer in time after"),
        ("/stalls", "no answer in time after 28 bytes"),
    ],
)
def test_every_network_fault_ends_in_time_with_its_name(server: FaultServer, path: str, words: str) -> None:
    with pytest.raises(KVCatchError, match=words):
        scrape_once(server.url + path, timeout_seconds=0.3)


def test_nothing_behind_the_end_mark_is_read(server: FaultServer) -> None:
    server.page = b"vllm_num_requests_running 1\n# EOF\nvllm_num_requests_running 99\n"
    (page,) = scrape_once(server.url + "/metrics")
    assert [sample.value for sample in page.samples["vllm_num_requests_running"]] == [1]


def test_redirects_are_followed(server: FaultServer) -> None:
    assert len(scrape_once(server.url + "/moved")) == 1


def test_an_endless_page_is_cut_off(server: FaultServer) -> None:
    with (
        fetch.get(server.url + "/endless") as response,
        pytest.raises(KVCatchError, match="longer than 1,000,000"),
    ):
        for _ in response.chunks(limit=1_000_000):
            pass


def test_unreachable_hosts_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(KVCatchError, match="connection refused"):
        open_scrape([f"http://127.0.0.1:{port}"])
    with pytest.raises(KVCatchError, match="port is not a number"):
        scrape_once("http://127.0.0.1:99999/metrics")


def test_plain_text_on_a_tls_port_is_named(server: FaultServer) -> None:
    with pytest.raises(KVCatchError, match="TLS failed"):
        scrape_once(server.url.replace("http:", "https:") + "/metrics", timeout_seconds=2)


def test_a_certificate_nobody_vouches_for_is_refused_by_name(server: FaultServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls = DATA.parent / "tls"
    context.load_cert_chain(tls / "cert.pem", tls / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with pytest.raises(KVCatchError, match="TLS certificate refused"):
        scrape_once(server.url.replace("http:", "https:") + "/metrics")


def test_targets_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KVCatchError, match="no such file"):
        open_scrape([str(tmp_path / "none.prom")])
    with pytest.raises(KVCatchError, match="a scrape follows one URL"):
        open_scrape(["http://a/metrics", "http://b/metrics"])
    os.mkfifo(tmp_path / "empty_folder_marker")
    with pytest.raises(KVCatchError, match="no such file"):
        open_scrape([str(tmp_path)])


def test_a_bare_host_means_its_metrics() -> None:
    assert metrics_url("http://h:8000") == "http://h:8000/metrics"
    assert metrics_url("http://h:8000/metrics") == "http://h:8000/metrics"
    assert metrics_url("http://h/proxy/engine-3/metrics") == "http://h/proxy/engine-3/metrics"

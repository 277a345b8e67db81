"""A past hour from the query API: the same meaning as pages scraped then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from servers import FaultServer, fault_server

from kvcatch.errors import KVCatchError
from kvcatch.sources.openmetrics import parse
from kvcatch.sources.prometheus import _names, open_prometheus, pages_of
from kvcatch.sources.readings import read


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with fault_server() as running:
        yield running


def series(name: str, values: list[tuple[float, str]], **labels: str) -> dict[str, Any]:
    return {
        "metric": {"__name__": name, "model_name": "m", **labels},
        "values": [list(row) for row in values],
    }


ROWS = [
    series("vllm:num_requests_running", [(100, "3"), (115, "5"), (130, "NaN")], engine="0", instance="a:1"),
    series("vllm:generation_tokens_total", [(100, "10"), (115, "40"), (130, "100")], engine="0", instance="a:1"),
    series("vllm:num_requests_running", [(115, "7")], engine="0", instance="b:1"),
    {"metric": {"__name__": "vllm:cache_config_info", "instance": "a:1", "engine": "0", "block_size": "16",
                "num_gpu_blocks": "101"}, "values": [[100, "1"], [115, "1"], [130, "1"]]},
]  # fmt: skip


def test_points_in_time_become_pages_and_instances_stay_apart() -> None:
    pages = pages_of(ROWS)
    assert [page.unix_seconds for page in pages] == [100, 115, 130]
    second = {key.instance: reading for key, reading in read(pages[1]).items()}
    assert (second["a:1"].running, second["b:1"].running) == (5, 7)
    assert (second["a:1"].usable_blocks, second["b:1"].usable_blocks) == (100, None)
    last = {key.instance: reading for key, reading in read(pages[2]).items()}
    assert last["a:1"].running is None
    assert pages[2].rejected[0].reason == "value is NaN"


def test_malformed_results_are_passed_over() -> None:
    assert pages_of([{}, {"metric": 3}, {"metric": {}, "values": [["x", "1"], [1], None]}]) == []


def test_the_server_is_asked_for_every_name_with_the_matchers_given(server: FaultServer) -> None:
    asked: list[str] = []

    def answer(handler: Any) -> None:
        asked.append(handler.path)
        data = {"resultType": "matrix", "result": ROWS}
        handler._answer(json.dumps({"status": "success", "data": data}).encode())

    def metadata(handler: Any) -> None:
        row = {"type": "gauge", "help": "h", "unit": ""}
        data = {"vllm:num_requests_running": [row], "go_gc": [row]}
        handler._answer(json.dumps({"status": "success", "data": data}).encode())

    server.RequestHandlerClass.do_api_v1_query_range = answer  # type: ignore[attr-defined]
    server.RequestHandlerClass.do_api_v1_metadata = metadata  # type: ignore[attr-defined]
    target = f'prometheus:{server.url}?namespace="prod"'
    capture = open_prometheus(target, start=100.0, stop=130.0)
    query = parse_qs(urlsplit(asked[0]).query)
    assert query["start"] == ["100.000"]
    assert query["step"] == ["1.000"]  # of half a minute every scrape counts
    assert query["query"][0].endswith(',namespace="prod"}')
    assert capture.samples()["decode_tokens"][1] == 30
    assert capture.snapshot().queues.running is None
    for span, step in ((600.0, "5.000"), (3600.0, "15.000"), (86_400.0, "57.600")):
        open_prometheus(target, start=100.0, stop=100.0 + span)
        assert parse_qs(urlsplit(asked[-1]).query)["step"] == [step]
    with pytest.raises(KVCatchError, match="span is empty"):
        open_prometheus(target, start=5.0, stop=5.0)


def test_what_is_no_prometheus_is_named(server: FaultServer) -> None:
    with pytest.raises(KVCatchError, match="HTTP 404"):
        open_prometheus(f"prometheus:{server.url}/nothing")
    with pytest.raises(KVCatchError, match="not a Prometheus address"):
        open_prometheus("prometheus:host:9090")


def test_the_name_pattern_covers_both_spellings_and_ray() -> None:
    import re

    pattern = re.compile(_names())
    for name in ("vllm:prompt_tokens_total", "vllm_prompt_tokens_total", "ray_vllm:prompt_tokens_total",
                 "vllm:time_to_first_token_seconds_bucket", "sglang:token_usage"):  # fmt: skip
        assert pattern.fullmatch(name)
    assert not pattern.fullmatch("vllm:prompt_tokens_created")


def test_a_page_scraped_at_the_same_moment_reads_the_same() -> None:
    text = "\n".join(
        f"{row['metric']['__name__']}{{{','.join(f'{k}={json.dumps(v)}' for k, v in row['metric'].items() if k != '__name__')}}} "
        f"{row['values'][1][1]}"
        for row in ROWS
        if len(row["values"]) > 1
    )
    (scraped,) = read(parse([(text + "\n").encode()])[0]).values()
    stored = next(reading for key, reading in read(pages_of(ROWS)[1]).items() if key.instance == "a:1")
    stored.unix_seconds = None
    assert scraped == stored

"""The hog's tenant from a Prometheus that also scrapes kvcatch's exporter; the exporter's series are the real ones."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from prometheus_client.core import Metric

from fakes.capture import FakeCapture, snapshot
from kvcatch.cli.main import main
from kvcatch.results import Pool, Queues, TenantView
from kvcatch.views.prometheus import registry
from kvcatch.views.targets import Fleet, Target

START, EVERY, POINTS = 1_764_439_200, 15, 40
#: (tenant, blocks, running) while the pool is pressed and while it is not; 400 usable blocks
Tenants = Sequence[tuple[str, int, int]]
CALM: Tenants = (("team0", 90, 6), ("team1", 90, 6))
HOG: Tenants = (("team0", 102, 6), ("team1", 102, 6), ("contracts", 144, 1))

Rows = list[dict[str, Any]]


class _Prometheus(ThreadingHTTPServer):
    """Answers a range query as Prometheus does: series whose name and labels match, points in the span."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: Rows = []
        self.queries: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Prometheus

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        data: Any = {}
        if parts.path == "/api/v1/query_range":
            asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
            self.server.queries.append(asked["query"])
            matchers = re.findall(r'(\w+)(=~|=)"([^"]*)"', asked["query"])
            start, end = float(asked["start"]), float(asked["end"])
            data = {"resultType": "matrix", "result": [
                {"metric": row["metric"], "values": [point for point in row["values"] if start <= point[0] <= end]}
                for row in self.server.rows
                if all(re.fullmatch(text if how == "=~" else re.escape(text), row["metric"].get(name, "")) for name, how, text in matchers)
            ]}  # fmt: skip
        body = json.dumps({"status": "success", "data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def prometheus() -> Iterator[_Prometheus]:
    server = _Prometheus()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def stored(states: Sequence[tuple[float, dict[str, str], Sequence[Metric]]]) -> Rows:
    """Samples of scrapes as Prometheus keeps them: one row per series."""
    series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for when, labels, families in states:
        for family in families:
            for sample in family.samples:
                metric = {"__name__": sample.name, **sample.labels, **labels}
                row = series.setdefault(tuple(sorted(metric.items())), {"metric": metric, "values": []})
                row["values"].append([when, str(sample.value)])
    return list(series.values())


def exported(tenants: Tenants, target: str) -> list[Metric]:
    """What kvcatch's exporter shows of such a state."""
    held = sum(blocks for _, blocks, _ in tenants)
    state = snapshot(
        target=target,
        model="tiny",
        pool=Pool(num_blocks=400, active_blocks=held, cached_blocks=0, free_blocks=400 - held, block_size=16),
        queues=Queues(running=sum(count for *_, count in tenants), waiting=0),
        tenants=tuple(
            TenantView(tenant=name, num_blocks=blocks, running=count, waiting=0)
            for name, blocks, count in tenants
        ),
    )
    one = Target(target, lambda _: FakeCapture(state), interval_seconds=1)
    one.read()
    return list(registry(Fleet([one]).observations).collect())


def engine_rows(instance: str, pressed: range, job: str = "vllm") -> Rows:
    """The engine's own series: pressed between those points, with ten requests waiting for blocks."""
    labels = {"model_name": "org/tiny", "engine": "0", "instance": instance, "job": job}

    def row(name: str, values: list[float], **more: str) -> dict[str, Any]:
        points = [[START + EVERY * n, str(value)] for n, value in enumerate(values)]
        return {"metric": {"__name__": f"vllm:{name}", **labels, **more}, "values": points}

    busy = [n in pressed for n in range(POINTS)]
    config = row("cache_config_info", [1.0] * POINTS, num_gpu_blocks="401", block_size="16")
    del config["metric"]["model_name"]
    thrown = [4.0 * sum(busy[: n + 1]) for n in range(POINTS)]
    return [
        config,
        row("num_requests_running", [13.0 if on else 12.0 for on in busy]),
        row("num_requests_waiting", [10.0 if on else 0.0 for on in busy]),
        row("num_requests_waiting_by_reason", [10.0 if on else 0.0 for on in busy], reason="capacity"),
        row("num_requests_waiting_by_reason", [0.0] * POINTS, reason="deferred"),
        row("kv_cache_usage_perc", [348 / 400 if on else 180 / 400 for on in busy]),
        row("prompt_tokens_total", [1000.0 * n for n in range(POINTS)]),
        row("generation_tokens_total", [500.0 * n for n in range(POINTS)]),
        row("num_preemptions_total", thrown),
    ]


def kvcatch_rows(hog: Tenants, pressed: range, target: str, instance: str = "node-a:9400") -> Rows:
    scrape = {"instance": instance, "job": "kvcatch"}
    return stored(
        [(START + EVERY * n, scrape, exported(hog if n in pressed else CALM, target)) for n in range(POINTS)]
    )


def doctor(
    prometheus: _Prometheus, capsys: pytest.CaptureFixture[str], matchers: str = ""
) -> dict[str, dict]:
    target = f"prometheus:http://127.0.0.1:{prometheus.server_address[1]}{matchers}"
    span = ["--from", str(START), "--to", str(START + EVERY * (POINTS - 1))]
    main(["doctor", target, "--json", "--exit-zero", *span])
    return {one["code"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


PRESSED = range(15, 25)


def test_the_tenant_of_one_large_request_is_named(prometheus, capsys) -> None:
    prometheus.rows = engine_rows("node-a:8000", PRESSED) + kvcatch_rows(HOG, PRESSED, "engine-1234.core0")
    found = doctor(prometheus, capsys, '?job="vllm",engine="0"')
    hog = found["KVC003"]
    assert (hog["tenant"], hog["severity"], hog["request_id"]) == ("contracts", "warning", None)
    assert START + EVERY * PRESSED.start <= hog["unix_seconds"] < START + EVERY * PRESSED.stop
    # 144 of 400 blocks in one request; the twelve others hold 204, 17 each.
    assert "36%" in hog["title"]
    assert [row["value"] for row in hog["evidence"][:3]] == [144, 144, 10]
    assert "hold 17" in hog["evidence"][1]["text"]
    assert "no metric tells" in hog["evidence"][-1]["text"]
    assert hog["remedy"].endswith("--tenant-share contracts=0.25")
    assert "KVC001" in found
    # The exporter is another job: its series are asked for without the engine's.
    assert 'job="vllm"' in prometheus.queries[0]
    assert "job" not in prometheus.queries[1]
    assert 'engine="0"' in prometheus.queries[1]


def test_a_tenant_with_most_of_the_pool_in_many_requests_is_named(prometheus, capsys) -> None:
    batch: Tenants = (("batch jobs", 300, 18), ("team0", 34, 2), ("team1", 14, 1))
    prometheus.rows = engine_rows("node-a:8000", PRESSED) + kvcatch_rows(batch, PRESSED, "engine-1234.core0")
    hog = doctor(prometheus, capsys)["KVC003"]
    assert hog["tenant"] == "batch jobs"
    # As a shell reads it.
    assert shlex.split(hog["remedy"])[-1] == "batch jobs=0.5"
    assert hog["evidence"][0]["value"] == pytest.approx(0.75)


def test_without_the_exporter_only_the_pressure_is_named(prometheus, capsys) -> None:
    prometheus.rows = engine_rows("node-a:8000", PRESSED)
    found = doctor(prometheus, capsys)
    assert "KVC003" not in found
    assert "which request or tenant holds them no metric tells" in found["KVC001"]["evidence"][-1]["text"]


def test_equal_tenants_and_a_calm_pool_have_no_hog(prometheus, capsys) -> None:
    even: Tenants = (("team0", 116, 4), ("team1", 116, 4), ("team2", 116, 5))
    prometheus.rows = engine_rows("node-a:8000", PRESSED) + kvcatch_rows(even, PRESSED, "engine-1234.core0")
    assert "KVC003" not in doctor(prometheus, capsys)
    # A large request that nobody waits for.
    prometheus.rows = engine_rows("node-a:8000", range(0)) + kvcatch_rows(HOG, PRESSED, "engine-1234.core0")
    assert "KVC003" not in doctor(prometheus, capsys)


def test_each_of_two_engines_gets_its_own_tenants(prometheus, capsys) -> None:
    """Both serve the model as engine 0; the exporter's target or host tells which one it speaks of."""
    prometheus.rows = [
        *engine_rows("node-a:8000", PRESSED),
        *engine_rows("node-b:8000", PRESSED),
        *kvcatch_rows(CALM, PRESSED, "engine-1.core0", "node-a:9400"),
        *kvcatch_rows(HOG, PRESSED, "engine-2.core0", "node-b:9400"),
    ]
    target = f"prometheus:http://127.0.0.1:{prometheus.server_address[1]}"
    span = ["--from", str(START), "--to", str(START + EVERY * (POINTS - 1))]
    main(["doctor", target, "--json", "--exit-zero", *span])
    hogs = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["code"] == "KVC003"]
    assert [one["tenant"] for one in hogs] == ["contracts"]
    # An exporter elsewhere, or on a host with both, may speak of either: no guess. An address is none.
    for first, second, target, exporter, named in (
        ("node-a:8000", "node-b:8000", "engine-1.core0", "node-c:9400", False),
        ("node-a:8000", "node-a:8001", "engine-1.core0", "node-a:9400", False),
        ("node-a:8000", "node-a:8001", "http://node-a:8001/metrics", "node-a:9400", True),
    ):
        prometheus.rows = [
            *engine_rows(first, PRESSED), *engine_rows(second, PRESSED), *kvcatch_rows(HOG, PRESSED, target, exporter)
        ]  # fmt: skip
        assert ("KVC003" in doctor(prometheus, capsys)) is named

"""OTLP export: the numbers of the Prometheus page under OpenTelemetry's names and units, sent for real."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from fakes.capture import FakeCapture
from kvcatch.errors import KVCatchError
from kvcatch.metrics import BY_NAME, CATALOGUE
from kvcatch.views.otel import OtelExport, otel_name, otel_unit, otlp_reader
from kvcatch.views.targets import Fleet, Target


@pytest.fixture
def fleet() -> Fleet:
    one = Target("x", lambda _: FakeCapture(), 1)
    one.read()
    return Fleet([one])


def points(reader: InMemoryMetricReader) -> dict[str, list[tuple[dict[str, Any], float, str]]]:
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[str, list[tuple[dict[str, Any], float, str]]] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            found.setdefault(metric.name, []).append((dict(point.attributes), point.value, metric.unit))
    return found


def test_names_carry_no_units_and_units_are_ucum() -> None:
    assert otel_name(BY_NAME["kvcatch_kv_cache_bytes"]) == "kvcatch.kv_cache"
    assert otel_unit(BY_NAME["kvcatch_kv_cache_bytes"]) == "By"
    assert otel_unit(BY_NAME["kvcatch_kv_cache_blocks"]) == "{block}"
    assert otel_unit(BY_NAME["kvcatch_committed_ratio"]) == "1"
    assert otel_name(BY_NAME["kvcatch_preemptions_total"]) == "kvcatch.preemptions"
    assert otel_name(BY_NAME["kvcatch_kv_transfer_bytes_total"]) == "kvcatch.kv_transfer.size"
    assert otel_name(BY_NAME["kvcatch_kv_transfer_seconds_total"]) == "kvcatch.kv_transfer.duration"
    names = [otel_name(metric) for metric in CATALOGUE]
    assert len(set(names)) == len(names)


def test_the_numbers_are_those_of_the_snapshot(fleet: Fleet) -> None:
    reader = InMemoryMetricReader()
    export = OtelExport(fleet.observations, reader)
    got = points(reader)
    states = {labels["state"]: value for labels, value, _ in got["kvcatch.kv_cache_blocks"]}
    assert states == {"active": 60, "cached": 25, "free": 15}
    assert got["kvcatch.watermark"] == [
        ({"target": "x", "model_name": "tiny-llama", "engine": "0", "source": "assumed"}, 0.85, "1")
    ]
    assert "kvcatch.requests_held" not in got
    export.close()


def test_metrics_reach_a_collector(fleet: Fleet) -> None:
    received: list[bytes] = []
    arrived = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            assert self.path == "/v1/metrics"
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            arrived.set()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    export = OtelExport(fleet.observations, otlp_reader(f"http://127.0.0.1:{server.server_address[1]}", 60))
    export.close()
    assert arrived.wait(20)
    server.shutdown()
    thread.join()
    server.server_close()
    message = ExportMetricsServiceRequest.FromString(received[0])
    names = {metric.name for metric in message.resource_metrics[0].scope_metrics[0].metrics}
    assert "kvcatch.kv_cache_blocks" in names


def test_a_bad_endpoint_is_named() -> None:
    with pytest.raises(KVCatchError, match="not an http"):
        otlp_reader("collector:4318", 1)

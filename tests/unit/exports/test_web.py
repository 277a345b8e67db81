"""``kvcatch serve`` over real sockets: routes, schema, and targets that misbehave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from fakes.capture import FakeCapture, snapshot
from kvcatch.errors import KVCatchError
from kvcatch.results import Headroom, Snapshot
from kvcatch.store.base import Capture
from kvcatch.views.headroom_api import SCHEMA, document
from kvcatch.views.targets import Fleet, Target
from kvcatch.views.web import MetricsServer, listen


class Blocked(FakeCapture):
    """A target whose read never returns until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.reading = threading.Event()

    def refresh(self) -> None:
        self.reading.set()
        self.release.wait(30)


def get(url: str, accept: str = "*/*") -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def captures() -> dict[str, Capture]:
    state = snapshot(headroom=Headroom(requests=4, prompt_tokens=64, output_tokens=16, limit="blocks"))
    return {"live:4242": FakeCapture(state), "dead": FakeCapture(), "slow": Blocked()}


@pytest.fixture
def server(captures: dict[str, Capture]) -> Iterator[MetricsServer]:
    def opener(name: str | None) -> Capture:
        if name == "dead":
            raise KVCatchError("no recorder <script>alert(1)</script>")
        return captures[str(name)]

    fleet = Fleet([Target(name, opener, 0.1) for name in captures])
    running = MetricsServer(("127.0.0.1", 0), fleet)
    for one in fleet.targets[:2]:
        one.read()
    fleet.start()
    slow = captures["slow"]
    assert isinstance(slow, Blocked)
    assert slow.reading.wait(20)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield running
    slow.release.set()
    fleet.stop()
    running.shutdown()
    thread.join()
    running.server_close()


def check(value: Any, schema: dict[str, Any]) -> None:
    """As much of JSON Schema as our schema uses."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "number": (int, float),
        "integer": int,
        "null": type(None),
    }
    if "enum" in schema:
        assert value in schema["enum"]
        return
    if "const" in schema:
        assert value == schema["const"]
        return
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    assert any(isinstance(value, kinds[name]) for name in names), (value, names)
    if isinstance(value, dict):
        assert set(schema["required"]) == set(value) == set(schema["properties"])
        for key, part in schema["properties"].items():
            check(value[key], part)
    elif isinstance(value, list):
        for part in value:
            check(part, schema["items"])
    elif isinstance(value, int | float):
        assert value >= schema.get("minimum", value)
        assert value <= schema.get("maximum", value)


def test_a_hanging_and_a_dead_target_delay_nobody(server: MetricsServer) -> None:
    status, kind, text = get(server.url + "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert (
        'kvcatch_kv_cache_blocks{engine="0",model_name="tiny-llama",state="active",target="live:4242"' in text
    )
    assert 'kvcatch_up{engine="0",model_name="",target="dead"} 0.0' in text
    assert 'target="slow"' not in text  # never answered: nothing is known


def test_openmetrics_is_spoken_when_asked_for(server: MetricsServer) -> None:
    _, kind, text = get(server.url + "/metrics", "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_headroom_follows_its_published_schema(server: MetricsServer) -> None:
    status, kind, text = get(server.url + "/v1/headroom")
    answer = json.loads(text)
    assert (status, kind) == (200, "application/json")
    check(answer, SCHEMA)
    assert json.loads(get(server.url + "/v1/headroom/schema")[2]) == SCHEMA
    live, dead = answer["engines"]
    assert (live["requests"], live["limit"], live["prompt_tokens"]) == (4, "blocks", 64)
    assert (live["usable_blocks"], live["active_blocks"], live["available_tokens"]) == (100, 60, 640)
    assert live["utilization_ratio"] == 0.6
    assert (dead["state"], dead["requests"], dead["limit"]) == ("connecting", None, None)


def test_headroom_is_of_this_moment(server: MetricsServer, captures: dict[str, Capture]) -> None:
    """A recorder is read again for the answer; between two reads of the exporter an engine goes far."""
    for one in server.fleet.targets:
        one.stop()
    deadline = threading.Event()
    while server.fleet.targets[0].alive:
        deadline.wait(0.01)
    live = captures["live:4242"]
    assert isinstance(live, FakeCapture)
    live.state = snapshot(headroom=Headroom(requests=1, prompt_tokens=64, output_tokens=16, limit="queue"))
    engines = json.loads(get(server.url + "/v1/headroom")[2])["engines"]
    assert (engines[0]["requests"], engines[0]["limit"]) == (1, "queue")


def test_headroom_can_be_asked_for_a_size(server: MetricsServer) -> None:
    """40 of 100 blocks of 16 are unreferenced: 150 + 11 tokens hold 160 slots at the end = 10 blocks, 4 fit."""
    url = server.url + "/v1/headroom?target=live:4242&prompt_tokens=150&output_tokens=11"
    (live,) = json.loads(get(url)[2])["engines"]
    assert (live["requests"], live["limit"]) == (4, "blocks")
    assert (live["prompt_tokens"], live["output_tokens"]) == (150, 11)


@pytest.mark.parametrize(
    "query", ["prompt_tokens=1", "prompt_tokens=-1&output_tokens=2", "prompt_tokens=x&output_tokens=2",
              "prompt_tokens=0&output_tokens=1", "prompt_tokens=" + "9" * 4000 + "&output_tokens=1", "within_ms=-1",
              "prompt_tokens=1&output_tokens=1&within_ms=1e3", "within_ms=60001"],
)  # fmt: skip
def test_bad_sizes_are_refused(server: MetricsServer, query: str) -> None:
    status, _, text = get(server.url + "/v1/headroom?" + query)
    assert status == 400
    assert "error" in json.loads(text)


def test_old_numbers_are_not_offered_as_room() -> None:
    state = snapshot(state="stale", headroom=Headroom(requests=4, limit="blocks"))
    one = Target("x", lambda _: FakeCapture(state), 1)
    one.read()
    (engine,) = document(one.latest)["engines"]
    assert (engine["state"], engine["requests"], engine["limit"]) == ("stale", None, None)


def test_the_landing_page_escapes_what_targets_say(server: MetricsServer) -> None:
    status, kind, text = get(server.url + "/")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "60.0%" in text


def test_health_is_about_the_exporter_not_about_the_engines(server: MetricsServer) -> None:
    status, _, text = get(server.url + "/healthz")
    assert (status, json.loads(text)) == (200, {"status": "ok", "engines": 2, "engines_up": 1})


def test_other_paths_do_not_exist(server: MetricsServer) -> None:
    assert get(server.url + "/etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), (":9000", ("127.0.0.1", 9000)), ("9000", ("127.0.0.1", 9000)),
     ("[::1]:7", ("::1", 7)), ("0.0.0.0:0", ("0.0.0.0", 0))],
)  # fmt: skip
def test_listen_defaults_to_loopback(text: str, address: tuple[str, int]) -> None:
    assert listen(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port", "host:70000"])
def test_listen_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(KVCatchError):
        listen(text)


def test_the_verb_serves_until_it_is_told_to_stop(tmp_path: Any) -> None:
    """A URL that is down at the start is no reason not to start."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "kvcatch",
        "serve",
        f"http://127.0.0.1:{port}",
        "--listen",
        "127.0.0.1:0",
    ]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "KVCATCH_DIR": str(tmp_path)}
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("Serving 1 target on http://127.0.0.1:")
        url = line.split()[4].removesuffix("/metrics")
        assert get(url + "/healthz")[0] == 200
        taken = subprocess.run(
            [*command[:-1], url.removeprefix("http://")], capture_output=True, text=True, check=False
        )
        assert taken.returncode == 2
        assert "Address already in use" in taken.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        process.stderr.close()


def test_a_scraped_target_under_the_exporter_never_blocks_the_page() -> None:
    assert Snapshot().state == "live"  # the default an observation starts from is never shown as up
    one = Target("http://127.0.0.1:1/metrics", lambda _: (_ for _ in ()).throw(KVCatchError("down")), 1)
    one.read()
    (seen,) = one.latest
    assert (seen.up, seen.error) == (False, "down")

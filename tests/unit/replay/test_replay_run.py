"""Replaying to a stand-in server: what is sent, what faults leave behind, and how an interrupt ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvcatch.analysis.compare import compare
from kvcatch.cli.compare import open_side
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.replay.endpoint import base_url, shown
from kvcatch.replay.run import Options, replay
from kvcatch.sources.replayed import read_replayed
from kvcatch.workload import Workload, build
from unit.replay.replay_servers import Fake, fake_server, stream


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_server() as running:
        yield running


def workload(count: int = 40, gap: float = 0.005) -> Workload:
    rows = [
        {"arrival": gap * n, "prompt": 32 + n, "output": 1 + n % 5, "tenant": ("a team", "beta")[n % 2],
         "segments": [(0, 32), *([(n, n)] if n else [])]}
        for n in range(count)
    ]  # fmt: skip
    return build("/somewhere/made-up", rows, grain=1)


def test_lengths_tenants_and_order_are_the_workloads(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    done = replay(workload(), Options(fake.url, seed=3), str(path))
    assert [len(body["prompt"]) for body in fake.asked] == [32 + n for n in range(40)]
    assert [body["max_tokens"] for body in fake.asked] == [1 + n % 5 for n in range(40)]
    assert all(body["ignore_eos"] and body["min_tokens"] == body["max_tokens"] for body in fake.asked)
    sent = [answer.sent_seconds for answer in done.answers]
    assert sent == sorted(sent)
    assert fake.ids[1] == "kvc~beta~~r1"
    assert fake.ids[0] == "r0"  # a blank cannot stand in a header's id
    assert fake.asked[0]["vllm_xargs"] == {"kvcatch_tenant": "a team"}
    assert done.answers[7].output_tokens == 3
    assert read_replayed(path) == done
    assert done.head.trace == "made-up"


def test_what_was_sent_is_not_in_the_results(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    replay(workload(8), Options(fake.url, api_key="sk-canary-1234"), str(path))
    assert fake.headers[0]["Authorization"] == "Bearer sk-canary-1234"
    text = path.read_text()
    assert "sk-canary" not in text
    assert json.dumps(fake.asked[3]["prompt"][:4])[1:-1] not in text


def test_speed_divides_the_arrivals(fake: Fake, tmp_path: Path) -> None:
    done = replay(workload(10, 0.02), Options(fake.url, speed=4.0, warm_up=0), str(tmp_path / "r.jsonl"))
    assert [answer.due_seconds for answer in done.answers] == pytest.approx([0.005 * n for n in range(10)])


async def refuse_some(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if len(body["prompt"]) % 4 == 1:
        return web.json_response({"error": {"message": "too long\nby far " + "x" * 500}}, status=400)
    if len(body["prompt"]) % 4 == 2:
        assert request.transport is not None
        request.transport.close()
    if len(body["prompt"]) % 4 == 3:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        return response  # ends before its end
    return await stream(request, body)


def test_refused_broken_and_truncated_answers_are_told_apart(fake: Fake, tmp_path: Path) -> None:
    fake.answer = refuse_some
    path = tmp_path / "r.jsonl"
    done = replay(workload(16), Options(fake.url, warm_up=0), str(path))
    said = {answer.prompt_tokens % 4: (answer.status, answer.error) for answer in done.answers}
    assert said[0] == ("ok", None)
    assert said[1][0] == "refused"
    assert said[1][1] is not None
    assert said[1][1].startswith("too long by far xx")
    assert len(said[1][1]) <= 160
    assert said[2][0] == "failed"
    assert said[3] == ("failed", "the answer stopped before its end")
    assert any("not answered" in note for note in open_side(str(path)).notes)


def test_a_server_that_refuses_the_warm_up_stops_it(fake: Fake, tmp_path: Path) -> None:
    async def no(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"message": "no token ids here"}, status=422)

    fake.answer = no
    with pytest.raises(KVCatchError, match="no token ids here"):
        replay(workload(), Options(fake.url), str(tmp_path / "r.jsonl"))
    assert not (tmp_path / "r.jsonl").exists()


def test_longer_than_the_model_is_left_out_and_said(fake: Fake, tmp_path: Path) -> None:
    rows = [{"arrival": 0.0, "prompt": size, "output": 8, "segments": [(size, size)]} for size in (5000, 100)]
    said: list[str] = []
    done = replay(build("w", rows, grain=1), Options(fake.url), str(tmp_path / "r.jsonl"), note=said.append)
    assert [answer.prompt_tokens for answer in done.answers] == [100]
    assert any("1 requests are longer" in one for one in said)


def test_nothing_is_overwritten_and_bad_options_are_named(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("mine")
    with pytest.raises(KVCatchError, match="exists"):
        replay(workload(), Options(fake.url), str(path))
    assert path.read_text() == "mine"
    with pytest.raises(KVCatchError, match="speed"):
        replay(workload(), Options(fake.url, speed=0.0), str(tmp_path / "n.jsonl"))
    with pytest.raises(KVCatchError, match="no answer"):
        replay(workload(), Options("http://127.0.0.1:9"), str(tmp_path / "n.jsonl"))
    with pytest.raises(KVCatchError, match="made-up"):
        replay(workload(), Options(fake.url, model="other"), str(tmp_path / "n.jsonl"))


def test_an_interrupt_leaves_a_complete_file(fake: Fake, tmp_path: Path) -> None:
    """Ctrl-C while answers hang: they are given up and marked, nothing more is sent, exit 130."""

    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["max_tokens"] == 3:
            await asyncio.sleep(300)
        return await stream(request, body)

    fake.answer = hang
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 20 * n, "input_length": 600, "output_length": 1 + 2 * (n % 2), "hash_ids": [0, n + 1]}
            for n in range(2000)]  # fmt: skip
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    path = tmp_path / "r.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcatch", "replay", str(trace), "--url", fake.url, "-o", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": "src"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(fake.asked) < 12:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    found = read_replayed(path)
    assert found is not None
    assert found.tail is not None
    assert found.tail.interrupted
    assert {answer.status for answer in found.answers} == {"ok", "interrupted"}
    assert len(found.answers) < 2000


def test_a_killed_run_is_read_up_to_its_last_whole_line(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    replay(workload(12), Options(fake.url), str(path))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:8]) + lines[8][:40])
    found = read_replayed(path)
    assert found is not None
    assert len(found.answers) == 7
    assert found.tail is None


def test_damage_and_newer_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"kind":"kvcatch-replay","schema_version":9}\n')
    with pytest.raises(KVCatchError, match="version 9"):
        read_replayed(path)
    path.write_text('{"kind":"kvcatch-replay","schema_version":1}\n{"index":"x"}\n')
    with pytest.raises(KVCatchError, match="damaged"):
        read_replayed(path)
    path.write_text("not json\n")
    assert read_replayed(path) is None
    assert read_replayed(tmp_path / "absent") is None


def test_two_runs_compare_request_by_request(fake: Fake, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.jsonl") for number in range(2)]
    for path in paths:
        replay(workload(), Options(fake.url), path)
    comparison = compare(*(open_side(path) for path in paths))
    assert comparison.paired
    assert comparison.requests == 38
    assert comparison.metric("prompt_tokens").verdict == "equal"
    # The stand-in has no counters and no cache: what is not known has no row.
    assert comparison.metric("hit_ratio") is None
    assert comparison.metric("preemptions_per_request") is None


def test_the_verb_prints_one_document(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCATCH_DIR", str(tmp_path / "state"))
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        json.dumps({"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1]}) + "\n"
    )
    path = tmp_path / "r.jsonl"
    assert main(["replay", str(trace), "--url", fake.url + "/v1", "-o", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["completed"], said["requests"], said["prompt_tokens"]) == (1, 1, 20)
    assert said["cached_tokens"] is None
    assert said["engine_counters"] == {}


def test_users_of_a_trace_never_leave_as_they_are(fake: Fake, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 5 * n, "input_length": 20, "output_length": 2, "hash_ids": [n], "user": f"canary-{n % 2}@example.org"}
        for n in range(6)
    ]  # fmt: skip
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    path = tmp_path / "r.jsonl"
    assert main(["replay", str(trace), "--url", fake.url, "-o", str(path), "--json"]) == 0
    sent = json.dumps([fake.bodies, [dict(headers) for headers in fake.headers]])
    assert "canary" not in path.read_text() + sent
    found = read_replayed(path)
    assert found is not None
    assert len({answer.tenant for answer in found.answers}) == 2
    assert all(answer.tenant.startswith("u:") for answer in found.answers)


def test_addresses() -> None:
    for given in ("http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/completions"):
        assert base_url(given) == "http://h:8000"
    assert base_url("https://h/prefix/v1") == "https://h/prefix"
    assert shown("http://user:secret@h:1/v1?key=secret") == "http://h:1/v1"
    for bad in ("h:8000", "ftp://h", "http://h:99999", "http://"):
        with pytest.raises(KVCatchError):
            base_url(bad)

"""A mirror whose candidate hangs, fails, closes or differs: the client sees none of it, and no text is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcatch.capture.hooks import Hooks
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.gateway.mirror import QUEUE, Mirror, chosen
from kvcatch.gateway.mirror_worker import FAILURES
from kvcatch.gateway.policyfile import check
from kvcatch.quality.shadow import read_pairs
from kvcatch.sources.replayed import read_replayed

from .stub import Running, gateway, until

CANARY = "zebra-canary-9917"
Model = Callable[[str, dict[str, Any]], tuple[int, Any]]


def model(shift: float = 0.0, token: int = 7) -> Model:
    """One token per character; always expects token 7 with 0.6, or what ``shift`` makes of it."""

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "stub", "root": "stub"}]}
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/tokenize":
            text = body.get("prompt") or "".join(one["content"] for one in body["messages"])
            return 200, {"tokens": [ord(one) for one in text]}
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        if body.get("prompt_logprobs", 0) > 20:
            return 400, {"error": {"message": "too many", "param": "prompt_logprobs"}}
        ids = body["prompt"]
        if isinstance(ids, str) or "prompt" not in body:
            ids = [0] * len(ids)
        row = {"7": {"logprob": -0.5 - shift, "rank": 1 if not shift else 2}, "8": {"logprob": -1.0 + shift, "rank": 2 if not shift else 1}}  # fmt: skip
        rows = [None] + [{**row, str(one): {"logprob": -9.0, "rank": 9}} for one in ids[1:]]
        step = {f"token_id:{token}": -0.5}
        count = body["max_tokens"]
        choice = {"text": CANARY, "prompt_logprobs": rows,
                  "logprobs": {"tokens": [f"token_id:{token}"] * count, "top_logprobs": [step] * count}}  # fmt: skip
        return 200, {"choices": [choice], "usage": usage}

    return answer


class Candidate:
    """A threaded server: the gateway's loop must not be what answers its mirror."""

    def __init__(self, reply: Model) -> None:
        self.reply, self.seen = reply, Counter[str]()
        self.hang: threading.Event | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(size)
                outer.seen[self.path] += 1
                if outer.hang is not None:
                    outer.hang.wait(30)
                    return
                status, body = outer.reply(self.path, json.loads(raw) if raw else {})
                data = json.dumps(body).encode()
                if status == 0:
                    return  # closes without an answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _do

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        if self.hang is not None:
            self.hang.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def candidate() -> Iterator[Callable[[Model], Candidate]]:
    made: list[Candidate] = []

    def start(reply: Model) -> Candidate:
        made.append(Candidate(reply))
        return made[-1]

    yield start
    for one in made:
        one.close()


@contextlib.contextmanager
def mirrored(running: Running, url: str, folder: Path, base: str | None = None, **more: Any) -> Iterator[Any]:
    """A mirror on a running gateway; ``base`` answers its comparisons for the upstream (a stub has no logits)."""
    counts: Counter[str] = Counter()
    one = Mirror(
        url, more.pop("share", 1.0), str(folder), idle=more.pop("idle", lambda engine: True),
        count=lambda outcome: counts.update([outcome]), **more,
    )  # fmt: skip
    if base is not None:
        Hooks().add(one, "_task", lambda make: lambda job: msgspec.structs.replace(make(job), engine=base))
    one.start()
    running.proxy.copy = one.offer
    try:
        yield one, counts
    finally:
        running.proxy.copy = None
        one.close()


def test_both_sides_become_files_that_compare_and_quality_read(candidate, tmp_path, capsys):
    base, other = candidate(model()), candidate(model())

    async def scenario() -> None:
        async with gateway() as running:
            with mirrored(running, other.url, tmp_path / "m", base.url) as (one, counts):
                for at in range(12):
                    status, _, _ = await running.post(
                        prompt=f"{CANARY}-{at}", headers={"X-Request-Id": f"{CANARY}.{at}"}
                    )
                    assert status == 200
                    await until(lambda at=at: counts["compared"] == at + 1, "a comparison")
                assert not one.stopped
                assert counts["copied"] == 12

    asyncio.run(scenario())
    pairs = read_pairs(str(tmp_path / "m" / "pairs.jsonl"))
    assert [(row.kl_nats, row.flips_ratio, row.first_divergence) for row in pairs] == [(0.0, 0.0, None)] * 12
    sides = [read_replayed(tmp_path / "m" / name) for name in ("upstream.jsonl", "candidate.jsonl")]
    for side in sides:
        assert side is not None
        assert [row.status for row in side.answers] == ["ok"] * 12
        assert {row.output_tokens for row in side.answers} == {2}
        assert side.tail is not None
    names = [str(tmp_path / "m" / name) for name in ("upstream.jsonl", "candidate.jsonl")]
    assert main(["compare", *names, "--json", "--exit-zero"]) == 0
    assert json.loads(capsys.readouterr().out)["paired"]
    for path in (tmp_path / "m").iterdir():
        assert CANARY not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_candidate_that_differs_stops_the_mirror_with_a_fail(candidate, tmp_path, caplog):
    base, other = candidate(model()), candidate(model(shift=0.5, token=8))

    async def scenario() -> None:
        async with gateway() as running:
            with mirrored(running, other.url, tmp_path / "m", base.url) as (one, counts):
                for at in range(200):
                    await running.post(prompt=f"{CANARY} number {at}")
                    await until(lambda at=at: one.stopped or counts["compared"] > at, "a comparison")
                    if one.stopped:
                        break
                assert one.stopped == "verdict"
                before = other.seen.total()
                status, _, _ = await running.post()
                assert status == 200
                assert other.seen.total() == before

    asyncio.run(scenario())
    assert "mirror stopped" in caplog.text
    assert CANARY not in caplog.text


def test_a_hanging_candidate_costs_the_client_nothing_and_the_queue_is_bounded(candidate, tmp_path):
    other = candidate(model())
    other.hang = threading.Event()

    async def scenario() -> None:
        async with gateway() as running:
            plain = await running.post(headers={"X-Request-Id": "one"})
            with mirrored(running, other.url, tmp_path / "m") as (one, counts):
                put = one._queue.put

                def never_waits(job: object, block: bool = True, timeout: float | None = None) -> None:
                    assert not block
                    put(job, block, timeout)

                one._queue.put = never_waits
                # None of these answers can have waited: the candidate answers nobody before the end.
                for _ in range(QUEUE + 5):
                    status, headers, body = await running.post(headers={"X-Request-Id": "one"})
                    assert (status, body) == (plain[0], plain[2])
                    drop = ("Date",)
                    assert {k: v for k, v in headers.items() if k not in drop} == {
                        k: v for k, v in plain[1].items() if k not in drop
                    }
                assert counts["dropped"] in {4, 5}  # one may be in the thread's hands
                assert other.hang is not None
                other.hang.set()

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [0, 500, 429])
def test_a_failing_candidate_stops_the_mirror(candidate, tmp_path, caplog, status: int):
    other = candidate(lambda path, body: (status, {"error": CANARY}))

    async def scenario() -> None:
        async with gateway() as running:
            with mirrored(running, other.url, tmp_path / "m") as (one, counts):
                for _ in range(FAILURES):
                    assert (await running.post(prompt=CANARY))[0] == 200
                await until(lambda: bool(one.stopped), "the stop")
                assert one.stopped == "errors"
                assert counts["failed"] == FAILURES
                assert (await running.post())[0] == 200

    asyncio.run(scenario())
    assert "failed 5 times in a row" in caplog.text
    assert CANARY not in caplog.text


def test_a_worker_that_is_killed_stops_the_mirror_and_no_client_sees_it(candidate, tmp_path, caplog):
    base, other = candidate(model()), candidate(model())

    async def scenario() -> None:
        async with gateway() as running:
            with mirrored(running, other.url, tmp_path / "m", base.url) as (one, counts):
                await running.post()
                await until(lambda: counts["compared"] == 1, "a comparison")
                one._worker.process.kill()
                for _ in range(3):
                    assert (await running.post())[0] == 200
                await until(lambda: bool(one.stopped), "the stop")
                assert one.stopped == "errors"

    asyncio.run(scenario())
    assert "its process has ended" in caplog.text
    assert len(read_pairs(str(tmp_path / "m" / "pairs.jsonl"))) == 1


def test_a_worker_ends_with_the_gateway_that_was_killed(tmp_path):
    script = (
        "import signal, sys\nfrom kvcatch.gateway.mirror import Mirror\n"
        "one = Mirror('http://127.0.0.1:1', 1.0, sys.argv[1], idle=None, count=lambda name: None)\n"
        "one.start()\nprint(one._worker.process.pid, flush=True)\nsignal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "m")], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    ended, _, _ = select.select([worker], [], [], 30)
    os.close(worker)
    assert ended


def test_a_busy_or_broken_upstream_is_left_alone_and_is_not_the_candidates_fault(candidate, tmp_path):
    base, other = candidate(lambda path, body: (500, {})), candidate(model())

    async def scenario() -> None:
        async with gateway() as running:
            busy = True
            with mirrored(running, other.url, tmp_path / "m", base.url, idle=lambda engine: not busy) as (
                one,
                counts,
            ):
                await running.post()
                await until(lambda: counts["busy"] == 1, "the first")
                assert not base.seen
                busy = False
                for at in range(FAILURES + 1):
                    await running.post()
                    await until(lambda at=at: counts["baseline-failed"] == at + 1, "the next")
                assert not one.stopped

    asyncio.run(scenario())


def test_idle_needs_a_fresh_look_an_empty_line_and_half_of_the_pool():
    async def scenario() -> None:
        async with gateway() as running:
            (engine,) = running.gate.engines
            assert running.gate.idle(engine)
            running.stub.usage = 0.6
            await until(lambda: not running.gate.idle(engine), "a look at the fuller pool")
            running.stub.usage = 0.0
            await until(lambda: running.gate.idle(engine), "a look at the emptier pool")
            engine.read_at = None
            assert not running.gate.idle(engine)

    asyncio.run(scenario())


def test_the_choice_is_of_the_id_alone_and_of_the_share():
    names = [f"chatcmpl-{at}" for at in range(20_000)]
    kept = {name for name in names if chosen(name, 0.05)}
    assert kept == {name for name in names if chosen(name, 0.05)}
    assert abs(len(kept) - 1000) <= 93  # three standard deviations: sqrt(20000*.05*.95) = 30.8
    assert kept <= {name for name in names if chosen(name, 0.1)}
    assert all(chosen(name, 1.0) for name in names)


def test_the_policy_file_and_folders_that_hold_results(tmp_path):
    assert not check(b'[mirror]\nurl = "http://127.0.0.1:1"\nshare = 0.01\ndir = "x"\nmax_kl = 0.1\n')[1]
    (problem,) = check(b"[mirror]\nshare = 2\n")[1]
    assert (problem.line, problem.where) == (2, "mirror.share")
    (tmp_path / "pairs.jsonl").write_text("kept")
    one = Mirror("http://127.0.0.1:1", 1.0, str(tmp_path), idle=lambda engine: True, count=lambda name: None)
    with pytest.raises(KVCatchError, match="holds results"):
        one.start()
    assert (tmp_path / "pairs.jsonl").read_text() == "kept"

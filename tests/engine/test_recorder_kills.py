"""A real server is killed in each of its parts while it works; the record of its last moments stays."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvcatch
from engine.support import env, observed
from engine.support.loads import tenants_load
from engine.support.processes import children, deadline_poll, title
from engine.support.server import Answer, Ask, Server, alive, ask_all, server
from engine.support.top import kvcatch as run_kvcatch
from engine.support.top import top_json
from kvcatch.store.replay import Replay

POOL = ["--num-gpu-blocks-override", "60", "--block-size", "32", "--max-model-len", "1024"]
#: a pid namespace and a mount namespace with a /proc and a /dev/shm of its own
APART = [
    "unshare",
    *([] if os.geteuid() == 0 else ["-r"]),
    *["-p", "-f", "-m", "--mount-proc", "--kill-child"],
    *["sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"],
]


@contextmanager
def under_load(running: Server, folder: Path, updates: int) -> Iterator[list[Answer]]:
    """Requests from a thread; the block begins once the observer has seen so many steps."""
    answers: list[Answer] = []
    sender = threading.Thread(target=lambda: answers.extend(ask_all(running.url, tenants_load(300), 32)))
    sender.start()

    def enough() -> bool:
        return any(len(observed.read(path).updates) >= updates for path in folder.glob("observer-*"))

    deadline_poll(enough, 300, f"{updates} observed steps", 0.2)
    yield answers
    sender.join()


def check_last_moments(folder: Path, ring: Path) -> None:
    """The recorded steps are the observed ones, the last at most one behind; requests were in flight."""
    (seen,) = observed.read_all(folder)
    steps = []
    for step in Replay(str(ring)):
        steps.append(observed.Recorded.of(step, 1))
    assert len(seen.updates) - steps[-1].step <= 1
    seen.updates = seen.updates[: steps[-1].step]
    comparison = observed.compare_rows(seen, steps)
    assert not comparison.wrong, str(comparison)
    capture = kvcatch.open(str(ring))
    snapshot = capture.snapshot()
    assert snapshot.state == "ended"
    assert snapshot.queues.running
    assert any(view.num_blocks for view in snapshot.requests)
    capture.close()


def test_killed_worker(tmp_path: Path, tiny_model: Path) -> None:
    rings = tmp_path / "rings"
    with server(
        tmp_path, tiny_model, *POOL, KVCATCH="1", KVCATCH_DIR=str(rings), KVCATCH_TEST_OBSERVER=str(tmp_path)
    ) as running:
        (worker,) = running.pids("Worker")
        with under_load(running, tmp_path, 150):
            os.kill(worker, signal.SIGKILL)
        running.process.wait(120)
        running.kill()
    (ring,) = rings.glob("*.core0.kvring")
    check_last_moments(tmp_path, ring)


def test_killed_engine_core_in_namespaces_of_its_own_and_its_next_life(
    tmp_path: Path, tiny_model: Path
) -> None:
    rings, first = tmp_path / "rings", tmp_path / "first"
    recorded = {"KVCATCH": "1", "KVCATCH_DIR": str(rings)}
    first.mkdir()
    with server(
        first, tiny_model, *POOL, command=APART, **recorded, KVCATCH_TEST_OBSERVER=str(first)
    ) as running:
        (core,) = running.pids("EngineCore")
        with under_load(running, first, 150):
            said = top_json(directory=str(rings))
            os.kill(core, signal.SIGKILL)
        running.process.wait(120)
        running.kill()
    # From outside of the namespaces: alive, and its requests are seen.
    assert said["state"] == "live"
    assert said["queues"]["running"] > 0
    assert any(view["num_blocks"] for view in said["requests"])
    (ring,) = rings.glob("*.core0.kvring")
    check_last_moments(first, ring)

    with server(tmp_path / "second", tiny_model, *POOL, command=APART, **recorded) as running:
        running.complete("hello", 8)
        said = top_json(directory=str(rings))
        assert said["state"] in ("live", "idle")
        assert said["step"] < 50
        lives = json.loads(run_kvcatch("ls", "--json", KVCATCH_DIR=str(rings)).stdout)
        states = {entry["name"]: entry["state"] for entry in lives["recorders"]}
        assert states.pop(ring.name.removesuffix(".kvring")) == "ended"
        assert set(states.values()) <= {"live", "idle"}
        assert len(states) == 1
    check_last_moments(first, ring)


PROMPT, USER, KEY = "Canary sings at dawn 4711", "canary.user@example.org", "sk-canary-8842"
#: token ids that no counter or size happens to be
TOKENS = [101, 37, 88, 14, 97, 113, 55, 29, 73, 61, 90, 42]


def requests_in(path: Path) -> set[str | None]:
    """The requests that a capture file has so far."""
    capture = kvcatch.open(str(path))
    found = {view.request_id for view in capture.requests()}
    capture.close()
    return found


def test_run_survives_the_drainer_leaves_no_orphan_and_keeps_no_secret(
    tmp_path: Path, tiny_model: Path
) -> None:
    rings, capture_file = tmp_path / "rings", tmp_path / "x.kvcap"
    tags = tmp_path / "tags.toml"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    tags.write_text(f'[tenant.keys]\n"sha256:{digest}" = "billing"\n')
    bearer = {"Authorization": f"Bearer {KEY}"}
    asks = [
        Ask(PROMPT * 8, 24, "by-key", headers=bearer),
        Ask(PROMPT * 9, 24, "by-field", more={"user": USER}, headers=bearer),
        Ask(TOKENS * 12, 24, f"kvc~sales~{USER}~by-id", headers=bearer),
        Ask(TOKENS * 13, 24, "by-xargs", more={"vllm_xargs": {"kvcatch_user": USER}}, headers=bearer),
        Ask(PROMPT * 7, 24, "by-header", headers={**bearer, "X-User": USER, "X-Tenant": "shop"}),
    ]
    with server(
        tmp_path,
        tiny_model,
        *POOL,
        *["--middleware", "kvcatch.capture.middleware.TagMiddleware"],
        command=[env.PYTHON, "-m", "kvcatch", "run", "-o", str(capture_file), "--"],
        KVCATCH_DIR=str(rings),
        KVCATCH_TAGS=str(tags),
        VLLM_API_KEY=KEY,
    ) as running:
        run_pid = running.process.pid
        answers = ask_all(running.url, asks)
        assert [answer.status for answer in answers] == [200] * len(asks), answers[0].body
        refused = ask_all(running.url, [Ask("x", 1)])
        assert refused[0].status == 401

        (drainer,) = [pid for pid in children(run_pid) if "kvcatch.store.drain" in title(pid)]
        deadline_poll(lambda: requests_in(capture_file), 60, "something drained")
        os.kill(drainer, signal.SIGKILL)
        answers = ask_all(running.url, [Ask(PROMPT * 3, 24, "after the drainer", headers=bearer)])
        assert answers[0].status == 200

        family = children(run_pid)
        (api_server,) = [pid for pid in family if "api_server" in title(pid)]
        os.kill(api_server, signal.SIGKILL)
        assert running.process.wait(90) == 128 + signal.SIGKILL
        deadline_poll(lambda: not any(alive(pid) for pid in family), 30, "end of all processes")
        said = running.text

    (ring,) = rings.glob("*.core0.kvring")
    capture = kvcatch.open(str(ring))
    views = {view.request_id: view for view in capture.requests()}
    capture.close()
    tenants = {name: views[name].tags["tenant"] for name in ("by-key", "by-field", "by-xargs", "by-header")}
    assert tenants == {
        "by-key": "billing",
        "by-field": "billing",
        "by-xargs": "billing",
        "by-header": "shop",
    }
    (by_id,) = [view for name, view in views.items() if name.endswith("~by-id")]
    # What the operator's middleware knows wins over what the client wrote into its request id.
    assert by_id.tags["tenant"] == "billing"
    users = {view.tags.get("user") for view in views.values()} - {None}
    assert len(users) == 1
    assert users.pop().startswith("u:")
    assert "after the drainer" in views
    drained = requests_in(capture_file)
    assert drained
    assert drained <= set(views)

    words = [PROMPT, PROMPT[:12], USER, KEY]
    secrets = {word: word.encode() for word in words}
    for code in "BHIQ":
        secrets[f"token ids as {code}"] = array(code, TOKENS).tobytes()
    secrets["token ids in text"] = b"101, 37, 88"
    secrets["token ids in JSON"] = b"101,37,88"
    parsed = run_kvcatch("parse", str(capture_file))
    assert parsed.returncode == 0
    places = {path.name: path.read_bytes() for path in rings.iterdir()}
    places |= {"log": said.encode(), "capture": capture_file.read_bytes(), "parsed": parsed.stdout.encode()}
    for name, secret in secrets.items():
        for place, data in places.items():
            assert secret not in data, f"{name} in {place}"

"""The gateway as middleware of a real engine's own server: one process, no proxy in front."""

from __future__ import annotations

import concurrent.futures
import http.client
import re
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvcatch
from engine.support import env
from engine.support.gateway import Got, leave, post
from engine.support.processes import deadline_poll
from engine.support.server import Server, server

# 240 usable blocks of 32 tokens: 7,680 tokens, and a context of 8,192.
BLOCKS, BLOCK, CONTEXT = 241, 32, 8192
POOL = (BLOCKS - 1) * BLOCK
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POLICY = """
[length]
max_input_tokens = 600
over_long = "middle_out"
[length.routes."/v1/completions"]
over_long = "reject"
[tenants.limited]
requests_per_minute = 2
"""


@dataclass(frozen=True)
class Site:
    """The engine with the middleware, and its recorder directory."""

    engine: Server
    rings: Path

    def post(self, route: str, headers: dict[str, str] | None = None, **body: Any) -> Got:
        document = {"model": "tiny", "max_tokens": 6, "temperature": 0, **body}
        return post(self.engine.url + route, document, headers)

    def busy(self) -> tuple[int, int]:
        """(requests running, blocks referenced) by the engine's own record."""
        (ring,) = self.rings.glob("*.core0.kvring")
        capture = kvcatch.open(str(ring))
        snapshot = capture.snapshot()
        capture.close()
        return snapshot.queues.running or 0, snapshot.pool.active_blocks or 0

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [env.PYTHON, "-m", "kvcatch", *words], capture_output=True, text=True, timeout=60, check=False,
            env=env.environment(KVCATCH_DIR=str(self.rings)),
        )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("inside")
    rings = folder / "rings"
    (folder / "policy.toml").write_text(POLICY)
    arguments = (
        "--num-gpu-blocks-override", str(BLOCKS), "--block-size", str(BLOCK), "--max-model-len", str(CONTEXT),
        "--middleware", "kvcatch.gateway.inside.GatewayMiddleware",
    )  # fmt: skip
    with server(
        folder, tiny_model, *arguments, KVCATCH="1", KVCATCH_DIR=str(rings), KVCATCH_TEST_NOCHECK="1",
        KVCATCH_GATEWAY_CONFIG=str(folder / "policy.toml"),
    ) as engine:  # fmt: skip
        yield Site(engine, rings)


def test_it_starts_with_the_pool_and_tokenizer_of_its_engine(site: Site) -> None:
    said = f"governing requests of 127.0.0.1:{site.engine.port}: {BLOCKS - 1} blocks of {BLOCK}, prompts counted locally"
    deadline_poll(lambda: said in site.engine.text, 30, "the middleware's first line")
    (path,) = site.rings.glob("gateway-*.sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_answer_is_byte_for_byte_the_engines(site: Site) -> None:
    # /invocations reaches the same handlers past the middleware. A slow reader may get two tokens in one event,
    # so that equal pieces are waited for.
    def once(stream: bool) -> list[bytes]:
        found = []
        for route in ("/invocations", COMPLETIONS):
            answer = site.post(route, {"X-Request-Id": "same"}, prompt="hello there", stream=stream)
            assert answer.status == 200
            found.append(re.sub(rb'"created":\d+', b"", answer.body))
        return found

    for stream in (False, True):
        pairs = (once(stream) for _ in range(10))
        assert any(direct == through for direct, through in pairs)


def test_what_is_too_long_is_refused_or_cut_as_the_policy_says(site: Site) -> None:
    asked = site.post(COMPLETIONS, prompt="x" * 500)
    tokens = asked.json["usage"]["prompt_tokens"]
    assert asked.status == 200
    # One more character is one more token of this model: by the engine's own count, 600 pass and 601 do not.
    longest = "x" * (500 + 600 - tokens)
    assert site.post(COMPLETIONS, prompt=longest).json["usage"]["prompt_tokens"] == 600
    refused = site.post(COMPLETIONS, prompt=longest + "x")
    assert (refused.status, refused.reason) == (413, "over-long")
    assert refused.json["error"]["details"] == {"prompt_tokens": 601, "limit_tokens": 600}
    cut = site.post(CHAT, messages=[{"role": "user", "content": "word " * 400}])
    assert cut.status == 200
    whole = site.post("/tokenize", messages=[{"role": "user", "content": "word " * 400}]).json["count"]
    left = cut.json["usage"]["prompt_tokens"]
    assert left <= 600 < whole
    assert int(cut.headers["x-kvcatch-truncated"]) == whole - left
    never = site.post(COMPLETIONS, prompt="x" * 500, max_tokens=POOL - 400)
    assert (never.status, never.reason) == (413, "never-fits")
    assert never.json["error"]["details"]["usable_blocks"] == BLOCKS - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_blocks(site: Site, stream: bool) -> None:
    leave(
        site.engine.url,
        {"prompt": "hello", "max_tokens": 7000, "ignore_eos": True, "stream": stream},
        lambda: site.busy()[0] == 1,
    )
    deadline_poll(lambda: site.busy() == (0, 0), 30, "the engine free again")


@pytest.mark.parametrize("stream", [False, True])
def test_abort_frees_the_blocks(site: Site, stream: bool) -> None:
    headers = {"X-Request-Id": "the-hog", "x-tenant": "team"}

    def ask() -> Got | None:
        try:
            return site.post(
                COMPLETIONS, headers, prompt="hello", max_tokens=7000, ignore_eos=True, stream=stream
            )
        except (http.client.HTTPException, OSError):
            return None  # a stream that has begun ends without its end

    with concurrent.futures.ThreadPoolExecutor() as pool:
        future = pool.submit(ask)
        deadline_poll(lambda: site.busy()[1] >= 3, 30, "the request to grow")
        done = site.cli("abort", "the-hog")
        assert (done.returncode, done.stdout) == (0, "aborted the-hog (relaying, tenant team)\n"), done.stderr
        answer = future.result()
    if stream:
        assert answer is None
    else:
        assert answer is not None
        assert (answer.status, answer.reason) == (409, "aborted")
    deadline_poll(lambda: site.busy() == (0, 0), 30, "the engine free again")


def test_hold_and_limits_give_429(site: Site) -> None:
    assert site.cli("hold", "team", "--for", "5m").returncode == 0
    held = site.post(COMPLETIONS, {"x-tenant": "team"}, prompt="hello")
    assert (held.status, held.reason) == (429, "tenant-hold")
    assert site.post(COMPLETIONS, {"x-tenant": "other"}, prompt="hello").status == 200
    assert site.cli("hold", "team", "--for", "0").returncode == 0
    assert site.post(COMPLETIONS, {"x-tenant": "team"}, prompt="hello").status == 200
    answers = [site.post(COMPLETIONS, {"x-tenant": "limited"}, prompt="hello") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[2].reason == "limit-requests"
    page = site.engine.get("/kvcatch/metrics")
    assert 'kvcatch_gateway_decisions_total{outcome="refused",reason="tenant-hold"} 1.0' in page

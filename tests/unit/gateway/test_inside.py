"""The middleware inside an engine's server, with a small ASGI application in the engine's place: faults."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.gateway import operate
from kvcatch.gateway.asgi import Inside
from kvcatch.gateway.engine import Engine, Reading
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.inside import GatewayMiddleware

from .stub import until

Message = dict[str, Any]
EVENTS = [
    b'data: {"choices":[{"text":"a',
    b'"}]}\n',
    b"\n",
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7}}\n\ndata: [DO',
    b"NE]\n\n",
]


class App:
    """One token is one character; 100 blocks of 16 tokens. ``work`` answers the governed routes."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[bytes, bytes], Any]] = []
        self.work: Callable[[Any, Any], Awaitable[None]] = self.plain
        self.left = 0  # handlers that saw their client leave
        self.models = 200
        self.state = SimpleNamespace(args=SimpleNamespace(host=None, port=4711, api_server_count=1))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = (await receive())["body"]
        document = json.loads(body) if body else None
        if scope["path"] == "/v1/models":
            await answer(send, {"data": [{"id": "stub", "max_model_len": 4096}]}, self.models)
            return
        if scope["path"] == "/tokenize":
            await answer(send, {"count": len(document["prompt"])})
            return
        self.seen.append((dict(scope["headers"]), document))
        await self.work(receive, send)

    async def plain(self, receive: Any, send: Any) -> None:
        await answer(send, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})

    async def streams(self, receive: Any, send: Any) -> None:
        await begin(send)
        for event in EVENTS:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def hangs(self, receive: Any, send: Any) -> None:
        """One event, then nothing until the client leaves, as the engine's own handlers notice it."""
        await begin(send)
        await send({"type": "http.response.body", "body": EVENTS[0], "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        self.left += 1

    async def silent(self, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        self.left += 1
        await answer(send, None)  # what a handler says then reaches nobody


async def begin(send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    )


async def answer(send: Any, document: Any, status: int = 200) -> None:
    body = json.dumps(document).encode()
    named = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body})


class Call:
    """One request into the middleware, its messages given by hand."""

    def __init__(self, site: Site, body: Any = None, path: str = "/v1/completions", **headers: str) -> None:
        document = {"model": "stub", "prompt": "hello", "max_tokens": 4, **(body or {})}
        self.raw = json.dumps(document).encode()
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        named = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": named, "app": site.app}
        self._site = site
        self.task: asyncio.Task[None] | None = None

    def start(self, *chunks: bytes, whole: bool = True) -> Call:
        parts = chunks or (self.raw,)
        for index, part in enumerate(parts):
            more = index < len(parts) - 1 or not whole
            self.inbox.put_nowait({"type": "http.request", "body": part, "more_body": more})
        self.task = asyncio.create_task(self._site.middleware(self.scope, self.inbox.get, self._send))
        return self

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def done(self) -> Call:
        assert self.task is not None
        await asyncio.wait_for(self.task, 10)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def whole(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False) and len(self.sent) > 1


class Site:
    def __init__(self, app: App, middleware: GatewayMiddleware) -> None:
        self.app, self.middleware = app, middleware

    @property
    def gate(self) -> Gate:
        served = self.middleware._served
        assert isinstance(served, Inside)
        assert served.gate is not None
        return served.gate

    def empty(self) -> bool:
        (engine,) = self.gate.engines
        assert engine.ledger is not None
        return not self.gate.flights and not engine.ledger.entries and engine.in_flight == 0


def look(self: Engine) -> Reading:
    info = EngineInfo(num_blocks=101, block_size=16, max_model_len=4096)
    return Reading(info, 1, 0, 0, 0, 0, "metrics")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCATCH_DIR", str(tmp_path / "r"))
    monkeypatch.delenv("KVCATCH_GATEWAY_CONFIG", raising=False)
    monkeypatch.setattr(Engine, "look", look)


@asynccontextmanager
async def inside(tmp_path: Path, policy: str = "", app: App | None = None) -> AsyncIterator[Site]:
    app = app or App()
    environ = {"KVCATCH_DIR": os.environ["KVCATCH_DIR"]}
    if policy:
        (tmp_path / "policy.toml").write_text(policy)
        environ["KVCATCH_GATEWAY_CONFIG"] = str(tmp_path / "policy.toml")
    middleware = GatewayMiddleware(app, environ)
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    life = asyncio.create_task(middleware({"type": "lifespan", "app": app}, inbox.get, send))
    inbox.put_nowait({"type": "lifespan.startup"})
    await until(lambda: bool(sent), "the server to start")
    try:
        yield Site(app, middleware)
    finally:
        inbox.put_nowait({"type": "lifespan.shutdown"})
        await asyncio.wait_for(life, 10)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_an_answer_passes_and_is_settled_from_its_usage(tmp_path: Path) -> None:
    # 5 prompt tokens + 4 reserved = 9; settled with 5 + 2 = 7. Of 16 a minute, 9 more fit once, not twice.
    async def scenario() -> None:
        async with inside(tmp_path, "[limits]\ntokens_per_minute = 16\n") as site:
            for status in (200, 200, 429):
                call = await Call(site, x_tenant="t").start().done()
                assert call.status == status
                await site.gate.settled()
            assert (call.headers["x-kvcatch-reason"], len(site.app.seen)) == ("limit-tokens", 2)
            assert site.empty()

    run(scenario)


def test_a_stream_passes_in_the_same_pieces_and_is_counted(tmp_path: Path) -> None:
    # 5 + 40 = 45 are reserved, 5 + 7 = 12 charged: a second 45 fits below 60 (57), a third does not (24 + 45 = 69).
    async def scenario() -> None:
        async with inside(tmp_path, "[limits]\ntokens_per_minute = 60\n") as site:
            site.app.work = site.app.streams
            body = {"stream": True, "max_tokens": 40}
            call = await Call(site, body, x_request_id="mine").start().done()
            assert [message["body"] for message in call.sent[1:]] == [*EVENTS, b""]
            assert call.whole
            assert call.headers["x-request-id"] == "mine"
            await site.gate.settled()
            assert (await Call(site, body).start().done()).status == 200
            await site.gate.settled()
            assert (await Call(site, body).start().done()).headers["x-kvcatch-reason"] == "limit-tokens"
            assert site.empty()

    run(scenario)


def test_the_engine_gets_the_tagged_request_with_its_own_length_and_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inside(tmp_path) as site:
            call = Call(
                site, x_tenant="team", x_request_id="r-1", content_length="1", authorization="Bearer k"
            )
            await call.start(call.raw[:7], call.raw[7:]).done()
            assert call.status == 200
            ((headers, document),) = site.app.seen
            assert document["vllm_xargs"] == {"kvcatch_tenant": "team"}
            assert headers[b"x-request-id"] == b"r-1"
            assert headers[b"authorization"] == b"Bearer k"  # the server checks it itself
            assert int(headers[b"content-length"]) == len(json.dumps(document, separators=(",", ":")))

    run(scenario)


@pytest.mark.parametrize(
    ("body", "headers", "status", "reason"),
    [
        (b"{", {}, 400, "malformed"),
        (b"[]", {}, 400, "malformed"),
        (b'{"model": "\xff"}', {}, 400, "malformed"),
        (b'{"model":"stub","prompt":"' + b"x" * 2000 + b'"}', {}, 413, "body-size"),
        (b"{}", {"content_length": "99999"}, 413, "body-size"),
        (b"{}", {"content_encoding": "gzip"}, 415, "encoding"),
        (b'{"model":"other","prompt":"x"}', {}, 404, "model"),
        (b'{"model":"stub","prompt":"' + b"x" * 41 + b'"}', {}, 413, "over-long"),
        # 20 + 1,582 - 1 = 1,601 tokens need 101 blocks of 16; there are 100.
        (b'{"model":"stub","max_tokens":1582,"prompt":"' + b"x" * 20 + b'"}', {}, 413, "never-fits"),
    ],
)
def test_what_is_refused_never_reaches_the_engine(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, reason: str
) -> None:
    policy = "[gateway]\nmax_body_bytes = 1024\n[length]\nmax_input_tokens = 40\n"

    async def scenario() -> None:
        async with inside(tmp_path, policy) as site:
            call = await Call(site, **headers).start(body[:9], body[9:]).done()
            assert (call.status, call.headers["x-kvcatch-reason"]) == (status, reason)
            assert json.loads(call.body)["error"]["message"]
            assert not site.app.seen
            assert site.empty()

    run(scenario)


def test_a_client_that_leaves_mid_stream_gives_everything_back_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inside(tmp_path, "[limits]\nconcurrency = 1\n") as site:
            site.app.work = site.app.hangs
            call = Call(site, {"stream": True}).start()
            await until(lambda: len(call.sent) == 2, "the first event")
            refused = await Call(site).start().done()
            assert (refused.status, refused.headers["x-kvcatch-reason"]) == (429, "limit-concurrency")
            call.leave()
            await call.done()
            await site.gate.settled()
            assert site.app.left == 1
            assert site.empty()
            site.app.work = site.app.plain
            assert (await Call(site).start().done()).status == 200

    run(scenario)


def test_a_client_that_leaves_before_its_body_is_whole_reaches_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inside(tmp_path) as site:
            call = Call(site).start(b'{"model"', whole=False)
            call.leave()
            await call.done()
            assert not call.sent
            assert not site.app.seen
            assert site.empty()

    run(scenario)


def test_a_client_that_leaves_while_it_waits_leaves_the_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inside(tmp_path, "[long]\ntokens = 3\nshare = 1.0\nconcurrency = 1\n") as site:
            site.app.work = site.app.silent
            first = Call(site).start()
            await until(lambda: len(site.app.seen) == 1, "the first at the engine")
            second = Call(site).start()
            await until(lambda: site.gate.door.waiting == 1, "the second in the line")
            second.leave()
            await second.done()
            assert site.gate.door.waiting == 0
            first.leave()
            await first.done()
            assert (site.app.left, len(site.app.seen)) == (1, 1)
            assert site.empty()

    run(scenario)


def test_what_the_engines_handler_raises_is_the_servers_to_answer(tmp_path: Path) -> None:
    async def breaks(receive: Any, send: Any) -> None:
        await begin(send)
        raise RuntimeError("theirs")

    async def scenario() -> None:
        async with inside(tmp_path) as site:
            site.app.work = breaks
            call = Call(site).start()
            with pytest.raises(RuntimeError, match="theirs"):
                await call.done()
            assert len(call.sent) == 1
            assert site.empty()

    run(scenario)


def test_a_fault_of_ours_is_a_500_without_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def judge(*_: Any) -> Any:
        raise RuntimeError("secret words")

    async def scenario() -> None:
        async with inside(tmp_path) as site:
            assert (await Call(site).start().done()).status == 200
            monkeypatch.setattr(Gate, "judge", judge)
            call = await Call(site).start().done()
            assert (call.status, call.headers["x-kvcatch-reason"]) == (500, "internal")
            assert b"secret" not in call.body
            assert site.empty()

    run(scenario)


@pytest.mark.parametrize("streamed", [False, True])
def test_abort_ends_it_at_the_engine_and_hold_refuses_the_next(tmp_path: Path, streamed: bool) -> None:
    async def scenario() -> None:
        async with inside(tmp_path) as site:
            site.app.work = site.app.hangs if streamed else site.app.silent
            call = Call(site, {"stream": streamed}, x_tenant="team", x_request_id="the-hog").start()
            await until(
                lambda: len(call.sent) == 2 if streamed else bool(site.app.seen), "the request to run"
            )
            (path,) = Path(os.environ["KVCATCH_DIR"]).glob("gateway-*.sock")
            assert path.name == f"gateway-4711-{os.getpid()}.sock"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            ended = await asyncio.to_thread(operate.abort, "the-hog")
            assert [row["request_id"] for row in ended] == ["the-hog"]
            await call.done()
            assert site.app.left == 1
            if streamed:
                assert not call.whole  # the server closes what is not whole
            else:
                assert (call.status, call.headers["x-kvcatch-reason"]) == (409, "aborted")
            assert site.empty()
            site.app.work = site.app.plain
            await asyncio.to_thread(operate.hold, "team", 60)
            held = await Call(site, x_tenant="team").start().done()
            assert (held.status, held.headers["x-kvcatch-reason"]) == (429, "tenant-hold")
            assert (await Call(site, x_tenant="other").start().done()).status == 200
        assert not list(Path(os.environ["KVCATCH_DIR"]).glob("gateway-*.sock"))

    run(scenario)


def test_the_sockets_of_killed_processes_are_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        folder = Path(os.environ["KVCATCH_DIR"])
        folder.mkdir()
        (folder / "gateway-4711-999.sock").touch()
        async with inside(tmp_path) as site:
            await Call(site).start().done()
            assert [path.name for path in folder.glob("*.sock")] == [f"gateway-4711-{os.getpid()}.sock"]

    run(scenario)


@pytest.mark.parametrize("fault", ["policy", "models", "socket"])
def test_a_start_that_fails_leaves_the_engine_serving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    app = App()
    policy = "[length]\nmax_input_tokens = 1\n"
    if fault == "policy":
        policy = "[length]\nmax_input_tokens = -1\n"
    elif fault == "models":
        app.models = 401
    else:
        monkeypatch.setattr("kvcatch.gateway.admin.MAX_PATH", 1)

    async def scenario() -> None:
        async with inside(tmp_path, policy, app) as site:
            call = await Call(site).start().done()
            assert call.status == 200
            assert len(app.seen) == 1
            assert "x-kvcatch-reason" not in call.headers

    run(scenario)
    said = capsys.readouterr().err
    assert "WARNING kvcatch: requests are not governed" in said
    if fault == "policy":
        assert "line 2" in said


@pytest.mark.parametrize(
    ("root", "path"),
    [("/api", "/api/v1/completions"), ("/api", "/v1/completions"), ("/v", "/v1/completions")],
)
def test_a_root_path_is_no_way_around(tmp_path: Path, root: str, path: str) -> None:
    # Starlette's router takes the root off only where a slash follows it, and routes what has no root as it is.
    async def scenario() -> None:
        async with inside(tmp_path, "[length]\nmax_input_tokens = 1\n") as site:
            call = Call(site, path=path)
            call.scope["root_path"] = root
            assert (await call.start().done()).headers["x-kvcatch-reason"] == "over-long"

    run(scenario)


def test_other_routes_pass_untouched_and_its_metrics_are_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with inside(tmp_path) as site:
            await Call(site).start().done()
            call = await Call(site, path="/v1/score").start().done()
            assert call.status == 200
            assert site.app.seen[-1][1] == json.loads(call.raw)
            page = Call(site, path="/kvcatch/metrics")
            page.scope["method"] = "GET"
            await page.start(b"").done()
            assert b'kvcatch_gateway_decisions_total{outcome="relayed",reason="ok"} 1.0' in page.body

    run(scenario)


def test_several_server_processes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        app = App()
        app.state.args.api_server_count = 2
        async with inside(tmp_path, app=app) as site:
            await Call(site).start().done()

    run(scenario)
    assert "2 API server processes: limits, admission and classes count in each" in capsys.readouterr().err


def test_without_a_gateway_the_hint_names_the_middleware() -> None:
    with pytest.raises(KVCatchError, match=r"--middleware kvcatch\.gateway\.inside\.GatewayMiddleware"):
        operate.abort("x")

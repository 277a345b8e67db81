"""A real OpenAI server of vLLM in its own session: start, wait, ask, stop."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from engine.support import env
from engine.support.processes import children, deadline_poll, end_session, session_members, title
from services import free_port

START_SECONDS = 900.0


@contextmanager
def engine_lock() -> Iterator[None]:
    """Wait until no other engine of a test runs on this machine."""
    with open(env.LOCK, "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass
class Server:
    """One running server."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    folder: Path
    model: str = "tiny"
    arguments: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def pids(self, word: str) -> list[int]:
        """Processes of the server whose title contains ``word``, e.g. EngineCore or Worker."""
        return [pid for pid in children(self.process.pid) if word in title(pid)]

    def get(self, path: str, seconds: float = 30.0) -> str:
        with urllib.request.urlopen(self.url + path, timeout=seconds) as answer:
            return str(answer.read().decode())

    def healthy(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.text[-6000:]}")
        try:
            self.get("/health", 5)
        except (urllib.error.URLError, OSError):
            return False
        return True

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        """One JSON request. Raises urllib.error.HTTPError on a refusal."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result: dict[str, Any] = json.loads(answer.read())
            return result

    def complete(self, prompt: str | list[int], tokens: int, **more: Any) -> dict[str, Any]:
        """One completion that runs to ``tokens``."""
        headers = more.pop("headers", None)
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return self.post("/v1/completions", {**body, "ignore_eos": True, **more}, headers)

    def stop(self) -> None:
        """End all processes of the server, politely first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """Kill the whole session; nothing is left when this returns."""
        end_session(self.process.pid)
        self.process.wait(20)


@contextmanager
def server(
    folder: Path,
    model: Path,
    *arguments: str,
    command: Sequence[str] = (),
    lock: bool = True,
    wait: bool = True,
    port: int | None = None,
    **environment: str | None,
) -> Iterator[Server]:
    """A server of ``model`` under the served name ``tiny``; ``command`` goes before the python command line."""
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    line = [*command, env.PYTHON, "-m", "vllm.entrypoints.openai.api_server"]
    line += ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    line += ["--enforce-eager", "--disable-uvicorn-access-log", *arguments]
    lock_file = open(env.LOCK, "a") if lock else None  # noqa: SIM115 (held while the server runs)
    if lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
    try:
        with open(log, "wb") as output:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env.environment(**environment),
                cwd=folder,
                start_new_session=True,
            )
        running = Server(port, process, log, folder, arguments=list(arguments))
        try:
            if wait:
                deadline_poll(running.healthy, START_SECONDS, f"health of the server (log: {log})", 0.2)
            yield running
        finally:
            running.stop()
            left = session_members(process.pid)
            assert not left, [title(pid) for pid in left]
    finally:
        if lock_file:
            lock_file.close()


@dataclass(frozen=True)
class Ask:
    """One request to send: when (seconds after the start), as whom, and what."""

    prompt: str | list[int]
    tokens: int
    request_id: str | None = None
    at: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came back, by the client's own clock."""

    ask: Ask
    status: int
    body: dict[str, Any]
    start: float
    end: float

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.body["usage"]
        return usage

    @property
    def cached_tokens(self) -> int:
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


def ask_all(url: str, asks: Sequence[Ask], concurrency: int = 64, model: str = "tiny") -> list[Answer]:
    """Send all requests, at most ``concurrency`` at once, and return the answers in the order of ``asks``.

    A connection that breaks (killed server) gives status 0.
    """

    async def one(session: aiohttp.ClientSession, gate: asyncio.Semaphore, origin: float, ask: Ask) -> Answer:
        delay = origin + ask.at - time.monotonic()
        if delay > 0:
            await asyncio.sleep(delay)
        async with gate:
            return await _send(session, url, ask, model)

    async def everything() -> list[Answer]:
        gate = asyncio.Semaphore(concurrency)
        async with _session() as session:
            origin = time.monotonic()
            return list(await asyncio.gather(*(one(session, gate, origin, ask) for ask in asks)))

    return asyncio.run(everything())


def steady_load(
    url: str,
    asks: Iterator[Ask],
    clients: int,
    events: Sequence[tuple[int, Ask]],
    after: int,
    model: str = "tiny",
) -> tuple[list[Answer], list[Answer]]:
    """``clients`` send one request after the other; a request of ``events`` comes when so many were answered.

    Ends ``after`` answers after the last event was answered. Returns the steady answers as they came and those of
    the events. What happens when depends on counts alone, so that a slow machine sees the same as a fast one.
    """
    steady: list[Answer] = []
    late: list[Answer] = []
    stop_at: list[int] = []

    async def disturb(session: aiohttp.ClientSession, ask: Ask) -> None:
        late.append(await _send(session, url, ask, model))
        if len(late) == len(events):
            stop_at.append(len(steady) + after)

    async def everything() -> None:
        pending = sorted(events, key=lambda event: event[0])
        tasks: list[asyncio.Task[None]] = []
        async with _session() as session:

            async def client() -> None:
                while not stop_at or len(steady) < stop_at[0]:
                    steady.append(await _send(session, url, next(asks), model))
                    while pending and len(steady) >= pending[0][0]:
                        tasks.append(asyncio.create_task(disturb(session, pending.pop(0)[1])))

            await asyncio.gather(*(client() for _ in range(clients)))
            await asyncio.gather(*tasks)

    asyncio.run(everything())
    return steady, late


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=connector)


async def _send(session: aiohttp.ClientSession, url: str, ask: Ask, model: str) -> Answer:
    headers = dict(ask.headers)
    if ask.request_id is not None:
        headers["X-Request-Id"] = ask.request_id
    body = {"model": model, "prompt": ask.prompt, "max_tokens": ask.tokens, "temperature": 0}
    body |= {"ignore_eos": True, **ask.more}
    start = time.monotonic()
    try:
        async with session.post(url + "/v1/completions", json=body, headers=headers) as answer:
            text = await answer.text()
            status = answer.status
    except (aiohttp.ClientError, OSError):
        return Answer(ask, 0, {}, start, time.monotonic())
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        parsed = {"text": text}
    return Answer(ask, status, parsed, start, time.monotonic())


def alive(pid: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

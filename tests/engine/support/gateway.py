"""A gateway process of a test: start as a user would, wait, stop."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.support import env
from engine.support.processes import deadline_poll
from services import free_port


@dataclass(frozen=True)
class Got:
    """One answer: headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def reason(self) -> str | None:
        return self.headers.get("x-kvcatch-reason")


def post(
    url: str, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None, seconds: float = 120
) -> Got:
    """One POST; refusals are answers too."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            status, found, text = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, found, text = error.code, error.headers, error.read()
    return Got(status, {name.lower(): value for name, value in found.items()}, text)


def leave(url: str, body: dict[str, Any], arrived: Callable[[], bool]) -> None:
    """Ask for a completion and reset the connection once it has ``arrived`` (a stream: and its first bytes were read)."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps({"model": "tiny", **body}), {"Content-Type": "application/json"}
    )
    sock = connection.sock
    deadline_poll(arrived, 30, "the request at the engine", 0.02)
    if body.get("stream"):
        connection.getresponse().read(20)
    # What was not read yet would otherwise be waited for.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.shutdown(socket.SHUT_RDWR)
    connection.close()


@dataclass
class Gateway:
    """One running gateway."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    directory: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def post(self, route: str, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None) -> Got:
        return post(self.url + route, body, headers)

    def healthy(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the gateway ended with {self.process.returncode}:\n{self.text[-4000:]}")
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def admin(self, method: str, route: str, document: Any = None) -> dict[str, Any]:
        """One call on the admin socket."""
        from kvcatch.gateway.admin import call, socket_path

        return call(socket_path(str(self.directory), self.port), method, route, document)

    def state(self) -> dict[str, Any]:
        return self.admin("GET", "/state")

    def counted(self, route: str, body: dict[str, Any]) -> int:
        """Prompt tokens as the gateway counts them."""
        answer = self.admin("POST", "/explain", {"route": route, "body": body})
        tokens: int = answer["prompt_tokens"]
        return tokens


@contextmanager
def gateway(folder: Path, directory: Path, *arguments: str, **environment: str | None) -> Iterator[Gateway]:
    """``kvcatch gateway`` with these arguments; ``directory`` is the recorder directory."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = folder / f"gateway-{port}.log"
    line = [env.PYTHON, "-m", "kvcatch", "gateway", "--listen", f"127.0.0.1:{port}", *arguments]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            env=env.environment(KVCATCH_DIR=str(directory), **environment),
        )  # fmt: skip
    running = Gateway(port, process, log, directory)
    try:
        deadline_poll(running.healthy, 60, f"health of the gateway (log: {log})")
        yield running
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)

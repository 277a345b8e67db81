"""One HTTP GET with a deadline that holds: slow headers, slow bodies and endless bodies all end in time."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

from kvcatch.errors import KVCatchError

MAX_BYTES = 64 * 1024**2
MAX_REDIRECTS = 3
_CHUNK = 1 << 18


class _DeadlineReader(io.RawIOBase):
    """Reads a socket; every single read gets only the time that is left."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)


class _DeadlineSocket:
    """As much of a socket as http.client needs."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, mode: str, bufsize: int | None = None) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self._sock, self._deadline), 1 << 16)

    def sendall(self, data: bytes) -> None:
        self._sock.sendall(data)

    def close(self) -> None:
        """Nothing: http.client closes its side before the body is read; ``get`` closes the socket."""


class Response:
    """An answer whose body is still to be read."""

    def __init__(self, url: str, status: int, raw: http.client.HTTPResponse) -> None:
        self.url = url
        self.status = status
        self.content_type = raw.getheader("Content-Type") or ""
        self._raw = raw
        length = raw.getheader("Content-Length") or ""
        self._length = int(length) if length.isdigit() else None

    def chunks(self, limit: int = MAX_BYTES) -> Iterator[bytes]:
        """The body in pieces. Raises KVCatchError when it is too long, stops early or takes too long."""
        total = 0
        try:
            while chunk := self._raw.read1(_CHUNK):
                total += len(chunk)
                if total > limit:
                    raise KVCatchError(f"{self.url}: longer than {limit:,} bytes; not read further.")
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise KVCatchError(f"{self.url}: {_reason(error)} after {total:,} bytes of the answer.") from None
        if self._length is not None and total < self._length:
            raise KVCatchError(f"{self.url}: the answer stopped after {total:,} of {self._length:,} bytes.")

    def body(self, limit: int = MAX_BYTES) -> bytes:
        """The whole body."""
        return b"".join(self.chunks(limit))


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS certificate refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or error})"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    if isinstance(error, http.client.HTTPException):
        return f"not a usable HTTP answer ({type(error).__name__})"
    return str(error) or type(error).__name__


def _connect(url: str, deadline: float) -> tuple[http.client.HTTPConnection, socket.socket, str]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise KVCatchError(f"{url}: not an http:// or https:// address.")
    left = max(0.001, deadline - time.monotonic())
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise KVCatchError(f"{url}: the port is not a number from 1 to 65535.") from None
    sock = socket.create_connection((parts.hostname, port), timeout=left)
    try:
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
    except BaseException:
        sock.close()
        raise
    connection = http.client.HTTPConnection(parts.hostname, port)
    connection.sock = _DeadlineSocket(sock, deadline)
    connection.auto_open = 0
    return connection, sock, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


@contextmanager
def get(url: str, timeout_seconds: float = 5.0, accept: str = "text/plain") -> Iterator[Response]:
    """GET ``url``, following at most three redirects, all within ``timeout_seconds``.

    Raises KVCatchError for anything but a 2xx answer; the message names what went wrong.
    """
    deadline = time.monotonic() + timeout_seconds
    start = url
    for _ in range(MAX_REDIRECTS + 1):
        sock: socket.socket | None = None
        try:
            try:
                connection, sock, path = _connect(url, deadline)
                connection.request("GET", path, headers={"Accept": accept, "Connection": "close"})
                raw = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise KVCatchError(f"{url}: {_reason(error)}.", "Is the engine running there?") from None
            target = raw.getheader("Location")
            if raw.status in (301, 302, 303, 307, 308) and target:
                url = urljoin(url, target)
                continue
            if not 200 <= raw.status < 300:
                raise KVCatchError(f"{url}: HTTP {raw.status} {raw.reason}.", "Is the path /metrics?")
            yield Response(url, raw.status, raw)
            return
        finally:
            if sock is not None:
                sock.close()
    raise KVCatchError(f"{start}: more than {MAX_REDIRECTS} redirects.")

"""A web server that misbehaves on request. Every wait is on an event, never on a clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FaultServer(ThreadingHTTPServer):
    """``page`` is what /metrics answers; the other paths each have one fault."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.page = b"vllm:num_requests_running 1\n"
        self.released = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what several tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FaultServer

    def do_GET(self) -> None:
        handler = getattr(self, "do_" + self.path.strip("/").partition("?")[0].replace("/", "_"), None)
        if handler is None:
            self.send_error(404)
            return
        handler()

    def _answer(
        self, body: bytes, *headers: tuple[str, str], status: int = 200, length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_metrics(self) -> None:
        self._answer(self.server.page)

    def do_html(self) -> None:
        self._answer(b"<html><body>login</body></html>", ("Content-Type", "text/html"))

    def do_moved(self) -> None:
        self._answer(b"", ("Location", "/metrics"), status=302)

    def do_loop(self) -> None:
        self._answer(b"", ("Location", "/loop"), status=302)

    def do_elsewhere(self) -> None:
        self._answer(b"", ("Location", "file:///etc/passwd"), status=302)

    def do_error(self) -> None:
        self._answer(b"no", status=500)

    def do_short(self) -> None:
        self._answer(self.server.page, length=len(self.server.page) + 1000)

    def do_silent(self) -> None:
        self.server.released.wait(30)

    def do_stalls(self) -> None:
        self._answer(self.server.page, length=len(self.server.page) + 1000)
        self.wfile.flush()
        self.server.released.wait(30)

    def do_drips(self) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            while not self.server.released.wait(0.02):
                self.wfile.write(b"#")
        except OSError:
            pass

    def do_endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        block = b"http_requests_total 1\n" * 5000
        try:
            while not self.server.released.is_set():
                self.wfile.write(block)
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fault_server() -> Iterator[FaultServer]:
    """A running server; everything it still holds back is released at the end."""
    server = FaultServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()

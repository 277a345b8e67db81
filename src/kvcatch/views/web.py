"""The HTTP side of ``kvcatch serve``: metrics, headroom, health and a landing page. No writes, no state."""

from __future__ import annotations

import html
import json
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from kvcatch import __version__
from kvcatch.analysis.headroom import SOON_SECONDS
from kvcatch.errors import KVCatchError
from kvcatch.units import human_count, human_ratio
from kvcatch.views import headroom_api
from kvcatch.views.prometheus import registry
from kvcatch.views.targets import Fleet, Observation

#: a client that sends its request slower than this is dropped
CLIENT_SECONDS = 10.0
_MAX_TOKENS = 1 << 40

Answer = tuple[int, str, bytes]


class MetricsServer(ThreadingHTTPServer):
    """One exporter. Answers come from what the readers last saw, so no client waits for an engine."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], fleet: Fleet) -> None:
        self.fleet = fleet
        self.registry: CollectorRegistry = registry(fleet.observations)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self.server_address[0], self.server_address[1]
        text = host.decode() if isinstance(host, bytes) else str(host)
        return f"http://{f'[{text}]' if ':' in text else text}:{port}"


def listen(text: str) -> tuple[str, int]:
    """``HOST:PORT``, ``:PORT`` or ``PORT``; the host defaults to loopback. Raises KVCatchError."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise KVCatchError(f"--listen {text}: not HOST:PORT.", "Write for example 127.0.0.1:9400 or :9400.")
    return host.strip("[]") or "127.0.0.1", int(port)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version = f"kvcatch/{__version__}"
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        route = _ROUTES.get(parts.path)
        if route is None:
            self._send((404, "text/plain; charset=utf-8", b"not found; see /\n"))
            return
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self._send(route(self.server, query, self.headers.get("Accept") or ""))

    def _send(self, answer: Answer) -> None:
        status, content_type, body = answer
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: one line per scrape helps nobody."""


def _json(status: int, value: Any) -> Answer:
    return status, "application/json", json.dumps(value, indent=1).encode() + b"\n"


def _metrics(server: MetricsServer, query: dict[str, str], accept: str) -> Answer:
    encode, content_type = choose_encoder(accept)
    return 200, content_type, encode(server.registry)


def _headroom(server: MetricsServer, query: dict[str, str], accept: str) -> Answer:
    try:
        size = _size(query)
        within = _within(query.get("within_ms"))
    except KVCatchError as error:
        return _json(400, {"error": str(error)})
    target = query.get("target")
    return _json(200, headroom_api.document(server.fleet.fresh_observations(), size, target, within))


def _within(text: str | None) -> float:
    if text is None:
        return SOON_SECONDS
    if not text.isascii() or not text.isdigit() or int(text[:20]) > 60_000:
        raise KVCatchError(f"within_ms={text[:40]}: not a number of milliseconds up to 60000.")
    return int(text) / 1000


def _size(query: dict[str, str]) -> tuple[int, int] | None:
    numbers = []
    for name in ("prompt_tokens", "output_tokens"):
        text = query.get(name)
        if text is None:
            continue
        if not text.isascii() or not text.isdigit() or not 0 < int(text[:20]) < _MAX_TOKENS:
            raise KVCatchError(f"{name}={text[:40]}: not a positive number of tokens.")
        numbers.append(int(text))
    if len(numbers) == 1:
        raise KVCatchError("prompt_tokens and output_tokens belong together.", "Give both or none.")
    return (numbers[0], numbers[1]) if numbers else None


def _schema(server: MetricsServer, query: dict[str, str], accept: str) -> Answer:
    return _json(200, headroom_api.SCHEMA)


def _health(server: MetricsServer, query: dict[str, str], accept: str) -> Answer:
    seen = server.fleet.observations()
    ok = server.fleet.healthy
    answer = {
        "status": "ok" if ok else "failing",
        "engines": len(seen),
        "engines_up": sum(row.up for row in seen),
    }
    return _json(200 if ok else 503, answer)


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>kvcatch</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem;max-width:70rem}}
table{{border-collapse:collapse}}td,th{{padding:.2rem .8rem;text-align:left;border-bottom:1px solid #ccc}}
td.n{{text-align:right}}@media(prefers-color-scheme:dark){{body{{background:#111;color:#ddd}}a{{color:#8cf}}}}</style>
<h1>kvcatch {version}</h1>
<p><a href="/metrics">/metrics</a> for Prometheus, <a href="/v1/headroom">/v1/headroom</a> for routers
(<a href="/v1/headroom/schema">schema</a>), <a href="/healthz">/healthz</a>.</p>
<table><tr><th>target<th>engine<th>model<th>state<th>source<th>blocks in use<th>usable<th>running<th>waiting
<th>more requests fit<th>note</tr>
{rows}</table></html>
"""


def _landing(server: MetricsServer, query: dict[str, str], accept: str) -> Answer:
    rows = "\n".join(_row(seen) for seen in server.fleet.observations())
    return 200, "text/html; charset=utf-8", _PAGE.format(version=__version__, rows=rows).encode()


def _row(seen: Observation) -> str:
    snapshot = seen.snapshot
    pool, queues = snapshot.pool, snapshot.queues
    used = pool.utilization_ratio
    if pool.num_blocks and pool.active_blocks is not None:
        used = pool.active_blocks / pool.num_blocks
    waiting = queues.waiting
    if waiting is None and queues.waiting_for_blocks is not None:
        waiting = queues.waiting_for_blocks + (queues.waiting_other or 0)
    note = seen.error or (snapshot.findings[0].title if snapshot.findings else "")
    words = [seen.target, seen.engine, snapshot.model or "n/a", snapshot.state, snapshot.source]
    numbers = [
        human_ratio(used), human_count(pool.num_blocks), human_count(queues.running), human_count(waiting),
        human_count(seen.headroom.requests),
    ]  # fmt: skip
    cells = "".join(f"<td>{html.escape(word)}" for word in words)
    cells += "".join(f'<td class="n">{number}' for number in numbers)
    return f"<tr>{cells}<td>{html.escape(note)}</tr>"


_ROUTES: dict[str, Callable[[MetricsServer, dict[str, str], str], Answer]] = {
    "/": _landing,
    "/metrics": _metrics,
    "/v1/headroom": _headroom,
    "/v1/headroom/schema": _schema,
    "/healthz": _health,
}

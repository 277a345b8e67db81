"""A real Prometheus beside a real ``kvcatch serve``: start, wait, ask, stop."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.support import env
from engine.support.processes import deadline_poll
from kvcatch.views.mixin import write
from services import free_port


@contextmanager
def serving(folder: Path, *targets: str, **environment: str | None) -> Iterator[str]:
    """``kvcatch serve`` on a port of its own; gives its address."""
    log = folder / "serve.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [
                env.PYTHON,
                "-m",
                "kvcatch",
                "serve",
                *targets,
                "--listen",
                "127.0.0.1:0",
                "--interval",
                "0.25s",
            ],
            stderr=output,
            env=env.environment(**environment),
        )
    try:
        line = deadline_poll(lambda: next(iter(log.read_text().splitlines()), ""), 30, "kvcatch serve")
        yield str(line).split(" on ")[1].split("/metrics")[0]
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def api(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=60
        ) as answer:
            document = json.loads(answer.read())
        assert document["status"] == "success"
        return document["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector of an expression, now."""
        rows: list[dict[str, Any]] = self.api("query", query=expr)["result"]
        return rows

    def value(self, expr: str) -> float:
        """The one value of an expression."""
        data = self.api("query", query=expr)
        if data["resultType"] == "scalar":
            return float(data["result"][1])
        (row,) = data["result"]
        return float(row["value"][1])

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, engine: str, exporter: str) -> Iterator[Prometheus]:
    """Debian's Prometheus with the mixin's rules, reading both every second."""
    port = free_port()
    mixin = folder / "mixin"
    write(str(mixin), "https://example.org/runbook")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in sorted(mixin.glob("rules/*.yml"))],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": [engine.removeprefix("http://")]}]},
            {"job_name": "kvcatch", "static_configs": [{"targets": [exporter.removeprefix("http://")]}]},
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))
    log = folder / "prometheus.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    running = Prometheus(f"http://127.0.0.1:{port}")
    try:
        deadline_poll(running.ready, 60, f"prometheus (log: {log})", 0.1)
        yield running
    finally:
        process.terminate()
        process.wait(60)

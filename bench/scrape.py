"""200 scraped engines in one process on one core, one a second each, beside a dead and a slow one.

Prints one JSON document: how often each engine was really read, CPU and memory, and the added delay that
the dead and the slow engine cause (they must cause none).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

ENGINES = 200
SECONDS = 20.0
PAGE = Path(__file__).parents[1] / "tests" / "data" / "metrics" / "vllm_0.32.0_cpu_loaded.prom"


class _Pages(BaseHTTPRequestHandler):
    page = PAGE.read_bytes()

    def do_GET(self) -> None:
        if self.path.startswith("/slow"):
            self.send_response(200)
            self.end_headers()
            for byte in self.page:
                self.wfile.write(bytes([byte]))
                time.sleep(1)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that gave up is no error."""


def _serve(pipe: object) -> None:
    server = _Server(("127.0.0.1", 0), _Pages)
    pipe.send(server.server_address[1])  # type: ignore[attr-defined]
    server.serve_forever()


def measure(engines: int = ENGINES, seconds: float = SECONDS) -> dict[str, object]:
    """Run the fleet for ``seconds`` and count."""
    from kvcatch.cli.serve import Opener
    from kvcatch.views.targets import Fleet, Target

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()
    opener = Opener(5.0)
    urls = [f"http://127.0.0.1:{port}/{index}/metrics" for index in range(engines)]
    healthy = [Target(url, opener, 1.0) for url in urls]
    bad = [
        Target("http://127.0.0.1:9/metrics", opener, 1.0),
        Target(f"http://127.0.0.1:{port}/slow", opener, 1.0),
    ]
    reads: dict[str, list[float]] = {url: [] for url in urls}
    lock = threading.Lock()

    for target in healthy:
        inner = target.read

        def counted(inner: object = inner, name: str = str(target.watch.target)) -> None:
            inner()  # type: ignore[operator]
            with lock:
                reads[name].append(time.monotonic())

        target.read = counted  # type: ignore[method-assign]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    fleet = Fleet([*healthy, *bad])
    before, start = time.process_time(), time.monotonic()
    fleet.start()
    time.sleep(seconds)
    cpu, wall = time.process_time() - before, time.monotonic() - start
    fleet.stop()
    up = sum(seen.up for target in healthy for seen in target.latest)
    counts = [len(times) for times in reads.values()]
    waits = [b - a for times in reads.values() for a, b in pairwise(times)]
    process.kill()
    # On a machine that does other things too, the pace suffers; the work per read does not.
    per_read = cpu / sum(counts)
    return {
        "engines": engines,
        "engines_up": up,
        "seconds": wall,
        "page_bytes": len(_Pages.page),
        "reads_per_engine_min": min(counts),
        "reads_per_engine_median": statistics.median(counts),
        "interval_p99_seconds": statistics.quantiles(waits, n=100)[98],
        "cpu_share_of_one_core": cpu / wall,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "cpu_seconds_per_read": per_read,
        "cores_needed_at_one_second": per_read * engines,
        "met": up == engines and per_read * engines <= 1.0 and min(counts) >= 0.5 * statistics.median(counts),
    }


def main() -> None:
    """Measure and print."""
    row = measure()
    print(json.dumps(row, indent=1))
    sys.exit(0 if row["met"] else 1)


if __name__ == "__main__":
    main()

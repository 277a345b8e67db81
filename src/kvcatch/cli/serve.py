"""``kvcatch serve``: Prometheus exporter, headroom API and landing page for many engines at once."""

from __future__ import annotations

import argparse
import ipaddress
import signal
import sys
import threading
from types import FrameType

from kvcatch.errors import KVCatchError
from kvcatch.store.base import Capture
from kvcatch.units import parse_duration

DEFAULT_LISTEN = "127.0.0.1:9847"
#: pages kept per scraped engine: rates and maxima need a minute, not an hour
_KEEP_PAGES = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``serve``."""
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET",
        help="recorders ('live', a pid, a name of 'kvcatch ls', a file) and /metrics URLs, any number of each. "
        "'live', the default, is the newest run on this machine with all its engine cores, also after a restart",
    )  # fmt: skip
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT",
        help=f"where to answer (default {DEFAULT_LISTEN}: this machine only; port 0 picks a free one)",
    )  # fmt: skip
    parser.add_argument("--interval", default="1s", metavar="TIME", help="between two reads of a target (1s)")
    parser.add_argument(
        "--scrape-timeout", default="5s", metavar="TIME", help="give up on one read of a URL after this (5s)"
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="also send everything to this OTLP/HTTP collector, e.g. http://collector:4318",
    )
    parser.add_argument("--otlp-interval", default="15s", metavar="TIME", help="between two sends (15s)")


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises KVCatchError when the address cannot be had."""
    from kvcatch.views.targets import Fleet, Target
    from kvcatch.views.web import MetricsServer, listen

    interval = parse_duration(args.interval)
    timeout = parse_duration(args.scrape_timeout)
    if interval < 0.1 or timeout < 0.1:
        raise KVCatchError("--interval and --scrape-timeout must be at least 0.1s.")
    address = listen(args.listen)
    opener = Opener(timeout)
    targets = expand(list(dict.fromkeys(args.targets)) or ["live"])
    fleet = Fleet([Target(name, opener, interval, follow=name.startswith("live")) for name in targets])
    try:
        server = MetricsServer(address, fleet)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise KVCatchError(
            f"--listen {args.listen}: {reason}.", "Choose another port with --listen."
        ) from None
    _warn_when_public(address[0])
    export = None
    if args.otlp:
        from kvcatch.views.otel import OtelExport, otlp_reader

        reader = otlp_reader(args.otlp, parse_duration(args.otlp_interval))
        export = OtelExport(fleet.observations, reader)
    fleet.start()
    count = f"{len(targets)} target{'s' if len(targets) != 1 else ''}"
    print(
        f"Serving {count} on {server.url}/metrics and {server.url}/v1/headroom", file=sys.stderr, flush=True
    )
    _serve(server)
    fleet.stop()
    if export is not None:
        export.close()
    return 0


def expand(targets: list[str]) -> list[str]:
    """``live`` as one target per engine core of the newest run: data parallel engines have several."""
    from kvcatch import api

    if "live" not in targets:
        return targets
    found = api.recorders()
    cores = [info.name for info in found if _run(info.name) == _run(found[0].name)] if found else []
    lives = [f"live#{number}" for number in sorted(_core(name) for name in cores)] or ["live#0"]
    at = targets.index("live")
    return [*targets[:at], *lives, *targets[at + 1 :]]


def _run(name: str) -> str:
    return name.rpartition(".core")[0]


def _core(name: str) -> int:
    text = name.rpartition(".core")[2]
    return int(text) if text.isdigit() else 0


class Opener:
    """Opens a target; URLs are not read yet, so that an engine that is down today may come up tomorrow."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds

    def __call__(self, target: str | None) -> Capture:
        if target is not None and target.startswith(("http://", "https://")):
            from kvcatch.sources.scrape import live

            return live(target, keep=_KEEP_PAGES, timeout_seconds=self._timeout)
        from kvcatch import api

        if target is not None and target.startswith("live#"):
            target = _newest(int(target.removeprefix("live#")))
        opened: Capture = api.open(target)
        return opened


def _newest(core: int) -> str:
    """The recorder of one engine core of the newest run."""
    from kvcatch import api

    found = api.recorders()
    if not found:
        raise KVCatchError(
            f"no recorder in {api.recorder_directory()} yet.",
            "Start an engine with: kvcatch run -- vllm serve MODEL",
        )
    name = f"{_run(found[0].name)}.core{core}"
    if name not in [info.name for info in found]:
        raise KVCatchError(f"no recorder {name} yet.")
    return name


def _warn_when_public(host: str) -> None:
    try:
        public = not ipaddress.ip_address(host).is_loopback
    except ValueError:
        public = host != "localhost"
    if public:
        print(
            f"kvcatch: {host} is reachable from other machines, and there is no password: tenant names and "
            "request counts are visible to whoever can connect.",
            file=sys.stderr,
        )


def _serve(server: object) -> None:
    """Answer until SIGINT or SIGTERM."""
    from kvcatch.views.web import MetricsServer

    assert isinstance(server, MetricsServer)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, stop)
    thread = threading.Thread(target=server.serve_forever, name="kvcatch http", daemon=True)
    thread.start()
    stopped.wait()
    server.shutdown()
    server.server_close()

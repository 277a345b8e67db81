"""A running gateway: engines found, sockets opened, policy reloaded when its file changes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from kvcatch import api
from kvcatch.capture import tags
from kvcatch.errors import KVCatchError
from kvcatch.gateway.admin import Admin, socket_path
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.fleet import fleet_of
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.mirror import Mirror
from kvcatch.gateway.policy import from_document
from kvcatch.gateway.proxy import Proxy
from kvcatch.gateway.reload import Documents, Reloader
from kvcatch.gateway.shared import limits_of
from kvcatch.quality.verdict import Limits as QualityLimits
from kvcatch.sources.procs import local_engines
from kvcatch.views.web import listen

logger = logging.getLogger("kvcatch.gateway")

#: of the requests that a candidate gets when nothing is said
MIRROR_SHARE = 0.01


def serve(
    documents: Documents,
    *,
    feeds: Sequence[str] = (),
    config: str | None = None,
    default_listen: str,
    upstream_key: str | None = None,
    verbose: int = 0,
) -> int:
    """Serve until SIGINT or SIGTERM. ``documents`` reads the policy anew. Raises KVCatchError."""
    _log(verbose)
    service = Service(documents(), documents, feeds, config, default_listen, upstream_key)
    return asyncio.run(service.run())


class Service:
    """One gateway process."""

    def __init__(
        self, document: dict[str, Any], documents: Documents, feeds: Sequence[str], config: str | None,
        default_listen: str, upstream_key: str | None,
    ) -> None:  # fmt: skip
        gateway = document.get("gateway", {})
        self._host, self._port = listen(gateway.get("listen", default_listen))
        self._directory = api.recorder_directory()
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        tags.load_key(self._directory)
        policy = from_document(document)
        urls = gateway.get("upstreams") or find_upstreams()
        feed = list(feeds) + [None] * (len(urls) - len(feeds))
        if len(feeds) > len(urls):
            raise KVCatchError(
                f"{len(feeds)} --feed for {len(urls)} --upstream.", "Give at most one for each."
            )
        engines = [Engine(url, name, policy.reserve_ratio) for url, name in zip(urls, feed, strict=True)]
        self.gate = Gate(policy, engines, limits_of(document), fleet_of(document))
        self.proxy = Proxy(
            self.gate, upstream_key=upstream_key, timeout=float(gateway.get("upstream_timeout", 600)),
            tokenizer=gateway.get("tokenizer"),
        )  # fmt: skip
        self.mirror = mirror_of(document, self.gate, upstream_key)
        self.reloader = Reloader(self.gate, document, documents, config)

    async def run(self) -> int:
        """Serve; returns the exit status."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, stopped.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self.reloader.reload(force=True))
        await self.proxy.start()
        runner = web.AppRunner(
            self.proxy.application(), access_log=None, handler_cancellation=True, auto_decompress=False,
            keepalive_timeout=75, shutdown_timeout=5, logger=_silent(), max_field_size=16384,
        )  # fmt: skip
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port, backlog=1024)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            await self.proxy.stop()
            reason = error.strerror or str(error)
            raise KVCatchError(
                f"--listen {self._host}:{self._port}: {reason}.", "Choose another address with --listen."
            ) from None
        if self.mirror is not None:
            try:
                self.mirror.start()  # only now: a port that is taken leaves no folder behind
            except KVCatchError:
                await runner.cleanup()
                await self.proxy.stop()
                raise
            self.proxy.copy = self.mirror.offer
        host, port = runner.addresses[0][:2]
        admin = Admin(self.gate, socket_path(self._directory, port))
        await admin.start()
        self._say(f"http://{host}:{port}")
        watch = asyncio.create_task(self.reloader.watch())
        await stopped.wait()
        watch.cancel()
        await runner.cleanup()
        await admin.stop()
        if self.mirror is not None:
            self.mirror.close()
        await self.proxy.stop()
        return 0

    def _say(self, url: str) -> None:
        rules = self.gate.policy.rules
        up = [engine for engine in self.gate.engines if engine.healthy]
        print(f"Governing {len(self.gate.engines)} engine(s) ({len(up)} up) on {url}/v1", file=sys.stderr)
        for engine in self.gate.engines:
            reading = engine.reading
            pool = (
                f"{engine.info.usable_blocks} blocks of {engine.info.block_size}"
                if reading
                else "pool unknown"
            )
            counter = self.gate.counters.get(engine.url)
            how = "locally" if counter is not None and counter.local is not None else "by the engine"
            state = "up" if engine.healthy else "down"
            source = f", state from its {reading.source}" if reading else ""
            print(f"  {engine.label}: {state}, {pool}{source}, prompts counted {how}", file=sys.stderr)
        length = self.gate.policy.length
        words = [f"mode {rules.mode}"]
        if length.max_input:
            words.append(f"prompts up to {length.max_input} tokens ({length.over_long})")
        if length.max_output:
            words.append(f"output up to {length.max_output}")
        if rules.long_enforced:
            most = f", {rules.long_concurrency} at once" if rules.long_concurrency else ""
            words.append(f"long requests {rules.long_share:.0%} of the pool{most}")
        else:
            words.append("long requests watched only")
        print("  " + "; ".join(words), file=sys.stderr, flush=True)
        if self.mirror is not None:
            where = urlsplit(self.mirror.url).netloc
            print(
                f"  mirror: {self.mirror.share:g} of the requests also to {where}, numbers in {self.mirror.folder}",
                file=sys.stderr, flush=True,
            )  # fmt: skip


def mirror_of(document: dict[str, Any], gate: Gate, key: str | None) -> Mirror | None:
    """The mirror of a checked document, None when it names no candidate. Raises KVCatchError."""
    table = document.get("mirror", {})
    if not table:
        return None
    if "url" not in table:
        raise KVCatchError("[mirror] names no url.", "Give the candidate with --mirror URL.")
    given = {name: table[f"max_{name}"] for name in ("kl", "flips") if f"max_{name}" in table}
    meters = gate.meters
    return Mirror(
        table["url"],
        float(table.get("share", MIRROR_SHARE)),
        table.get("dir", "kvcatch-mirror"),
        idle=gate.idle,
        count=meters.mirrored,
        key=key,
        limits=QualityLimits(**given, source="given" if given else "assumed"),
    )


def find_upstreams() -> list[str]:
    """The engine of this machine. Raises KVCatchError when there is none, or more than one."""
    found = [engine for engine in local_engines() if engine.port is not None]
    ports = sorted({engine.port for engine in found if engine.port is not None})
    if not ports:
        raise KVCatchError(
            "no engine listens on this machine.", "Say where it is: --upstream http://HOST:PORT"
        )
    if len(ports) > 1:
        urls = ", ".join(f"http://127.0.0.1:{port}" for port in ports)
        raise KVCatchError(
            f"several engines listen here: {urls}.", "Choose with --upstream (may be repeated)."
        )
    return [f"http://127.0.0.1:{ports[0]}"]


def _log(verbose: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s [gateway] %(message)s", "%m-%d %H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose > 1 else logging.INFO if verbose else logging.WARNING)
    logger.propagate = False


def _silent() -> logging.Logger:
    """aiohttp's own log quotes what clients send; nothing of it is kept."""
    quiet = logging.getLogger("kvcatch.gateway.http")
    quiet.propagate = False
    quiet.setLevel(logging.CRITICAL + 1)
    return quiet

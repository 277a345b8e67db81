"""The public functions over captures: open one, record one, ask an engine how full it is."""

from __future__ import annotations

import builtins
import contextlib
import glob
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from kvcatch.errors import KVCatchError
from kvcatch.results import Headroom, Result, Snapshot
from kvcatch.store.base import Capture
from kvcatch.store.capture import ReplayCapture
from kvcatch.store.ring import RingReader, is_locked

#: bounds of a reader that follows a live engine
LIVE_ROWS = 250_000
LIVE_FINISHED = 20_000


class RecorderInfo(Result, frozen=True):
    """One recorder on this machine. state: live | idle | stale | ended."""

    name: str
    path: str
    state: str
    model: str | None = None
    pid: int | None = None
    dp_rank: int | None = None
    start_unix_seconds: float | None = None
    last_unix_seconds: float | None = None
    last_step: int | None = None


class Collected(Result, frozen=True):
    """The pool in five numbers; used = blocks that requests hold (active), cached blocks can be evicted."""

    kv_total_blocks: int | None
    kv_used_blocks: int | None
    kv_free_blocks: int | None
    kv_cached_blocks: int | None
    kv_utilization: float | None


def recorder_directory() -> str:
    """Where recorders write: ``$KVCATCH_DIR`` or the user's state folder."""
    from kvcatch.store.paths import default_directory

    return default_directory(os.environ)


def recorders(directory: str | None = None) -> list[RecorderInfo]:
    """Every engine-core recorder, newest life first. Damaged files are left out."""
    found = []
    for path in glob.glob(os.path.join(glob.escape(directory or recorder_directory()), "*.core*.kvring")):
        try:
            ring = RingReader(path)
            info = ring.info()
        except KVCatchError:
            continue
        offset = ring.start_unix_ns - ring.start_mono_ns
        last = ring.last_mono_ns or ring.start_mono_ns
        found.append(
            RecorderInfo(
                name=os.path.basename(path).removesuffix(".kvring"),
                path=path,
                state=_state(path, ring),
                model=info.get("model"),
                pid=ring.pid,
                dp_rank=info.get("dp_rank"),
                start_unix_seconds=ring.start_unix_ns / 1e9,
                last_unix_seconds=(last + offset) / 1e9,
                last_step=ring.last_step,
            )
        )
        ring.close()
    found.sort(key=lambda info: -(info.start_unix_seconds or 0))
    return found


def _state(path: str, ring: RingReader) -> str:
    if not is_locked(path):
        return "ended"
    return "live" if (time.monotonic_ns() - ring.last_mono_ns) < 2_000_000_000 else "idle"


class _WithHeadroom(ReplayCapture):
    """A recorded capture whose snapshots also say what still fits."""

    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        import msgspec

        snapshot = super().snapshot(window_seconds)
        return msgspec.structs.replace(snapshot, headroom=self.headroom(snapshot))

    def headroom(self, snapshot: Snapshot, size: tuple[int, int] | None = None) -> Headroom:
        """Requests of ``size`` (prompt, output tokens; default: the median of what was seen) that still fit."""
        from kvcatch.analysis import headroom as arithmetic

        size = size or arithmetic.typical_size(self.requests()[-1000:])
        if size is None:
            return Headroom()
        return arithmetic.snapshot_headroom(self.info, snapshot, size)


def open(target: str | None = None) -> Capture:
    """The capture of a target: a ``.kvcap`` or ``.kvring`` file, a recorder name, a pid, ``live``, a ``/metrics``
    URL, saved pages (a file or a folder of them), an engine's log, ``prometheus:URL[?matchers]``
    or ``kvevents:ADDRESS[?replay=ADDRESS]``. Without a target: the newest recorder on this machine, alive or dead.

    Raises KVCatchError with what to do when there is nothing to open.
    """
    if target is None or target == "live":
        return _newest(only_live=target == "live")
    if target.startswith(("http://", "https://")) or os.path.isdir(target) or _is_pattern(target):
        return _scrape(target)
    if target.startswith("prometheus:"):
        from kvcatch.sources.prometheus import open_prometheus

        return open_prometheus(target)
    if target.startswith("kvevents:"):
        from kvcatch.sources.eventlog import open_kvevents

        return open_kvevents(target)
    if os.path.isfile(target):
        return _file(target)
    if target.isdigit():
        return _pid(int(target))
    named = [info for info in recorders() if info.name == target]
    if named:
        return _recorded(named[0].path)
    raise KVCatchError(
        f"no such target: {target!r}.",
        'Give a .kvcap file, a recorder ("kvcatch ls" lists them), a pid or a /metrics URL.',
    )


def _is_pattern(target: str) -> bool:
    """True for ``'pages/*.prom'`` that a shell left alone."""
    return not os.path.exists(target) and "://" not in target and bool(glob.glob(target))


def _recorded(path: str) -> Capture:
    live = is_locked(path)
    bounds = {"keep_rows": LIVE_ROWS, "keep_finished": LIVE_FINISHED} if live else {}
    return _WithHeadroom.open(path, **bounds)


def _newest(*, only_live: bool) -> Capture:
    found = [info for info in recorders() if not only_live or info.state != "ended"]
    if not found:
        raise KVCatchError(
            f"no {'live ' if only_live else ''}recorder in {recorder_directory()}.",
            "Start an engine with: kvcatch run -- vllm serve MODEL",
        )
    return _recorded(found[0].path)


def _file(path: str) -> Capture:
    with contextlib.suppress(OSError), _binary(path) as file:
        magic = file.read(8)
        if magic[:5] == b"KVCAP" or magic == b"KVRING01":
            return _recorded(path)
        if path.endswith((".kvcap", ".kvring")):
            raise KVCatchError(f"{path} is not a kvcatch capture.", "Give a .kvcap or .kvring file.")
        from kvcatch.sources.logs import looks_like_log, open_log

        if looks_like_log((magic + file.read(1 << 16)).decode("utf-8", "replace")):
            return open_log(path)
    return _scrape(path)


def _binary(path: str) -> BinaryIO:
    return builtins.open(path, "rb")


def _scrape(target: str) -> Capture:
    from kvcatch.sources.scrape import open_scrape

    return open_scrape([target])


def _pid(pid: int) -> Capture:
    recorded = [info for info in recorders() if info.pid == pid]
    recorded.sort(key=lambda info: info.state == "ended")
    if recorded:
        return _recorded(recorded[0].path)
    from kvcatch.sources.procs import engine_of

    engine = engine_of(pid)
    if engine is None:
        raise KVCatchError(
            f"no recorder and no engine with pid {pid}.", '"kvcatch ls" lists the recorders of this machine.'
        )
    # A server and its engine core are different processes.
    family = [info for info in recorders() if info.pid and _is_descendant(info.pid, engine.pid)]
    if family:
        return _recorded(family[0].path)
    if engine.url is None:
        raise KVCatchError(
            f"process {pid} runs {engine.kind} without a recorder and without an open port.",
            "Restart it as: kvcatch run -- " + engine.command[:200],
        )
    return _scrape(engine.url)


def _is_descendant(pid: int, ancestor: int) -> bool:
    seen: set[int] = set()
    while pid > 1 and pid not in seen:
        if pid == ancestor:
            return True
        seen.add(pid)
        try:
            with _binary(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rsplit(b")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            return False
    return False


@contextlib.contextmanager
def record(path: str) -> Iterator[None]:
    """Record every engine started inside the ``with`` block into ``path`` (a ``.kvcap`` file).

    Raises KVCatchError when the file exists.
    """
    if os.path.exists(path):
        raise KVCatchError(f"{path} exists, will not overwrite it.", "Choose another name.")
    from kvcatch.capture.options import Options, new_run_id

    saved = {key: os.environ.get(key) for key in ("KVCATCH", "KVCATCH_RUN_ID")}
    os.environ.update(KVCATCH="1", KVCATCH_RUN_ID=new_run_id())
    options = Options(os.environ)
    os.makedirs(options.directory, mode=0o700, exist_ok=True)
    drain = start_drain(options.directory, options.run_id, ["-o", path])
    if "vllm" in sys.modules:
        # vLLM loads plugins once per process; that may have been before capture was asked for.
        from kvcatch.capture.plugin import register

        register()
    try:
        yield
    finally:
        for key, value in saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        drain.terminate()
        drain.communicate(timeout=60)


def start_drain(directory: str, run_id: str, arguments: list[str]) -> subprocess.Popen[str]:
    """The drainer of one run, as a process of its own session: a Ctrl-C for the engine is not for it."""
    environment = {k: v for k, v in os.environ.items() if k != "KVCATCH"}
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvcatch.store.drain",
        "--dir",
        directory,
        "--run",
        run_id,
        *arguments,
    ]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
        env=environment,
    )


def collect(engine: Any) -> Collected:
    """How full the KV cache of an engine is: an ``LLM``, an ``AsyncLLM``, a ``/metrics`` URL or any target.

    Reads the block pool itself when the engine core lives in this process, else its recorder, else scrapes.
    """
    if isinstance(engine, str):
        capture = open(engine)
        pool = capture.snapshot().pool
        capture.close()
        return _collected(pool.num_blocks, pool.active_blocks, pool.cached_blocks)
    core: Any = engine
    for name in ("llm_engine", "engine_core", "engine_core", "scheduler"):
        core = getattr(core, name, core)
    blocks: Any = getattr(getattr(core, "kv_cache_manager", None), "block_pool", None)
    if blocks is not None:
        usable = int(blocks.num_gpu_blocks) - 1
        recorder = getattr(core, "kvcatch_recorder", None)
        cached = recorder.cached if recorder is not None else None
        return _collected(usable, usable - int(blocks.get_num_free_blocks()), cached)
    run = os.environ.get("KVCATCH_RUN_ID", "")
    mine = [info for info in recorders() if run and info.name.startswith(run)]
    if not mine:
        raise KVCatchError(
            "the engine core runs in another process and has no recorder.",
            "Start it inside kvcatch.record(...), or pass its /metrics URL.",
        )
    return collect(mine[0].path)


def _collected(total: int | None, used: int | None, cached: int | None) -> Collected:
    known = total is not None and used is not None
    return Collected(
        kv_total_blocks=total,
        kv_used_blocks=used,
        kv_free_blocks=total - used if total is not None and used is not None else None,
        kv_cached_blocks=cached,
        kv_utilization=used / total if known and total and used is not None else None,
    )

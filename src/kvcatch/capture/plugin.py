"""The ``vllm.general_plugins`` entry point: off unless asked for, and unable to hurt the engine.

vLLM does not guard a plugin function: an exception in ``register`` would stop the engine from starting, and
it runs in every process (API server, engine core, workers). So everything here is caught, said once, and the
engine goes on; what cannot be hooked leaves scrape-only mode.
"""

from __future__ import annotations

import atexit
import functools
import glob
import logging
import os
import re
import sys
import threading
from typing import Any

from kvcatch.capture.options import Options

logger = logging.getLogger("kvcatch")

SUPPORTED = ((0, 12), (0, 33))
LIVES_KEPT = 3
_installed = False


def register() -> None:
    """Install the hooks in this process if ``KVCATCH`` is set. Never raises."""
    global _installed
    try:
        options = Options(os.environ)
        if not options.enabled or _installed:
            return
        _installed = True
        _speak()
        # Children (engine cores, workers) write under the same run id.
        os.environ["KVCATCH_RUN_ID"] = options.run_id
        if not check_version(engine_version()):
            return
        install()
    except Exception:
        logger.exception("kvcatch: capture could not be set up, the engine starts without it")


def _speak() -> None:
    """Let the ``kvcatch`` logger print even where nobody configured logging."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s [kvcatch] %(message)s", "%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def engine_version() -> str:
    """The installed vLLM version; ``unknown`` when it does not say."""
    try:
        from vllm.version import __version__
    except ImportError:
        return "unknown"
    return str(__version__)


def check_version(version: str) -> bool:
    """Whether hooks exist for this version; says so in one line when they do not."""
    match = re.match(r"(\d+)\.(\d+)", version)
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    if match is None:
        logger.warning(
            "kvcatch: unknown vLLM version %r (supported: %s-%s), trying the generic hooks",
            version,
            low,
            high,
        )
        return True
    number = (int(match.group(1)), int(match.group(2)))
    if number < (0, 11):
        logger.warning(
            'kvcatch: vLLM %s is not supported (supported: %s-%s): no capture; use "kvcatch top URL" to scrape',
            version, low, high,
        )  # fmt: skip
        return False
    if not SUPPORTED[0] <= number <= SUPPORTED[1]:
        logger.warning(
            "kvcatch: vLLM %s is outside the tested range %s-%s, trying its hooks", version, low, high
        )
    return True


def install() -> None:
    """Wrap the constructors: of the scheduler (one recorder per engine core) and of the worker (one per rank)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # Asked anew: one process may start several engines, recorded or not.
        start_recorder(self, Options(os.environ))

    Scheduler.__init__ = init
    from kvcatch.capture import worker

    worker.install()


def start_recorder(scheduler: Any, options: Any) -> Any:
    """Attach a recorder to a scheduler; returns it, or None with one log line when that is not possible."""
    if not options.enabled:
        return None
    try:
        return _start_recorder(scheduler, options)
    except OSError as error:
        logger.warning("kvcatch: no capture: %s (recorder directory %s)", error, options.directory)
    except Exception as error:
        from kvcatch.capture.contract import first_difference

        moved = first_difference(scheduler)
        reason = f"this vLLM has no {moved}" if moved else f"{type(error).__name__}: {error}"
        logger.warning("kvcatch: no capture: %s; the engine is not affected, scraping still works", reason)
        logger.debug("kvcatch: details", exc_info=True)
    return None


def _start_recorder(scheduler: Any, options: Any) -> Any:
    from kvcatch import __version__
    from kvcatch.capture.contract import first_difference
    from kvcatch.capture.info import engine_info
    from kvcatch.capture.recorder import Recorder, ring_path
    from kvcatch.capture.ring import RingWriter
    from kvcatch.capture.tags import load_key

    moved = first_difference(scheduler)
    if moved:
        raise AttributeError(moved)
    os.makedirs(options.directory, mode=0o700, exist_ok=True)
    load_key(options.directory)
    version = engine_version()
    info = engine_info(scheduler, "vllm", version, "vllm", __version__, os.environ)
    info["run_id"] = options.run_id
    info["sample_steps"] = options.sample_steps
    part = f"core{info['dp_rank']}"
    prune(options.directory, part)
    ring = RingWriter(
        unused_path(ring_path(options.directory, options.run_id, part)), options.ring_bytes, info
    )
    groups = [(group["kind"], group["block_size"]) for group in info["groups"]]
    behind = hasattr(scheduler, "get_grammar_bitmask") and _in_an_engine_core()
    recorder = Recorder(scheduler, ring, groups, options, behind=behind)
    recorder.attach()
    scheduler.kvcatch_recorder = recorder
    _owned(ring)
    logger.info("kvcatch: recording to %s", ring.path)
    return recorder


def _in_an_engine_core() -> bool:
    """Whether this scheduler is made for the busy loop of an engine core (``EngineCoreProc.run_engine_core``)."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "run_engine_core":
            return True
    return False


def unused_path(path: str) -> str:
    """The path, or the same with a number when one process makes several engines."""
    stem, number = path.removesuffix(".kvring"), 1
    while os.path.exists(path):
        number += 1
        path = f"{stem}-{number}.kvring"
    return path


def _owned(ring: Any) -> None:
    from kvcatch.store import ring as reader

    reader.OWNED.add(os.path.realpath(ring.path))
    atexit.register(ring.close)


_prune_lock = threading.Lock()


def prune(directory: str, part: str) -> None:
    """Delete all but the newest dead lives of this part (``core0``, ``rank...``). Live rings are never touched."""
    from kvcatch.store.ring import is_locked

    with _prune_lock:
        paths = glob.glob(os.path.join(glob.escape(directory), f"*.{part}*.kvring"))
        dead = sorted((path for path in paths if not is_locked(path)), key=_mtime, reverse=True)
        for path in dead[LIVES_KEPT - 1 :]:
            for name in (path, path + ".lock"):
                try:
                    os.unlink(name)
                except FileNotFoundError:
                    pass


def _mtime(path: str) -> float:
    try:
        return os.path.getmtime(path)
    except OSError:
        return 0.0

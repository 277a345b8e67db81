"""What the environment asks of the recorder. Set by ``kvcatch run`` or by hand."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from kvcatch.store.paths import default_directory

_FALSE = ("", "0", "false", "no", "off")


class Options:
    """Recorder settings.

    Environment: KVCATCH (on), KVCATCH_DIR, KVCATCH_RUN_ID, KVCATCH_RING_BYTES (default 64 MiB, about 75
    minutes at 50 steps/s), KVCATCH_SAMPLE_STEPS (a row every N steps, default 1), KVCATCH_SAMPLE_INTERVAL
    (or after that many seconds, whichever comes first), KVCATCH_MEMORY_INTERVAL (seconds between memory
    samples of a worker rank, default 1).
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.enabled = env.get("KVCATCH", "").lower() not in _FALSE
        self.directory = default_directory(env)
        self.run_id = env.get("KVCATCH_RUN_ID") or new_run_id()
        self.ring_bytes = int(env.get("KVCATCH_RING_BYTES") or 64 << 20)
        self.sample_steps = max(1, int(env.get("KVCATCH_SAMPLE_STEPS") or 1))
        self.sample_interval_ns = int(float(env.get("KVCATCH_SAMPLE_INTERVAL") or 1.0) * 1e9)
        self.memory_interval_ns = int(float(env.get("KVCATCH_MEMORY_INTERVAL") or 1.0) * 1e9)


def new_run_id() -> str:
    """A name for one life of one engine: UTC start time and four random hex digits."""
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(2)

"""Where things are, and the environment in which an engine of a test runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PYTHON = sys.executable
#: one engine at a time on a machine: two crawl on two cores
LOCK = Path(os.environ.get("KVCATCH_ENGINE_LOCK", "/tmp/kvcatch-engine.lock"))

CACHE = Path(os.environ.get("KVCATCH_DEV_CACHE", Path.home() / ".cache" / "kvcatch-dev"))

BASE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "KVCATCH_TEST_PATIENT": "1",
}


def environment(**extra: str | None) -> dict[str, str]:
    """The environment of a child: ours without any KVCATCH_ or VLLM_ setting, the base, then ``extra``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVCATCH", "VLLM_", "OMP_"))}
    kept.pop("PYTHONPATH", None)
    kept.update(BASE)
    for name, value in extra.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value
    # vLLM remembers what it found out about a model class (10 s of CPU) in one file for all releases: without
    # a folder per release each would throw away what the other found.
    path = (Path(part).name for part in kept.get("PYTHONPATH", "").split(os.pathsep))
    release = next((name for name in path if name.startswith("vllm-")), "engine")
    kept.setdefault("VLLM_CACHE_ROOT", str(CACHE / "vllm-cache" / release))
    return kept

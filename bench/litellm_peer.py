"""LiteLLM's proxy in an environment of its own, in front of one engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VERSION = "1.108.7"
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]


@dataclass(frozen=True)
class Proxy:
    """Where it listens, and its log."""

    url: str
    log: Path


@contextmanager
def litellm(folder: Path, engine: str, model: str, tokens_per_minute: int | None = None) -> Iterator[Proxy]:
    """The proxy with its defaults; tokens_per_minute: a limit of the deployment that it enforces before a call."""
    from engine.support.processes import deadline_poll
    from engine_env import own_environment
    from services import free_port

    python = own_environment(f"litellm-{VERSION}", [f"litellm[proxy]=={VERSION}"])

    folder.mkdir(parents=True, exist_ok=True)
    limit = f"\n      tpm: {tokens_per_minute}" if tokens_per_minute else ""
    checks = 'router_settings:\n  optional_pre_call_checks: ["enforce_model_rate_limits"]\n' if limit else ""
    (folder / "config.yaml").write_text(
        f"model_list:\n  - model_name: {model}\n    litellm_params:\n      model: text-completion-openai/{model}\n"
        f"      api_base: {engine}/v1\n      api_key: none{limit}\n{checks}"
        "litellm_settings:\n  num_retries: 0\n  telemetry: false\n"
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"  # loopback, no keys in this bench
    )
    port = free_port()
    log = folder / "litellm.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [python.parent / "litellm", "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), "LITELLM_LOG": "ERROR",
                 "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def healthy() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"LiteLLM ended:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    try:
        deadline_poll(healthy, 120, f"LiteLLM (log: {log})", 0.2)
        yield Proxy(f"http://127.0.0.1:{port}", log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

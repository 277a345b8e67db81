"""``make demo-vllm``: a real vLLM on the CPU with SmolLM2, three tenants, one of them with an over-long document.

    .venv-engine/bin/python tools/demo_vllm.py [--seconds 25]

Starts the engine as a user would (``kvcatch run -- …``), sends traffic, prints ``kvcatch top --once`` while the
long document holds the cache, and again from the record after the engine was killed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
KVCATCH = [sys.executable, "-m", "kvcatch"]
SUBJECTS = (
    "the tides",
    "a violin",
    "the history of paper",
    "a cold front",
    "bees",
    "rust",
    "a sonnet",
    "glaciers",
)


def main() -> int:
    """Engine, traffic, two pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0, help="how long traffic runs")
    seconds = parser.parse_args().seconds
    from smollm2 import smollm2

    model = smollm2()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="kvcatch-demo-vllm-")
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "KVCATCH_DIR": folder,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "KVCATCH_TEST_PATIENT": "1",  # on two cores the engine would starve kvcatch top (tests/engine_plugins)
    }  # fmt: skip
    command = [
        *KVCATCH, "run", "-o", f"{folder}/demo.kvcap", "--", sys.executable, "-m",
        "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "SmolLM2-135M-Instruct",
        "--port", str(port), "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "100",
        "--max-model-len", "2048", "--max-num-seqs", "16",
        "--middleware", "kvcatch.capture.middleware.TagMiddleware",
    ]  # fmt: skip
    # One engine at a time on small machines: tests take the same lock.
    with open(os.environ.get("KVCATCH_ENGINE_LOCK", "/tmp/kvcatch-engine.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("starting:", " ".join(["kvcatch", *command[3:]]), file=sys.stderr)
        with open(f"{folder}/engine.log", "w") as log:
            engine = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                return show(engine, f"http://127.0.0.1:{port}", folder, environment, seconds)
            finally:
                engine.send_signal(signal.SIGTERM)
                engine.wait(timeout=60)


def show(
    engine: subprocess.Popen[bytes], url: str, folder: str, environment: dict[str, str], seconds: float
) -> int:
    """Traffic and pictures. Returns the exit status."""
    if not healthy(engine, url):
        print(f"the engine did not start; its log is {folder}/engine.log", file=sys.stderr)
        return 1
    stop = threading.Event()
    chats = [
        threading.Thread(target=chat, args=(url, tenant, number, stop), daemon=True)
        for number, tenant in enumerate(["support"] * 4 + ["search"] * 4)
    ]
    for thread in chats:
        thread.start()
    if stop.wait(seconds / 2):
        return 1
    document = threading.Thread(
        target=ask, args=(url, "contracts", "Summarise: " + "the party of the first part " * 330, 200)
    )
    document.start()
    # Look while the document runs: it is the one request with that tenant.
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and "contracts" not in top(environment, "--json"):
        if not document.is_alive():
            break
        stop.wait(0.2)
    print(top(environment))
    document.join(60)
    stop.wait(seconds / 2)
    stop.set()
    print("\nthe engine is killed (SIGKILL); its record is still there:\n", flush=True)
    for name in os.listdir(folder):
        if name.endswith(".core0.kvring"):
            info = json.loads(
                subprocess.run(
                    [*KVCATCH, "ls", "--json"], env=environment, capture_output=True, check=True
                ).stdout
            )
            os.kill(info["recorders"][0]["pid"], signal.SIGKILL)
    engine.wait(timeout=90)
    print(top(environment, "--at", "peak"))
    print(f"Recorded: {folder}/demo.kvcap\nNext: kvcatch doctor {folder}/demo.kvcap")
    return 0


def healthy(engine: subprocess.Popen[bytes], url: str) -> bool:
    """Wait for /health, as long as the engine lives."""
    pause = threading.Event()
    while engine.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            pause.wait(0.5)
    return False


def chat(url: str, tenant: str, number: int, stop: threading.Event) -> None:
    """Short questions, one after the other."""
    rng = random.Random(number)
    while not stop.is_set():
        ask(url, tenant, f"Write three paragraphs about {rng.choice(SUBJECTS)}.", rng.randrange(60, 200))


def ask(url: str, tenant: str, text: str, tokens: int) -> None:
    """One chat request; a killed engine ends it."""
    body = {
        "model": "SmolLM2-135M-Instruct", "max_tokens": tokens, "user": f"{tenant}-user",
        "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": text}],
    }  # fmt: skip
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-tenant": tenant},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
    except (urllib.error.URLError, OSError):
        return


def top(environment: dict[str, str], *arguments: str) -> str:
    """``kvcatch top --once``."""
    command = [*KVCATCH, "top", "--once", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())

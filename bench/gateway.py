"""What the gateway costs beside a direct call, on one real engine. JSON on stdout.

    .venv-engine/bin/python bench/gateway.py [--pairs 10]

Added first-token latency of one streaming client (direct and through, alternating), throughput of 48 concurrent
requests (ABBA pairs), and the time of a refusal that no engine could serve (413).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench"), str(ROOT / "tools")]
CONCURRENT, PROMPT, OUTPUT, SINGLES = 48, 100, 64, 60


def first_token(url: str, prompt: str) -> float:
    """Seconds from the request to the first event of a streamed completion, over a connection of its own."""
    parts = urlsplit(url)
    body = json.dumps(
        {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True}
    )
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.connect()
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        took = time.perf_counter() - start
        answer.read()
    finally:
        connection.close()
    return took


def throughput(url: str, seed: int) -> float:
    """Seconds for 48 requests at once."""
    from engine.support.server import Ask, ask_all

    rng = random.Random(seed)
    asks = [Ask([rng.randrange(100) for _ in range(PROMPT)], OUTPUT) for _ in range(CONCURRENT)]
    start = time.perf_counter()
    answers = ask_all(url, asks, CONCURRENT)
    took = time.perf_counter() - start
    assert {answer.status for answer in answers} == {200}
    return took


def main() -> None:
    """Start one engine and one gateway with nothing but defaults, and measure."""
    from throughput import summary

    from engine.support.gateway import gateway, post
    from engine.support.server import server
    from tiny_models import tiny_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    count = parser.parse_args().pairs
    folder = Path(tempfile.mkdtemp())
    rings = folder / "rings"
    arguments = (
        "--num-gpu-blocks-override", "400", "--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "48",
    )  # fmt: skip
    with (
        server(folder, tiny_model("full"), *arguments, KVCATCH="1", KVCATCH_DIR=str(rings)) as engine,
        gateway(folder, rings, "--upstream", engine.url) as front,
    ):
        for url in (engine.url, front.url):  # cold starts on both ways
            throughput(url, 0)
            first_token(url, "warm up")
        added, direct = [], []
        for number in range(SINGLES):
            order = (engine.url, front.url) if number % 2 == 0 else (front.url, engine.url)
            took = {url: first_token(url, f"{number} hello there") for url in order}
            direct.append(took[engine.url])
            added.append(took[front.url] - took[engine.url])
        ratios = []
        for number in range(count):
            order = (engine.url, front.url) if number % 2 == 0 else (front.url, engine.url)
            seconds = {url: throughput(url, 1 + number) for url in order}
            ratios.append(seconds[engine.url] / seconds[front.url])
        refused = []
        for _ in range(30):
            start = time.perf_counter()
            got = post(
                front.url + "/v1/completions", {"model": "tiny", "prompt": "x" * 2000, "max_tokens": 4}
            )
            refused.append(time.perf_counter() - start)
            assert got.status == 413
    print(
        json.dumps(
            {
                "direct_ttft_ms": 1e3 * statistics.median(direct),
                "added_ttft_ms": {key: 1e3 * value for key, value in summary(added).items()},
                "throughput": summary(ratios),
                "pairs": count,
                "refused_ms": {"median": 1e3 * statistics.median(refused), "max": 1e3 * max(refused)},
            }
        )
    )


if __name__ == "__main__":
    main()

"""What the gateway costs beside a direct call and beside LiteLLM's proxy, on one real engine. JSON on stdout.

    .venv-engine/bin/python bench/gateway.py [--pairs 10] [--model tiny|smollm2] [--no-litellm]

Added first-token latency of one streaming client, throughput of 48 concurrent requests (the ways take turns, there
and back), a token limit that forty requests hit at once, how soon the engine is free after a client has left, and
the time of a refusal that no engine could serve (413).
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench"), str(ROOT / "tools")]
CONCURRENT, OUTPUT, SINGLES = 48, 64, 60
LIMIT = 1000  # tokens a minute
WORDS = "The pool lends its blocks to whoever runs and takes them back when the answer is done. "


def first_token(url: str, prompt: str) -> float:
    """Seconds from the connection to the first event of a streamed completion."""
    parts = urlsplit(url)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    start = time.perf_counter()
    with contextlib.closing(
        http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    ) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.readline()
        took = time.perf_counter() - start
        answer.read()
    return took


def throughput(url: str, run: int) -> float:
    """Seconds for 48 requests at once."""
    from engine.support.server import Ask, ask_all

    asks = [Ask(f"{run} {number} {WORDS}", OUTPUT) for number in range(CONCURRENT)]
    start = time.perf_counter()
    answers = ask_all(url, asks, CONCURRENT)
    took = time.perf_counter() - start
    assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers][:1]
    return took


def overshoot(url: str) -> dict[str, Any]:
    """Forty requests at once against a limit of ``LIMIT`` tokens a minute."""
    from engine.support.server import Ask, ask_all

    answers = ask_all(url, [Ask(f"{number} {WORDS}", OUTPUT) for number in range(40)], 40)
    served = [answer for answer in answers if answer.status == 200]
    used = sum(answer.usage["total_tokens"] for answer in served)
    return {"served": len(served), "tokens": used, "times_the_limit": used / LIMIT,
            "statuses": sorted({answer.status for answer in answers})}  # fmt: skip


def until_free(engine: Any, url: str, stream: bool) -> float:
    """Seconds from a client's leaving to an engine that runs nothing, by the engine's own page."""
    from engine.support.gateway import leave
    from engine.support.processes import deadline_poll

    def running() -> bool:
        page = engine.get("/metrics")
        line = next(line for line in page.splitlines() if line.startswith("vllm:num_requests_running"))
        return float(line.split()[-1]) > 0

    leave(url, {"prompt": WORDS, "max_tokens": 900, "ignore_eos": True, "stream": stream}, running)
    start = time.perf_counter()
    deadline_poll(lambda: not running(), 120, "an engine that is free", 0.02)
    return time.perf_counter() - start


@contextlib.contextmanager
def ways(folder: Path, engine: Any, peer: bool, limit: int | None = None) -> Iterator[dict[str, str]]:
    """The gateway, and LiteLLM, in front of the engine."""
    from litellm_peer import litellm

    from engine.support.gateway import gateway

    more = ("--tokens-per-minute", str(limit)) if limit else ()
    with contextlib.ExitStack() as stack:
        front = stack.enter_context(gateway(folder, folder / "rings", "--upstream", engine.url, *more))
        urls = {"kvcatch": front.url}
        if peer:
            name = f"litellm-{limit}"
            urls["litellm"] = stack.enter_context(litellm(folder / name, engine.url, "tiny", limit)).url
        yield urls


def measured(engine: Any, urls: dict[str, str], rounds: int) -> dict[str, Any]:
    """Latency and throughput of every way against the direct one."""
    from throughput import summary

    ways_ = {"direct": engine.url, **urls}
    for url in ways_.values():  # cold starts
        throughput(url, 0)
        first_token(url, "warm up")
    first: dict[str, list[float]] = {name: [] for name in ways_}
    for number in range(SINGLES):
        for name in sorted(ways_, reverse=bool(number % 2)):
            first[name].append(first_token(ways_[name], f"{number} hello there"))
    seconds: dict[str, list[float]] = {name: [] for name in ways_}
    for number in range(1, rounds + 1):
        for name in sorted(ways_, reverse=bool(number % 2)):
            seconds[name].append(throughput(ways_[name], number))
    found: dict[str, Any] = {"direct_ttft_ms": 1e3 * statistics.median(first["direct"]), "pairs": rounds}
    for name in urls:
        added = [1e3 * (b - a) for a, b in zip(first["direct"], first[name], strict=True)]
        ratios = [a / b for a, b in zip(seconds["direct"], seconds[name], strict=True)]
        found[name] = {"added_ttft_ms": summary(added), "throughput": summary(ratios)}
    return found


def refusals(url: str) -> dict[str, float]:
    """Milliseconds of the answer to what never fits."""
    from engine.support.gateway import post

    took = []
    for _ in range(30):
        start = time.perf_counter()
        got = post(url + "/v1/completions", {"model": "tiny", "prompt": "x" * 9000, "max_tokens": 4})
        took.append(1e3 * (time.perf_counter() - start))
        assert got.status == 413
    return {"median": statistics.median(took), "max": max(took)}


def main() -> None:
    """Start one engine, and what is measured with nothing but defaults."""
    from engine.support.server import server
    from smollm2 import smollm2
    from tiny_models import tiny_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--no-litellm", action="store_true")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    model = tiny_model("full") if args.model == "tiny" else smollm2()
    arguments = (
        "--num-gpu-blocks-override", "400", "--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "48",
    )  # fmt: skip
    peer = not args.no_litellm
    with server(folder, model, *arguments, KVCATCH="1", KVCATCH_DIR=str(folder / "rings")) as engine:
        with ways(folder, engine, peer) as urls:
            found = {"model": args.model, **measured(engine, urls, args.pairs)}
            found["refused_ms"] = refusals(urls["kvcatch"])
            for name, url in urls.items():
                found[name]["free_after_seconds"] = {
                    "stream": until_free(engine, url, True), "whole": until_free(engine, url, False)
                }  # fmt: skip
        with ways(folder, engine, peer, LIMIT) as urls:
            for name, url in urls.items():
                found[name]["limit"] = overshoot(url)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

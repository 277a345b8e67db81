"""What clients of a gateway see of its mirror: two real engines, latencies with and without a 5 % mirror. JSON on stdout.

    .venv-engine/bin/python bench/mirror.py [--pairs 8]

Both engines and both gateways share this machine's cores: what the candidate computes is taken from the upstream too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench"), str(ROOT / "tools")]
REQUESTS, CLIENTS, OUTPUT, SHARE = 200, 4, 32, 0.05


def latencies(url: str, run: int) -> list[float]:
    """Seconds of each answer, ``CLIENTS`` at a time."""
    from engine.support.server import Ask, ask_all

    asks = [Ask(f"{run} {number} the pool lends its blocks", OUTPUT) for number in range(REQUESTS)]
    answers = ask_all(url, asks, CLIENTS)
    assert {answer.status for answer in answers} == {200}
    return [answer.end - answer.start for answer in answers]


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def main() -> None:
    """Two engines, a gateway with a mirror and one without."""
    from throughput import summary

    from engine.support.gateway import gateway
    from engine.support.mirrors import outcomes, two_engines
    from tiny_models import tiny_model

    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=8)
    pairs = parser.parse_args().pairs
    folder = Path(tempfile.mkdtemp())
    flags = ("--num-gpu-blocks-override", "400", "--block-size", "32", "--max-model-len", "1024")
    model = tiny_model("full")
    with two_engines(folder, model, flags) as site:
        common = (folder, folder / "rings", "--upstream", site.upstream.url)
        with (
            gateway(*common) as plain,
            gateway(
                *common,
                "--mirror",
                site.candidate.url,
                "--mirror-share",
                str(SHARE),
                "--mirror-dir",
                str(folder / "m"),
            ) as mirrored,
        ):
            for front in (plain, mirrored):
                latencies(front.url, 0)
            worst, middle = [], []
            for number in range(1, pairs + 1):
                order = (plain, mirrored) if number % 2 else (mirrored, plain)
                seen = {front.url: latencies(front.url, number) for front in order}
                worst.append(p95(seen[mirrored.url]) / p95(seen[plain.url]))
                middle.append(statistics.median(seen[mirrored.url]) / statistics.median(seen[plain.url]))
            counted = outcomes(mirrored)
    print(
        json.dumps(
            {
                "pairs": pairs,
                "requests": REQUESTS,
                "p95": summary(worst),
                "median": summary(middle),
                "mirror": counted,
            }
        )
    )


if __name__ == "__main__":
    main()

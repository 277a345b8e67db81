"""``kvcatch plan`` as a cold process: wall time and CPU time of a known model on a known card.

    python bench/plan_cold.py [--runs N]

Prints one JSON document and exits 1 when the median is above the budget of 0.35 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

BUDGET_SECONDS = 0.35
COMMAND = [
    sys.executable,
    "-m",
    "kvcatch",
    "plan",
    "Qwen3-8B",
    "--gpu",
    "H100",
    "--max-model-len",
    "8192",
    "--json",
]


def main() -> int:
    """Run the verb several times and judge the median."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    wall, cpu = [], []
    for _ in range(runs):
        before, started = os.times(), time.perf_counter()
        subprocess.run(COMMAND, stdout=subprocess.DEVNULL, check=False)
        wall.append(time.perf_counter() - started)
        after = os.times()
        cpu.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    median = statistics.median(wall)
    print(
        json.dumps(
            {
                "what": "kvcatch plan, cold process",
                "budget_seconds": BUDGET_SECONDS,
                "wall_seconds": {
                    "p50": round(median, 3),
                    "min": round(min(wall), 3),
                    "max": round(max(wall), 3),
                },
                "cpu_seconds_p50": round(statistics.median(cpu), 3),
                "runs": runs,
                "met": median <= BUDGET_SECONDS,
            }
        )
    )
    return 0 if median <= BUDGET_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

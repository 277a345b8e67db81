"""The scheduler plugin against stock, stock with a watermark and naive skip-ahead, on vLLM's real Scheduler.

    .venv-engine/bin/python bench/scheduler.py [--seeds 5] [--requests 1000] [--quick] [-o FILE]

Steps do not depend on the machine; seconds are the time inside schedule(). Ratios are to stock of the same
seed; a cell shows the geometric mean over seeds and its range. Also measures choose() at 1,000 waiting and
256 running.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "KVCATCH_DIR": "/nonexistent",
}  # fmt: skip
GOALS = {"short": 0.35, "long": 1.10, "makespan": 1.03}


def choose_microseconds(rounds: int = 400) -> list[float]:
    """Microseconds per step in the governor, pool full: a blocked long head, and no candidate that may pass.

    The worst case: shadow step and reservation computed anew, every allowed candidate probed in vain.
    """
    import random

    from kvcatch.policy.blocks import BlockTable
    from kvcatch.policy.governor import Governor
    from kvcatch.policy.settings import Settings
    from kvcatch.policy.waiting import Job

    rng = random.Random(1)
    governor = Governor(Settings(), BlockTable.uniform(16, 8192), 12_000, 8192)
    held = 0
    for i in range(256):
        prompt, output = rng.randint(100, 700), rng.randint(200, 1000)
        job = Job(f"r{i}", prompt, prompt + output, 0, prompt, output)
        governor.step = 0
        governor.admit(job, prompt, None)
        held = governor.timeline.at(0)
    peak = max(governor.timeline.at(step) for step in range(1100))
    governor.usable = governor.limit = peak + 3
    governor.safe_blocks = 0.85 * governor.usable
    for i in range(1000):
        prompt = rng.randint(3000, 6000) if i % 5 == 0 else rng.randint(50, 900)
        job = Job(f"w{i}", prompt, 0, 0, prompt, rng.randint(900, 1000))
        job.key = governor.line.next_key(front=False)
        governor.enqueue(job)
    spent = []
    for step in range(1, rounds + 1):
        started = time.perf_counter_ns()
        governor.begin(1, step * 0.001, held)
        found = governor.choose(governor.limit - 60, 256)
        governor.end()
        spent.append((time.perf_counter_ns() - started) / 1e3)
        if found is not None:
            raise AssertionError("the pool is not full")
    return spent


def variants(loose: int) -> dict[str, dict[str, Any]]:
    """name -> how to run it. The first three never look at max_tokens: they run once per load."""
    ours = {"cls": "ours", "KVCATCH_SCHEDULER_MODE": "backfill+peak"}
    if loose == 1:
        return {
            "stock": {"cls": "stock"},
            "stock wm 0.05": {"cls": "stock", "watermark": 0.05},
            "naive skip-ahead": {"cls": "naive"},
            "kvcatch strict": {**ours, "KVCATCH_SCHEDULER_BOUND": "max"},
        }
    return {
        "kvcatch strict": {**ours, "KVCATCH_SCHEDULER_BOUND": "max"},
        "kvcatch q0.9": {**ours, "KVCATCH_SCHEDULER_BOUND": "0.9"},
    }


def measure(specs: list[Any], variant: dict[str, Any], model: str, asynchronous: bool) -> dict[str, float]:
    """One run as numbers."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine.support.sched_modelfree import Run, Setup, naive_class, p95, ttft_p95
    from kvcatch.control.scheduler import KVCatchAsyncScheduler, KVCatchScheduler

    stock, ours = (AsyncScheduler, KVCatchAsyncScheduler) if asynchronous else (Scheduler, KVCatchScheduler)
    cls = {"stock": stock, "ours": ours, "naive": naive_class(stock)}[variant["cls"]]
    os.environ.update({name: value for name, value in variant.items() if name.startswith("KVCATCH")})
    setup = Setup(asynchronous=asynchronous, watermark=variant.get("watermark", 0.0))
    outcome = Run(cls, specs, setup, model).go()
    pilot = getattr(outcome.scheduler, "_kvcatch", None)
    if sorted(outcome.finished) != list(range(len(specs))) or (pilot is not None and pilot.failed):
        raise AssertionError("a request was lost or the plugin stepped aside")
    return {
        "short": ttft_p95(outcome, specs, False),
        "long": ttft_p95(outcome, specs, True),
        "longest": float(
            max(t for t, spec in zip(outcome.ttft, specs, strict=True) if spec.long and t is not None)
        ),
        "all": p95(list(outcome.ttft)),
        "makespan": float(outcome.steps),
        "preemptions": float(outcome.preemptions),
        "recomputed": float(outcome.recomputed),
        "schedule_seconds": outcome.schedule_seconds,
    }


def ratios(cell: list[dict[str, float]], base: list[dict[str, float]], key: str) -> list[float]:
    """Per seed, this variant over stock; a stock value of 0 counts as 1 step."""
    return [row[key] / max(1.0, other[key]) for row, other in zip(cell, base, strict=True)]


def mean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(math.log(max(value, 1e-3)) for value in values))


def show(values: list[float]) -> str:
    """Geometric mean and range."""
    return f"{mean(values):5.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="one seed, 300 requests, exact lengths")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("-o", "--output", default="")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from engine.support.sched_modelfree import flood, tiny_model, workload

    seeds = range(100, 101 if args.quick else 100 + args.seeds)
    count = 300 if args.quick else args.requests
    spent = sorted(choose_microseconds())
    print(
        f"choose() at 1,000 waiting / 256 running: p50 {spent[len(spent) // 2]:.0f} us, "
        f"p99 {spent[int(0.99 * len(spent))]:.0f} us (budget 100)"
    )
    model = tiny_model(Path(tempfile.mkdtemp(prefix="kvcatch-bench-")))
    cases: list[tuple[str, float | None, int]] = [("flood", None, 1)]
    cases += [
        (f"load {load:g} x{loose}", load, loose)
        for loose in ((1,) if args.quick else (1, 2, 4))
        for load in (0.7, 0.95, 1.5)
    ]
    print("ratios to stock: geometric mean over seeds (range); preemptions per 1,000 requests")
    print(
        f"{'case':13s} {'variant':16s} {'short TTFT p95':>18s} {'long TTFT p95':>18s} {'makespan':>18s} "
        f"{'preemptions':>11s} {'s in schedule':>13s}"
    )
    table: list[dict[str, Any]] = []
    stock: dict[float | None, list[dict[str, float]]] = {}
    for title, load, loose in cases:
        for name, variant in variants(loose).items():
            runs = []
            for seed in seeds:
                specs = flood(seed, count) if load is None else workload(seed, count, load, loose)
                runs.append(measure(specs, variant, model, args.asynchronous))
            base = stock.setdefault(load, runs)
            row = {key: ratios(runs, base, key) for key in GOALS}
            missed = [
                key for key in GOALS if mean(row[key]) > GOALS[key] and (load is not None or key == "long")
            ]
            preempted = statistics.fmean(1000 * run["preemptions"] / count for run in runs)
            seconds = statistics.fmean(run["schedule_seconds"] for run in runs)
            mark = f"  misses {', '.join(missed)}" if missed and variant["cls"] == "ours" else ""
            print(
                f"{title:13s} {name:16s} {show(row['short']):>18s} {show(row['long']):>18s} "
                f"{show(row['makespan']):>18s} {preempted:11.1f} {seconds:13.2f}{mark}",
                flush=True,
            )
            table.append({"case": title, "variant": name, "ratios": row, "runs": runs, "missed": missed})
    if args.output:
        document = {
            "seeds": list(seeds), "requests": count, "asynchronous": args.asynchronous,
            "choose_microseconds": {"p50": spent[len(spent) // 2], "p99": spent[int(0.99 * len(spent))]},
            "cells": table,
        }  # fmt: skip
        Path(args.output).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

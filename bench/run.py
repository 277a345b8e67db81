"""``make bench``: the table of budgets. Each row is measured side by side with its peer in one run.

    .venv-engine/bin/python bench/run.py [--only capture,plan,simulate,scheduler,scrape,analyse,gateway]

Writes bench/results.json and exits 1 when a row is missed or lacks its peer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]


def script(name: str, *arguments: str) -> list[Any]:
    """The JSON documents that a bench script prints, a line each (or one indented document)."""
    command = [sys.executable, str(ROOT / "bench" / name), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    try:
        return [json.loads(done.stdout)]
    except ValueError:
        return [json.loads(line) for line in lines]


def row(what: str, budget: str, measured: str, peer: str, *, met: bool, interval: str = "") -> Row:
    """One line of the table."""
    return {
        "what": what,
        "budget": budget,
        "measured": measured,
        "interval": interval,
        "peer": peer,
        "met": met,
    }


def capture() -> list[Row]:
    """Throughput, hook time, bytes per event."""
    rows = []
    through = script("throughput.py")[-1]
    mine, theirs = through["capture"], through["events"]
    for clock in ("wall", "cpu"):
        ratio, other = mine[clock], theirs[clock]
        rows.append(
            row(
                f"throughput with capture on ({clock} time, {mine['pairs']} ABBA pairs)", "median >= 0.99, low >= 0.97",
                f"{ratio['median']:.4f}", f"KV events + --kv-cache-metrics {other['median']:.4f}",
                interval=f"{ratio['low']:.4f}-{ratio['high']:.4f}",
                met=ratio["median"] >= 0.99 and ratio["low"] >= 0.97 and ratio["median"] >= other["low"],
            )
        )  # fmt: skip
    for requests, budget in ((48, 10.0), (512, 40.0)):
        runs = [
            r for r in script("hook_cost.py", "--requests", str(requests))[-1] if r["requests"] == requests
        ]
        cost = statistics.median(r["hook_us"] for r in runs)
        behind = statistics.median(r["behind_us"] for r in runs)
        schedule = statistics.median(r["schedule_us"] for r in runs)
        rows.append(
            row(
                f"hook time per step at {requests} requests", f"<= {budget:.0f} us",
                f"{cost:.1f} us, and {behind:.0f} us behind the model call",
                f"vLLM's schedule() {schedule:.0f} us ({cost / schedule:.1%})",
                interval=f"{min(r['hook_us'] for r in runs):.1f}-{max(r['hook_us'] for r in runs):.1f}",
                met=cost <= budget,
            )
        )  # fmt: skip
    size = through["size"]
    each = size["bytes_per_event"]
    ratio = size["json_bytes"] / size["kvcap_bytes"]
    rows.append(
        row(
            "capture size, without 8 bytes per new block hash", "<= 12 bytes per event", f"{each:.1f} bytes",
            f"JSON lines of the same: {ratio:.0f} x", met=each <= 12,
        )
    )  # fmt: skip
    return rows


def plan() -> list[Row]:
    """Cold start and accuracy of plan."""
    config = next((ROOT / "tests" / "data" / "plan").rglob("*Qwen3-8B*.json"), None)
    target = str(config) if config else "Qwen3-8B"
    command = [sys.executable, "-m", "kvcatch", "plan", target, "--gpu", "H100", "--json"]
    times, bare = [], []
    for _ in range(11):
        for arguments, into in ((command, times), ([sys.executable, "-c", "pass"], bare)):
            start = time.perf_counter()
            subprocess.run(arguments, stdout=subprocess.DEVNULL, check=False)
            into.append(time.perf_counter() - start)
    cold = statistics.median(times)
    rows = [
        row(
            "kvcatch plan, cold process", "<= 0.35 s", f"{cold:.3f} s",
            f"python -c pass {statistics.median(bare):.3f} s", interval=f"{min(times):.3f}-{max(times):.3f}",
            met=cold <= 0.35,
        )
    ]  # fmt: skip
    errors = script("plan_memory.py", "--json")[-1]
    for name, value in errors["mean_absolute_error_percent"].items():
        rows.append(
            row(
                f"plan against boot logs: {name}",
                "see spec",
                f"{value:.2f} %",
                "llm-d-planner 0.75-0.89 / 6.7 %",
                met=errors["met"],
            )
        )
    return rows


def simulate() -> list[Row]:
    """Pool simulation, curve, engine simulation: the script prints rows itself."""
    return [
        row(
            r["what"],
            str(r["budget"]),
            f"{r['measured']:.4g} {r['unit']}",
            str(r["peer"] or ""),
            met=bool(r["met"]) and bool(r["peer"]),
        )
        for r in script("simulate.py")
    ]


def scheduler() -> list[Row]:
    """choose() of the scheduler plugin; the grid is bench/scheduler.py's own table."""
    sys.path.insert(0, str(ROOT / "bench"))
    import scheduler as bench

    times = bench.choose_microseconds()
    p50 = statistics.median(times)
    return [
        row(
            "scheduler plugin: choose() at 1,000 waiting / 256 running", "<= 100 us", f"{p50:.1f} us", "stock: head of the queue",
            interval=f"-{sorted(times)[int(0.95 * len(times))]:.1f} (p95)", met=p50 <= 100,
        )
    ]  # fmt: skip


def scrape() -> list[Row]:
    """200 engines in one process."""
    result = script("scrape.py")[-1]
    return [
        row(
            "200 engines scraped each second by one process",
            "none late",
            json.dumps(result)[:120],
            "one thread per target",
            met=bool(result["met"]),
        )
    ]


def analyse() -> list[Row]:
    """Reading and judging a million steps with five million events."""
    result = script("analyse.py")[-1]
    return [
        row(
            f"read + analyse {result['samples']:,} samples and {result['events']:,} events", "<= 10 s, <= 1 GiB",
            f"{result['wall_seconds']} s ({result['cpu_seconds']} s CPU), {result['peak_bytes'] / 2**30:.2f} GiB",
            f"replay record by record {result['replay_cpu_seconds']} s CPU", met=bool(result["met"]),
        )
    ]  # fmt: skip


def gateway() -> list[Row]:
    """Added first-token latency, throughput against direct, limits, leaving clients; beside LiteLLM's proxy."""
    result = script("gateway.py")[-1]
    ours, theirs, refused = result["kvcatch"], result["litellm"], result["refused_ms"]
    added, through = ours["added_ttft_ms"], ours["throughput"]
    free, other = ours["free_after_seconds"], theirs["free_after_seconds"]
    return [
        row(
            f"gateway: added TTFT, one client (median; direct {result['direct_ttft_ms']:.1f} ms)", "<= 2 ms",
            f"{added['median']:.2f} ms", f"LiteLLM {theirs['added_ttft_ms']['median']:.2f} ms",
            interval=f"{added['low']:.2f}-{added['high']:.2f}", met=added["median"] <= 2,
        ),
        row(
            f"gateway: throughput at 48 concurrent, direct = 1 ({result['pairs']} rounds)", "median >= 0.97",
            f"{through['median']:.4f}", f"LiteLLM {theirs['throughput']['median']:.4f}",
            interval=f"{through['low']:.4f}-{through['high']:.4f}", met=through["median"] >= 0.97,
        ),
        row(
            "gateway: tokens used at once against a limit of 1,000 a minute", "<= 1 x",
            f"{ours['limit']['times_the_limit']:.2f} x", f"LiteLLM {theirs['limit']['times_the_limit']:.2f} x",
            met=ours["limit"]["times_the_limit"] <= 1,
        ),
        row(
            "gateway: engine free after a client has left (stream, whole)", "no later than the peer",
            f"{free['stream']:.2f}, {free['whole']:.2f} s", f"LiteLLM {other['stream']:.2f}, {other['whole']:.2f} s",
            met=max(free.values()) <= max(other.values()) + 0.1,
        ),
        row(
            "gateway: refusal of what never fits", "< 50 ms", f"{refused['median']:.1f} ms",
            f"longest {refused['max']:.1f} ms", met=refused["median"] < 50,
        ),
    ]  # fmt: skip


PARTS: dict[str, Callable[[], list[Row]]] = {
    "capture": capture, "plan": plan, "simulate": simulate, "scheduler": scheduler, "scrape": scrape, "analyse": analyse,
    "gateway": gateway,
}  # fmt: skip


def main() -> int:
    """Run the parts, print the table, store the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parts = parser.parse_args().only.split(",")
    rows: list[Row] = []
    for name in parts:
        rows += PARTS[name]()
    widths = {
        key: max(len(key), *(len(str(r[key])) for r in rows))
        for key in ("what", "budget", "measured", "interval", "peer")
    }
    header = "  ".join(key.ljust(width) for key, width in widths.items()) + "  met"
    print(header, "-" * len(header), sep="\n")
    for r in rows:
        print(
            "  ".join(str(r[key]).ljust(width) for key, width in widths.items())
            + ("  yes" if r["met"] else "  NO")
        )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    document = {
        "commit": commit, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(), "load_before": os.getloadavg()[0], "rows": rows,
    }  # fmt: skip
    (ROOT / "bench" / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(r["met"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The scheduler plugin against stock on a real engine that computes: a tiny model on the CPU, sync and async.

    .venv-engine/bin/python bench/scheduler_engine.py [--requests 200] [--loads 0.95,1.5] [--seeds 2] [-o FILE]

The requests of one seed arrive at the same steps in every run; a process of its own runs each scheduler. Times of first
tokens are given in steps and in seconds, as ratios to stock of the same seed (lowest to highest).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
#: 40 usable blocks of 32 tokens; a request holds 304 block-steps on average, so that 7.6 steps each fill the pool
BLOCKS, STEPS_PER_REQUEST = 40, 7.6
LONG = 200


def drawn(requests: int, load: float, seed: int) -> list[tuple[int, int, int]]:
    """(step of arrival, prompt tokens, output tokens); every sixth prompt is long."""
    rng, at, rows = random.Random(seed), 0.0, []
    for index in range(requests):
        at += rng.expovariate(load / STEPS_PER_REQUEST)
        prompt = rng.randint(400, 600) if index % 6 == 0 else rng.randint(10, 60)
        rows.append((int(at), prompt, rng.randint(20, 90)))
    return rows


def serve(model: str, scheduler: str, requests: int, load: float, seed: int) -> dict[str, Any]:
    """One engine, one scheduler (empty: stock)."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if os.environ.get("KVCATCH_TEST_ASYNC"):
        from kvcatch_test_plugins import knobs

        knobs.register()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=model, dtype="float32", max_model_len=1024, block_size=32, num_gpu_blocks_override=BLOCKS + 1,
        max_num_batched_tokens=256, max_num_seqs=32, enforce_eager=True, enable_prefix_caching=False,
        skip_tokenizer_init=True, **({"scheduler_cls": scheduler} if scheduler else {}),
    )  # fmt: skip
    engine = llm.llm_engine
    core = engine.engine_core.engine_core.scheduler
    preempted, schedule = 0, core.schedule

    def counted(*args: object, **kwargs: object) -> Any:
        nonlocal preempted
        output = schedule(*args, **kwargs)
        preempted += len(output.preempted_req_ids or ())
        return output

    core.schedule = counted
    rng = random.Random(seed)
    coming = [
        (at, [rng.randrange(3, 95) for _ in range(prompt)], output)
        for at, prompt, output in drawn(requests, load, seed)
    ]
    arrived: dict[str, tuple[int, float, int]] = {}
    first: dict[str, tuple[int, float]] = {}
    step, started, number = 0, time.perf_counter(), 0
    while number < len(coming) or engine.has_unfinished_requests():
        while number < len(coming) and coming[number][0] <= step:
            _, tokens, output = coming[number]
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
            arrived[str(number)] = step, time.perf_counter(), len(tokens)
            engine.add_request(str(number), TokensPrompt(prompt_token_ids=tokens), params)
            number += 1
        if not engine.has_unfinished_requests():
            step = coming[number][0]
            continue
        for answer in engine.step():
            if answer.outputs[0].token_ids and answer.request_id not in first:
                first[answer.request_id] = step, time.perf_counter()
        step += 1
    waits = {
        kind: [
            (first[name][0] - at, first[name][1] - when)
            for name, (at, when, prompt) in arrived.items()
            if (prompt > LONG) == (kind == "long")
        ]
        for kind in ("short", "long")
    }
    pilot = getattr(core, "_kvcatch", None)
    return {
        "class": type(core).__name__,
        "in_charge": pilot is not None and not pilot.failed,
        "preemptions": preempted,
        "makespan": (step, time.perf_counter() - started),
        **{
            kind: tuple(p95([wait[unit] for wait in rows]) for unit in (0, 1)) for kind, rows in waits.items()
        },
    }


def p95(values: list[float]) -> float:
    """Nearest rank."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cell in a process of its own."""
    from engine.support import env
    from engine.support.server import engine_lock
    from tiny_models import tiny_model

    model = tiny_model("full")
    rows = []
    for mode, name in (("sync", "KVCatchScheduler"), ("async", "KVCatchAsyncScheduler")):
        for load in arguments.loads:
            ratios: dict[str, list[float]] = {}
            preemptions: list[list[int]] = []
            for seed in range(1, arguments.seeds + 1):
                pair = []
                for scheduler in ("", f"kvcatch.control.scheduler.{name}"):
                    command = [
                        sys.executable,
                        __file__,
                        "--serve",
                        json.dumps([str(model), scheduler, arguments.requests, load, seed]),
                    ]
                    paths = [str(ROOT / "tests"), str(ROOT / "tests" / "engine_plugins")]
                    variables = env.environment(
                        PYTHONPATH=os.pathsep.join(paths), VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR",
                        KVCATCH_DIR=tempfile.mkdtemp(), KVCATCH_TEST_ASYNC="1" if mode == "async" else None,
                    )  # fmt: skip
                    with engine_lock():
                        done = subprocess.run(
                            command, env=variables, capture_output=True, text=True, check=False
                        )
                    assert done.returncode == 0, done.stderr[-3000:]
                    pair.append(json.loads(done.stdout.splitlines()[-1]))
                stock, ours = pair
                assert ours["class"] == name
                assert ours["in_charge"]
                preemptions.append([stock["preemptions"], ours["preemptions"]])
                for what in ("short", "long", "makespan"):
                    for unit, place in (("steps", 0), ("seconds", 1)):
                        ratios.setdefault(f"{what} {unit}", []).append(
                            ours[what][place] / max(stock[what][place], 1e-9)
                        )
            row = {"mode": mode, "load": load, "requests": arguments.requests, "preemptions": preemptions}
            row |= {what: [statistics.geometric_mean(v), min(v), max(v)] for what, v in ratios.items()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """A row for each mode and load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--loads", type=lambda text: [float(word) for word in text.split(",")], default=[0.95, 1.5]
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    if arguments.serve:
        print(json.dumps(serve(*json.loads(arguments.serve))))
        return
    rows = run(arguments)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""Cost of the recorder's hooks beside the engine's own schedule(), on the real scheduler without a model.

    .venv-engine/bin/python bench/hook_cost.py --requests 48     # prints one JSON document

Every hook is timed from outside and its original from inside; the difference, less what the same two timers find
around a hook that does nothing, is what kvcatch adds. What is added on the engine's way from one model call to the next
(``hook_us``) is told apart from what runs once the step is with the workers (``behind_us``, in ``get_grammar_bitmask``).
``requests`` decode at once, with new prompts joining as others finish.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": "", "KVCATCH": ""}


def timed(function: Any, cell: list[int]) -> Any:
    """Add the time of each call to ``cell[0]``, and count it in ``cell[1]``."""
    clock = time.perf_counter_ns

    def call(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return function(*args, **kwargs)
        finally:
            cell[0] += clock() - start
            cell[1] += 1

    # The recorder looks at the code of the original.
    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call


def timers_ns(calls: int = 20_000) -> float:
    """What the two timers find around a hook that only calls its original, ns a call (the least of five rounds)."""

    def original(value: int) -> int:
        return value

    rounds = []
    for _ in range(5):
        outer, inner = [0, 0], [0, 0]
        inside = timed(original, inner)

        def hook(*args: Any, inside: Any = inside, **kwargs: Any) -> Any:
            return inside(*args, **kwargs)

        outside = timed(hook, outer)
        for number in range(calls):
            outside(number)
        rounds.append((outer[0] - inner[0]) / calls)
    return min(rounds)


def measure(requests: int, steps: int, seed: int, folder: str) -> dict[str, float]:
    """One run; times per step in microseconds."""
    from engine.support.modelfree import Case, Driver
    from kvcatch.capture.hooks import Hooks
    from kvcatch.capture.plugin import start_recorder

    path, behind, schedule = ([0, 0], [0, 0]), ([0, 0], [0, 0]), [0, 0]
    case = Case(
        requests=requests * 6, num_blocks=requests * 40, max_num_seqs=requests, max_num_batched_tokens=8192,
        max_prompt=700, max_output=400, eos_ratio=0.0, abort_ratio=0.0, arrivals_per_step=0.0, seed=seed,
        model=folder,
    )  # fmt: skip
    driver = Driver(case)
    plain = Hooks.add

    def hook(self: Any, owner: Any, name: str, make: Any) -> None:
        original = getattr(owner, name)
        code = original.__code__ if hasattr(original, "__code__") else original.__func__.__code__
        outer, inner = behind if name == "get_grammar_bitmask" else path
        inside = timed(original, inner)
        if name == "schedule":
            inside = timed(inside, schedule)
        inside.__code__ = inside.__code__.replace(co_names=inside.__code__.co_names + code.co_names)
        self._originals.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, timed(make(inside), outer))

    Hooks.add = hook
    os.environ |= {"KVCATCH": "1", "KVCATCH_DIR": tempfile.mkdtemp()}
    try:
        from kvcatch.capture.options import Options

        recorder = start_recorder(driver.scheduler, Options(os.environ))
        recorder.behind = True  # as in an engine core
    finally:
        Hooks.add = plain
    for _ in range(requests * 2):
        driver.scheduler.add_request(driver.coming.popleft())
    for _ in range(60):
        driver._step()
    for cell in (*path, *behind, schedule):
        cell[:] = (0, 0)
    words = recorder.ring.head
    done = 0
    running = 0
    while done < steps and driver.coming:
        if len(driver.scheduler.waiting) < 2:
            driver.scheduler.add_request(driver.coming.popleft())
        driver._step()
        running += len(driver.scheduler.running)
        done += 1
    assert recorder.active
    timers = timers_ns()

    def added(cells: tuple[list[int], list[int]]) -> float:
        outer, inner = cells
        return (outer[0] - inner[0] - timers * outer[1]) / done / 1e3

    return {
        "requests": requests,
        "steps": done,
        "running_mean": running / done,
        "hook_us": added(path),
        "behind_us": added(behind),
        "timers_us": timers * (path[0][1] + behind[0][1]) / done / 1e3,
        "hook_calls": (path[0][1] + behind[0][1]) / done,
        "schedule_us": schedule[0] / done / 1e3,
        "ring_bytes_per_step": 4 * (recorder.ring.head - words) / done,
    }


def main() -> None:
    """Three seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=48)
    requests = parser.parse_args().requests
    folder = str(model_folder())
    rows = [measure(requests, 400, seed, folder) for seed in (1, 2, 3)]
    print(json.dumps(rows))


def model_folder() -> Path:
    """A folder with a small config.json."""
    folder = Path(tempfile.mkdtemp())
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 1024, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main()

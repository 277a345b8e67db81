"""``LLM`` in a process of its own: the engine core beside the caller, or with its own processes.

python offline.py OUT.json '{"model": …, "arguments": {…}, "rounds": 2, …}'      (fields: ``Job``)
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """What to run: engine arguments, and prompts of random lengths with shared beginnings."""

    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    prompts: int = 40
    longest: int = 500
    tokens: int = 60
    seed: int = 0
    #: MiB of memory that a process eats beside the engine after the first round
    eat_mib: int = 0


def prompts(job: Job) -> list[list[int]]:
    """Token ids; half of the prompts begin with one of three common heads."""
    rng = random.Random(job.seed)
    heads = [[rng.randrange(3, 95) for _ in range(150)] for _ in range(3)]
    return [
        (rng.choice(heads) if rng.random() < 0.5 else [])
        + [rng.randrange(3, 95) for _ in range(rng.randrange(10, job.longest))]
        for _ in range(job.prompts)
    ]


def run(job: Job) -> dict[str, Any]:
    """Generate in two rounds and tell what the engine itself knows."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(model=job.model, disable_log_stats=False, **{"enforce_eager": True, **job.arguments})
    sampling = SamplingParams(max_tokens=job.tokens, ignore_eos=True, temperature=0)
    lists = prompts(job)
    half = len(lists) // 2
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in lists[:half]], sampling, use_tqdm=False
    )
    eater = eat(job.eat_mib) if job.eat_mib else None
    outputs += llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in lists[half:]], sampling, use_tqdm=False
    )
    answer: dict[str, Any] = {
        "outputs": [len(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "cache_config": {
            "num_gpu_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
            "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
            "cache_dtype": str(llm.llm_engine.vllm_config.cache_config.cache_dtype),
        },
    }
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        config = core.scheduler.kv_cache_config
        answer["tensors"] = [tensor.size for tensor in config.kv_cache_tensors]
        answer["groups"] = [
            [type(group.kv_cache_spec).__name__, len(group.layer_names), group.kv_cache_spec.page_size_bytes]
            for group in config.kv_cache_groups
        ]
    if eater:
        eater.kill()
        eater.wait()
    return answer


def eat(mebibytes: int) -> subprocess.Popen[str]:
    """A process that holds so much memory; returns once it does."""
    code = f"import sys\nx = bytearray({mebibytes} << 20)\nx[::4096] = b'x' * len(x[::4096])\nprint('full', flush=True)\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "full\n"
    return process


def offline(folder: Path, job: Job, **environment: str | None) -> dict[str, Any]:
    """Run a job under the machine's engine lock, recorded and observed below ``folder``."""
    from engine.support import env
    from engine.support.server import engine_lock

    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "KVCATCH": "1",
        "KVCATCH_DIR": str(folder / "rings"),
        "KVCATCH_TEST_OBSERVER": str(folder),
        "PYTHONPATH": str(env.ROOT / "tests"),
    }
    settings.update(environment)
    out = folder / "out.json"
    with engine_lock(), open(folder / "log.txt", "w") as log:
        done = subprocess.run(
            [sys.executable, __file__, str(out), json.dumps(dataclasses.asdict(job))],
            env=env.environment(**settings),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            timeout=1500,
            check=False,
            start_new_session=True,
        )
    assert done.returncode == 0, (folder / "log.txt").read_text()[-5000:]
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(run(Job(**json.loads(sys.argv[2])))))

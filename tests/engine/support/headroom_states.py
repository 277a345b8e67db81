"""Random states of a real engine that stands still between two steps while ``kvcatch serve`` is asked what fits.

python headroom_states.py MODEL SERVE_URL SEEDS        one JSON line per state on stdout
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import urllib.request
from typing import Any

BLOCKS, BLOCK, SEQS, CONTEXT = 121, 32, 24, 1024


class World:
    """The engine core beside us: nothing moves but by ``step``."""

    def __init__(self, model: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        llm = LLM(
            model=model, max_model_len=CONTEXT, block_size=BLOCK, num_gpu_blocks_override=BLOCKS, max_num_seqs=SEQS,
            max_num_batched_tokens=8192, enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=False,
        )  # fmt: skip
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.preempted = 0
        self.names = 0
        schedule = self.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.preempted += len(output.preempted_req_ids or ())
            return output

        self.scheduler.schedule = counted

    def add(self, rng: random.Random, prompt: int, output: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self.names += 1
        # Random tokens: nothing is shared, as headroom assumes.
        tokens = TokensPrompt(prompt_token_ids=[rng.randrange(3, 95) for _ in range(prompt)])
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.names), tokens, params)

    def bring_to(self, seed: int) -> tuple[random.Random, tuple[int, int]]:
        """The same state for the same seed: some requests somewhere in their lives. Gives the size to ask about."""
        rng = random.Random(seed)
        for _ in range(rng.randrange(1, 7)):
            self.add(rng, rng.randrange(20, 250), rng.randrange(70, 300))
        for _ in range(rng.randrange(1, 60)):
            self.engine.step()
        small = seed % 5 == 4  # then the number of sequences binds
        return rng, (rng.randrange(4, 20), rng.randrange(20, 40)) if small else (
            rng.randrange(20, 300), rng.randrange(30, 250)
        )  # fmt: skip

    def disturbed(self, rng: random.Random, count: int, size: tuple[int, int]) -> list[str]:
        """Send ``count`` at once, run to the end: which of preemption and waiting were seen."""
        for _ in range(count):
            self.add(rng, *size)
        before = self.preempted
        self.engine.step()
        seen = []
        if len(self.scheduler.waiting):
            seen.append("max_num_seqs" if len(self.scheduler.running) >= SEQS else "blocks")
        while self.engine.has_unfinished_requests():
            self.engine.step()
        if self.preempted > before:
            seen.append("preemption")
        return seen


def ask(url: str, size: tuple[int, int], since: float, *more: str) -> dict[str, Any]:
    """The answer of ``/v1/headroom`` about a state not older than ``since``."""
    query = "&".join([f"prompt_tokens={size[0]}&output_tokens={size[1]}", *more])
    for _ in range(200):
        with urllib.request.urlopen(f"{url}/v1/headroom?{query}", timeout=30) as answer:
            (engine,) = json.loads(answer.read())["engines"]
        if (engine["unix_seconds"] or 0) >= since:
            return dict(engine)
    raise TimeoutError("kvcatch serve never saw the last step")


def main(model: str, url: str, seeds: int) -> None:
    world = World(model)
    for seed in range(seeds):
        answers: dict[str, Any] = {}
        for more in (0, 1):
            start = time.time()
            rng, size = world.bring_to(seed)
            running = len(world.scheduler.running)
            now = ask(url, size, start, "within_ms=0")
            assert now["running"] == running
            if not more:
                careful = ask(url, size, start)
                answers = {"size": size, "running": running, "requests": now["requests"], "limit": now["limit"],
                           "careful": careful["requests"]}  # fmt: skip
                print(json.dumps({"asked": answers}), flush=True)
                sys.stdin.readline()  # the test looks at this state with other eyes
            assert now["requests"] == answers["requests"]  # the state is the same both times
            answers["one more" if more else "so many"] = world.disturbed(rng, now["requests"] + more, size)
        print(json.dumps({"state": answers}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""A real engine with one scheduler class: the same 36 greedy requests, tokens and scheduler figures as JSON.

python sched_llm.py MODEL sync|async CLASS   (CLASS empty = stock)  ->  one JSON document on the last line
"""

from __future__ import annotations

import json
import os
import random
import sys


def main(model: str, mode: str, scheduler: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if mode == "async":
        from kvcatch_test_plugins import knobs

        knobs.register()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        num_gpu_blocks_override=41,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **({"scheduler_cls": scheduler} if scheduler else {}),
    )
    engine = llm.llm_engine.engine_core.engine_core
    rng = random.Random(3)
    prompts, params = [], []
    for index in range(36):
        length = rng.randint(400, 600) if index % 6 == 0 else rng.randint(10, 60)
        prompts.append(TokensPrompt(prompt_token_ids=[rng.randrange(3, 100) for _ in range(length)]))
        params.append(
            SamplingParams(temperature=0, max_tokens=rng.randint(20, 90), ignore_eos=True, detokenize=False)
        )
    seen: dict[str, int] = {}
    waiting = engine.scheduler
    schedule = waiting.schedule

    def counted(*args: object, **kwargs: object) -> object:
        output = schedule(*args, **kwargs)
        for request_id in output.preempted_req_ids or ():
            seen[request_id] = seen.get(request_id, 0) + 1
        reasons.extend(reason for *_, reason in getattr(waiting, "kvcatch_decisions", ()))
        return output

    reasons: list[str] = []
    waiting.schedule = counted
    outputs = llm.generate(prompts, params, use_tqdm=False)
    pilot = getattr(waiting, "_kvcatch", None)
    print(
        json.dumps(
            {
                "class": type(waiting).__name__,
                "bases": [base.__name__ for base in type(waiting).__mro__],
                "batches": engine.vllm_config.max_concurrent_batches,
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "preemptions": sum(seen.values()),
                "in_charge": pilot is not None and not pilot.failed,
                "reasons": sorted(set(reasons)),
                "free": waiting.kv_cache_manager.block_pool.get_num_free_blocks(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:4])

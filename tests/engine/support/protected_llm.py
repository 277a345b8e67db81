"""A real engine: a tenant whose prompts share 2,048 tokens, between floods of prompts that share nothing.

python protected_llm.py MODEL CLASS   (CLASS empty = stock)  ->  one JSON document on the last line
"""

from __future__ import annotations

import json
import os
import random
import sys

#: usable blocks of 32 tokens; a round of the flood takes 11 blocks a request, 264 in all
BLOCKS, ROUNDS, FLOOD, SHARED = 200, 5, 24, 2048


def main(model: str, scheduler: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=2304,
        block_size=32,
        num_gpu_blocks_override=BLOCKS + 1,
        max_num_batched_tokens=512,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        **({"scheduler_cls": scheduler} if scheduler else {}),
    )
    scheduling = llm.llm_engine.engine_core.engine_core.scheduler
    rng = random.Random(11)
    system = [rng.randrange(3, 95) for _ in range(SHARED)]
    preempted, schedule = [], scheduling.schedule

    def counted(*args: object, **kwargs: object) -> object:
        output = schedule(*args, **kwargs)
        preempted.extend(output.preempted_req_ids or ())
        return output

    scheduling.schedule = counted

    def ask(tenant: str, prompts: list[list[int]]) -> list[tuple[list[int], int]]:
        params = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, detokenize=False,
            extra_args={"kvcatch_tenant": tenant},
        )  # fmt: skip
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False
        )
        return [(list(one.outputs[0].token_ids), one.num_cached_tokens or 0) for one in outputs]

    def own(count: int) -> list[int]:
        return [rng.randrange(3, 95) for _ in range(count)]

    # The second request proves the prefix: it finds it in the cache.
    chat = ask("chat", [system + own(40)]) + ask("chat", [system + own(40)])
    flood = []
    for _ in range(ROUNDS):
        flood += ask("batch", [own(321) for _ in range(FLOOD)])
        chat += ask("chat", [system + own(40)])
    pilot = getattr(scheduling, "_kvcatch", None)
    print(
        json.dumps(
            {
                "class": type(scheduling).__name__,
                "in_charge": pilot is not None and not pilot.failed,
                "chat_hits": [hit for _, hit in chat],
                "flood_hits": [hit for _, hit in flood],
                "tokens": [tokens for tokens, _ in chat + flood],
                "preemptions": len(preempted),
                "free": scheduling.kv_cache_manager.block_pool.get_num_free_blocks(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])

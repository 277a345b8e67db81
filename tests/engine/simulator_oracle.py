"""The real vLLM ``Scheduler`` without a model, fed with the same requests as our own engines."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 1024,
    "max_position_embeddings": 65536, "torch_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One engine and one random workload."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    requests: int
    max_model_len: int
    policy: str = "fcfs"


def settings(seed: int) -> Settings:
    """Pools from roomy to tight, so that some seeds preempt a lot and some never."""
    rng = random.Random(seed)
    block_size = 16
    return Settings(
        num_blocks=rng.choice([40, 48, 64, 100, 300]),
        block_size=block_size,
        max_num_seqs=rng.choice([4, 16, 64]),
        max_num_batched_tokens=rng.choice([64, 256, 1024]),
        watermark=rng.choice([0.0, 0.0, 0.05, 0.2]),
        requests=40,
        max_model_len=39 * block_size,
    )


def prompts(seed: int, chosen: Settings) -> list[tuple[list[int], int]]:
    """Prompt token ids and output lengths: shared heads, exact repeats, lengths on block boundaries."""
    rng = random.Random(seed + 1)
    heads = [[rng.randrange(1000) for _ in range(rng.randrange(1, 200))] for _ in range(4)]
    made: list[tuple[list[int], int]] = []
    for _ in range(chosen.requests):
        if made and rng.random() < 0.15:
            tokens = list(rng.choice(made)[0])
        else:
            tokens = rng.choice(heads) + [rng.randrange(1000) for _ in range(rng.randrange(1, 250))]
        if rng.random() < 0.3:
            tokens = tokens[: max(1, len(tokens) // chosen.block_size) * chosen.block_size]
        made.append((tokens, rng.randrange(1, 160)))
    return made


@functools.cache
def _model(folder: Path, max_model_len: int) -> Any:
    """Reading a model's configuration is the slow part of building a scheduler."""
    from vllm.config import ModelConfig

    (folder / "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(
        model=str(folder), dtype="bfloat16", max_model_len=max_model_len, skip_tokenizer_init=True
    )


def real_scheduler(chosen: Settings, folder: Path, windows: Sequence[int] = ()) -> Any:
    """A vLLM Scheduler over one full-attention group, and sliding ones of these block sizes (and windows)."""
    import torch
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    model = _model(folder, chosen.max_model_len)
    scheduler = SchedulerConfig(
        max_num_seqs=chosen.max_num_seqs,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_model_len=chosen.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
        policy=chosen.policy,
        **({"watermark": chosen.watermark} if chosen.watermark else {}),
    )
    cache = CacheConfig(block_size=chosen.block_size, enable_prefix_caching=True)
    config = VllmConfig(model_config=model, scheduler_config=scheduler, cache_config=cache)
    cache.num_gpu_blocks = chosen.num_blocks
    heads = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    groups = [KVCacheGroupSpec(["l0"], FullAttentionSpec(block_size=chosen.block_size, **heads))]
    for number, size in enumerate(windows, 1):
        window = SlidingWindowSpec(block_size=size, sliding_window=size, **heads)
        groups.append(KVCacheGroupSpec([f"l{number}"], window))
    more = {"hash_block_size": chosen.block_size} if windows else {}
    layout = KVCacheConfig(
        num_blocks=chosen.num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=layout,
        structured_output_manager=StructuredOutputManager(config),
        block_size=math.lcm(chosen.block_size, *windows),
        log_stats=True,
        **more,
    )


@functools.cache
def _hasher(block_size: int) -> Any:
    """Built once: older releases start every chain with a number drawn when this is initialised."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    return get_request_block_hasher(block_size, hash_function)


def real_request(
    request_id: str, tokens: list[int], output_tokens: int, block_size: int, priority: int = 0
) -> Any:
    """A vLLM Request that generates exactly ``output_tokens``."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    # Releases before 0.24 wanted it.
    more = {"eos_token_id": 1} if "eos_token_id" in inspect.signature(Request.__init__).parameters else {}
    return Request(
        **more,
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=_hasher(block_size),
        priority=priority,
    )


def real_answer(scheduler: Any, output: Any, salt: int) -> Any:
    """Made-up tokens, different for each request, so that generated blocks never repeat."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    tokens = [
        [(int(i) * 7919 + scheduler.requests[i].num_output_tokens + salt) % 1000]
        if scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_tokens
        else []
        for i in ids
    ]
    fields = inspect.signature(ModelRunnerOutput).parameters
    empty = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
    more = {name: value for name, value in empty.items() if fields[name].default is inspect.Parameter.empty}
    return ModelRunnerOutput(
        **more, req_ids=ids, req_id_to_index={i: k for k, i in enumerate(ids)}, sampled_token_ids=tokens
    )


def free_order(pool: Any) -> list[int]:
    """Block ids in the free queue, next to be reused first."""
    order, block = [], pool.free_block_queue.fake_free_list_head.next_free_block
    while block is not None and block.next_free_block is not None:
        order.append(block.block_id)
        block = block.next_free_block
    return order


def plain(output: Any) -> tuple[Any, ...]:
    """A step's decision as plain values."""
    cached = output.scheduled_cached_reqs
    return (
        {r.req_id: (r.block_ids, r.num_computed_tokens) for r in output.scheduled_new_reqs},
        list(
            zip(
                cached.req_ids,
                cached.new_block_ids,
                cached.num_computed_tokens,
                cached.num_output_tokens,
                strict=True,
            )
        ),
        set(cached.resumed_req_ids),
        list(output.num_scheduled_tokens.items()),
        set(output.preempted_req_ids or ()),
        set(output.finished_req_ids),
    )

"""Drives vLLM's real scheduler classes without a model, one seeded workload per run.

Arrivals are counted in engine steps, so a result does not depend on the machine. Answers are made up; a
request's true output length is known here and hidden from the scheduler (``max_tokens`` may be looser).
"""

from __future__ import annotations

import inspect
import json
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.02


@dataclass(frozen=True)
class Spec:
    """One request: arrival step, prompt and true output tokens, declared max_tokens."""

    arrival: int
    prompt: int
    output: int
    max_tokens: int
    long: bool = False
    priority: int = 0
    prefix: int = -1  # shared first tokens: which prefix, none when negative
    prefix_tokens: int = 0
    tenant: str = ""


@dataclass(frozen=True)
class Setup:
    """The engine. usable blocks = num_blocks - 1."""

    num_blocks: int = 65
    block_size: int = 32
    max_num_seqs: int = 64
    budget: int = 256
    max_model_len: int = 2048
    asynchronous: bool = False
    caching: bool = False
    watermark: float = 0.0
    policy: str = "fcfs"
    sliding: bool = False
    v2_runner: bool = False


@dataclass
class Outcome:
    """What a run gave; lists by request index, in steps."""

    ttft: list[int | None] = field(default_factory=list)
    end: list[int | None] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    free_at_end: int = 0
    queue_at_end: int = 0
    schedule_seconds: float = 0.0
    peak_used: float = 0.0
    scheduler: Any = None
    decisions: list[tuple[Any, ...]] = field(default_factory=list)
    recomputed: int = 0
    hit_tokens: dict[int, int] = field(default_factory=dict)


def tiny_model(folder: Path) -> str:
    """A folder with a config.json that vLLM accepts; no weights are ever loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def build(cls: type, setup: Setup, model: str) -> Any:
    """A scheduler of class ``cls`` over a pool of full attention (and a sliding group if asked)."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    model_config = ModelConfig(
        model=model, dtype="bfloat16", max_model_len=setup.max_model_len, skip_tokenizer_init=True
    )
    scheduling = SchedulerConfig(
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.budget,
        max_model_len=setup.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=setup.asynchronous,
        policy=setup.policy,
        watermark=setup.watermark,
    )
    cache = CacheConfig(block_size=setup.block_size, enable_prefix_caching=setup.caching)
    config = VllmConfig(model_config=model_config, scheduler_config=scheduling, cache_config=cache)
    config.scheduler_config.async_scheduling = setup.asynchronous
    cache.num_gpu_blocks = setup.num_blocks
    heads: dict[str, Any] = {
        "block_size": setup.block_size,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**heads))]
    if setup.sliding:
        groups.append(KVCacheGroupSpec(["sliding"], SlidingWindowSpec(**heads, sliding_window=128)))
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block_size,
        log_stats=True,
    )
    if setup.v2_runner:
        scheduler.use_v2_model_runner = True
    return scheduler


def make_requests(specs: list[Spec], setup: Setup, seed: int = 0) -> list[Any]:
    """Engine requests for the specs; ids are their indices."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    rng = random.Random(seed)
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(setup.block_size, hash_function) if setup.caching else None
    prefixes: dict[int, list[int]] = {}
    made = []
    for index, spec in enumerate(specs):
        head: list[int] = []
        if spec.prefix >= 0:
            known = prefixes.setdefault(spec.prefix, [])
            while len(known) < spec.prefix_tokens:
                known.append(rng.randrange(2, 1000))
            head = known[: spec.prefix_tokens]
        tail = [2 + (index * 7919 + k * 104729) % 997 for k in range(spec.prompt - len(head))]
        extra = {"kvcatch_tenant": spec.tenant} if spec.tenant else None
        sampling = SamplingParams(max_tokens=spec.max_tokens, ignore_eos=False, extra_args=extra)
        sampling.update_from_generation_config({}, 1)
        made.append(
            Request(
                request_id=str(index),
                prompt_token_ids=head + tail,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=float(spec.arrival),
                priority=spec.priority,
                block_hasher=hasher,
            )
        )
    return made


class Run:
    """One workload on one scheduler; call ``go`` for all of it or ``step`` for a single step."""

    def __init__(
        self,
        cls: type,
        specs: list[Spec],
        setup: Setup,
        model: str,
        *,
        trace: bool = False,
        limit: int = 400_000,
        aborts: dict[int, int] | None = None,
    ) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self.specs, self.setup, self.limit, self.trace = specs, setup, limit, trace
        self.scheduler = build(cls, setup, model)
        self.requests = make_requests(specs, setup)
        self.now = 0
        pilot = getattr(self.scheduler, "_kvcatch", None)
        if pilot is not None:
            pilot.clock = lambda: self.now * STEP_SECONDS
        self.coming = deque(sorted(range(len(specs)), key=lambda i: specs[i].arrival))
        self.aborts = aborts or {}
        self.outcome = Outcome([None] * len(specs), [None] * len(specs), scheduler=self.scheduler)
        self.batches: deque[tuple[Any, dict[str, bool]]] = deque()
        self._output = ModelRunnerOutput
        parameters = inspect.signature(ModelRunnerOutput).parameters
        empty = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
        self._fields = {k: v for k, v in empty.items() if parameters[k].default is inspect.Parameter.empty}
        self._computed: dict[str, int] = {}

    def go(self) -> Outcome:
        """Until all requests have ended."""
        out = self.outcome
        while self.coming or self.batches or self.scheduler.has_requests():
            self.step()
            if self.now > self.limit:
                raise AssertionError(f"no end after {self.limit} steps")
        out.steps = self.now
        out.preemptions = sum(request.num_preemptions for request in self.requests)
        out.free_at_end = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        out.queue_at_end = len(self.scheduler.waiting) + len(self.scheduler.running)
        return out

    def step(self) -> None:
        """Arrivals, one ``schedule()``, and the answer to the oldest batch in flight."""
        while self.coming and self.specs[self.coming[0]].arrival <= self.now:
            self.scheduler.add_request(self.requests[self.coming.popleft()])
        for index in [i for i, at in self.aborts.items() if at == self.now]:
            self._abort(index)
        depth = 2 if self.setup.asynchronous else 1
        if self.scheduler.has_requests():
            started = time.perf_counter()
            output = self.scheduler.schedule()
            self.outcome.schedule_seconds += time.perf_counter() - started
            self._see(output)
            self.batches.append((output, self._samples(output)))
            if len(self.batches) < depth and (
                output.total_num_scheduled_tokens or self.scheduler.has_requests()
            ):
                self.now += 1
                return
        elif not self.batches:
            self.now = max(self.now + 1, self.specs[self.coming[0]].arrival if self.coming else 0)
            return
        self._answer()
        self.now += 1

    def _abort(self, index: int) -> None:
        from vllm.v1.request import RequestStatus

        done = self.scheduler.finish_requests(str(index), RequestStatus.FINISHED_ABORTED)
        if done:
            self.outcome.end[index] = self.now
            self.outcome.finished.append(index)

    def _see(self, output: Any) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        usable = self.setup.num_blocks - 1
        for data in output.scheduled_new_reqs:
            self.outcome.hit_tokens.setdefault(int(data.req_id), data.num_computed_tokens)
        self.outcome.peak_used = max(self.outcome.peak_used, 1 - pool.get_num_free_blocks() / usable)
        for request_id, count in output.num_scheduled_tokens.items():
            end = self.scheduler.requests[request_id].num_computed_tokens
            mark = self._computed.get(request_id, 0)
            self.outcome.recomputed += max(0, min(end, mark) - (end - count))
            self._computed[request_id] = max(mark, end)
        if self.trace:
            self.outcome.trace.append(
                (self.now, tuple(output.num_scheduled_tokens.items()), pool.get_num_free_blocks())
            )
        self.outcome.decisions += getattr(self.scheduler, "kvcatch_decisions", ())

    def _samples(self, output: Any) -> dict[str, bool]:
        table = self.scheduler.requests
        return {
            i: table[i].num_computed_tokens >= table[i].num_tokens + table[i].num_output_placeholders
            or table[i].num_computed_tokens >= table[i].num_tokens
            for i in output.num_scheduled_tokens
        }

    def _answer(self) -> None:
        output, samples = self.batches.popleft()
        ids = list(output.num_scheduled_tokens)
        tokens = []
        for request_id in ids:
            if not samples[request_id]:
                tokens.append([])
                continue
            request = self.requests[int(request_id)]
            last = request.num_output_tokens + 1 >= self.specs[int(request_id)].output
            tokens.append([1 if last and request.max_tokens > request.num_output_tokens + 1 else 7])
        answer = self._output(
            req_ids=ids,
            req_id_to_index={request_id: k for k, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            **self._fields,
        )
        outputs = self.scheduler.update_from_output(output, answer)
        for request_id in ids:
            index = int(request_id)
            if self.outcome.ttft[index] is None and self.requests[index].num_output_tokens:
                self.outcome.ttft[index] = self.now - self.specs[index].arrival
        for batch in outputs.values():
            for item in batch.outputs:
                if item.finish_reason is not None:
                    index = int(item.request_id)
                    self.outcome.end[index] = self.now
                    self.outcome.finished.append(index)
                    if str(item.finish_reason) == "error":
                        self.outcome.errors.append(index)


def workload(seed: int, count: int, load: float, loose: int = 1, setup: Setup | None = None) -> list[Spec]:
    """Poisson arrivals at ``load`` times the pool's own rate, 19 % long prompts.

    The rate comes from mu = M / (b * E[g]) (arXiv 2605.04595): capacity in block-steps over the block-steps
    that one request occupies on average.
    """
    setup = setup or Setup()
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        long = rng.random() < 0.19
        prompt = rng.randint(800, 1200) if long else rng.randint(20, 120)
        output = rng.randint(10, 80)
        drawn.append((long, prompt, output))
    usable = setup.num_blocks - 1
    spent = 0.0
    for _, prompt, output in drawn:
        prefill = -(-prompt // setup.budget)
        blocks = -(-(prompt + output // 2) // setup.block_size)
        spent += blocks * (prefill + output)
    gap = spent / count / usable / load
    now = 0.0
    specs = []
    for long, prompt, output in drawn:
        now += rng.expovariate(1 / gap)
        specs.append(Spec(int(now), prompt, output, output * loose, long))
    return specs


def flood(seed: int, count: int, loose: int = 1) -> list[Spec]:
    """The adversary: shorts that keep the pool full, and one long request soon after the start."""
    rng = random.Random(seed)
    specs = [Spec(40, 1000, 40, 40 * loose, True)]
    now = 0.0
    for _ in range(count - 1):
        now += rng.expovariate(1 / 2.6)
        output = rng.randint(30, 80)
        specs.append(Spec(int(now), rng.randint(40, 120), output, output * loose))
    return specs


def naive_class(base: type) -> type:
    """Skip-ahead without a reservation: whoever fits goes first (what several open proposals do)."""
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    class Queue(FCFSRequestQueue):  # type: ignore[misc]
        scheduler: Any = None
        chosen: Any = None

        def peek_request(self) -> Any:
            self.chosen = self._choose()
            return self.chosen

        def _choose(self) -> Any:
            free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            size = self.scheduler.block_size
            for request in self:
                if -(-request.num_tokens // size) <= free:
                    return request
            return self[0]

        def pop_request(self) -> Any:
            self.remove(self.chosen)
            return self.chosen

    class Naive(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.waiting = Queue()
            self.waiting.scheduler = self

    return Naive


def p95(values: list[int | None]) -> float:
    """The 95th percentile of the values that exist, by nearest rank."""
    known = sorted(value for value in values if value is not None)
    return float(known[min(len(known) - 1, int(0.95 * len(known)))]) if known else float("nan")


def ttft_p95(outcome: Outcome, specs: list[Spec], long: bool) -> float:
    """TTFT p95 in steps of the long or the short requests."""
    return p95([outcome.ttft[i] for i, spec in enumerate(specs) if spec.long == long])

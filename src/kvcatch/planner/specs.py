"""The nouns of planning: the shape of a model, the flags of an engine, the memory of a card, the answer.

Every struct is frozen and JSON-able. Sizes are bytes, lengths are tokens, ``None`` means unknown.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcatch.results import Result

#: Layer kinds. ``ring`` = one small block a request, overwritten in place; ``mla`` also stands for latent caches with a sliding window (``window`` is set then).
FULL, SLIDING, CHUNKED, MLA, MAMBA, CROSS, RING, ENCODER, NONE = (
    "full",
    "sliding",
    "chunked",
    "mla",
    "mamba",
    "cross",
    "ring",
    "encoder",
    "none",
)


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One layer that may own KV cache, before tensor parallelism and quantisation.

    ``latent_dim`` = kv_lora_rank + rope dim of MLA. ``params`` = the numbers a recurrent state is made of
    (see ``states.py``). ``shares_kv`` layers own nothing. ``role`` = attention | indexer | compressor: side caches
    of one decoder layer are layers of their own, as in vLLM.
    """

    kind: str
    index: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int = 0
    window: int | None = None
    latent_dim: int = 0
    params: dict[str, int] = {}
    mamba_type: str = ""
    shares_kv: bool = False
    draft: bool = False
    role: str = "attention"
    tokens_per_state: int = 1


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its config describes it, with nested text configs resolved.

    ``layers`` decides the KV cache; the other numbers decide weights and activations. ``text`` and ``config``
    keep the raw (text and whole) configuration for readers that need more; ``assumed`` lists every value that
    the file did not state and where the assumption comes from.
    """

    name: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerShape, ...]
    vocab_size: int | None = None
    intermediate_size: int | None = None
    dtype: str = "bfloat16"
    max_position_embeddings: int | None = None  # the length the config states, before rope scaling
    tie_word_embeddings: bool = False
    # mixture of experts
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int | None = None
    num_shared_experts: int = 0
    shared_expert_intermediate_size: int | None = None
    moe_layers: tuple[int, ...] = ()
    # multi-head latent attention
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    # the rest
    num_draft_layers: int = 0
    encoder_layers: int = 0
    max_source_positions: int | None = None
    multimodal: bool = False
    quantization: dict[str, Any] | None = None
    text: dict[str, Any] = {}
    config: dict[str, Any] = {}
    assumed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's own flags, by their own names, plus what the user states about memory.

    None = not given: the default of ``engine_version`` applies.
    """

    engine_version: str = "0.32.0"
    device: str = "cuda"  # cuda | cpu
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    block_size: int | None = None
    max_model_len: int | None = None  # -1 = auto, the largest that fits
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    disable_hybrid_kv_cache_manager: bool = False
    mamba_cache_mode: str | None = None
    mamba_block_size: int | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    attention_backend: str | None = None
    speculative_method: str | None = None
    num_speculative_tokens: int = 0
    speculative_model: str | None = None
    cpu_offload_gb: float = 0.0
    swap_space_bytes: int | None = None
    max_logprobs: int | None = None
    pp_layer_partition: tuple[int, ...] | None = None  # VLLM_PP_LAYER_PARTITION
    language_model_only: bool = False
    # what the user knows better than any model of ours
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    available_kv_bytes: int | None = None
    available_kv_stages: tuple[int, ...] = ()
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    cuda_graphs_bytes: int | None = None
    non_torch_bytes: int | None = None


class MemoryPart(Result, frozen=True):
    """One part of a card's memory. ``evidence`` = given | exact | derived | estimated; ``band`` = ± bytes."""

    bytes: int | None = None
    evidence: str = "estimated"
    band: int | None = None
    note: str = ""


class MemoryPlan(Result, frozen=True):
    """Where the memory of the binding card goes. ``available_kv`` = budget - all the other parts."""

    total: MemoryPart = MemoryPart()
    budget: MemoryPart = MemoryPart()
    weights: MemoryPart = MemoryPart()
    activation_peak: MemoryPart = MemoryPart()
    cuda_graphs: MemoryPart = MemoryPart()
    non_torch: MemoryPart = MemoryPart()
    available_kv: MemoryPart = MemoryPart()
    binding_rank: str = ""
    available_kv_per_stage: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


class KVGroupLayout(Result, frozen=True):
    """One KV cache group on one pipeline stage, as vLLM forms it.

    ``page_bytes`` = bytes of one block of one layer, or of all layers together where they differ; ``padding_layers`` = layer slots the group leaves empty;
    ``blocks_per_request`` = blocks one request of max_model_len holds in this group.
    """

    kind: str
    layers: int
    block_size: int
    page_bytes: int
    padding_layers: int = 0
    blocks_per_request: int | None = None
    window_tokens: int | None = None
    padded_from_bytes: int | None = None
    layer_indices: tuple[int, ...] = ()


class Advice(Result, frozen=True):
    """One change and what it would give."""

    change: str
    flag: str = ""
    starts: bool | None = None
    peak_fits: bool | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    peak_kv_bytes: int | None = None
    shortfall_bytes: int | None = None
    note: str = ""


class Plan(Result, frozen=True):
    """The answer of ``kvcatch plan``. Sizes per GPU unless the name says otherwise."""

    schema_version: int = 1
    kvcatch_version: str = ""
    model: str = ""
    architecture: str = ""
    engine: str = "vllm"
    engine_version: str = ""
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    bytes_per_token_per_gpu: int | None = None
    bytes_per_token_in_window: int | None = None
    fixed_bytes_per_request: int | None = None
    block_size: int | None = None
    block_bytes: int | None = None
    num_blocks: int | None = None
    usable_blocks: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    blocks_per_max_len_request: int | None = None
    bytes_per_max_len_request: int | None = None
    min_reusable_prefix_tokens: int | None = None
    groups: tuple[KVGroupLayout, ...] = ()
    stage_blocks: tuple[int, ...] = ()
    stage_layers: tuple[int, ...] = ()
    binding_stage: int | None = None
    memory: MemoryPlan = MemoryPlan()
    max_model_len_that_fits: int | None = None
    starts: bool | None = None
    peak_fits: bool | None = None
    peak_concurrency: int | None = None
    peak_context: int | None = None
    peak_kv_bytes: int | None = None
    shortfall_bytes: int | None = None
    margin_bytes: int | None = None
    max_concurrency_that_fits: int | None = None
    max_context_that_fits: int | None = None
    expected_lengths: dict[str, Any] | None = None
    kv_dtype_support: dict[str, Any] | None = None
    log_lines: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    assumed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

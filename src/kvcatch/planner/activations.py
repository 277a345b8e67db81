"""The activation peak of vLLM's profile run, from the tensors that are alive at its two candidate moments.

``profile_run`` pushes ``max_num_batched_tokens`` dummy tokens through the model, then samples for
``max_num_seqs`` dummy requests (``vllm/v1/worker/gpu_model_runner.py``). Either the widest layer or the sampler
sets the peak. Fitted constants: see ``Constants``; ``bench/plan_memory.py`` fits them anew without one model.
"""

from __future__ import annotations

from math import ceil

import msgspec

from kvcatch.planner.engine import Limits, parse_version
from kvcatch.planner.quant import scheme_of
from kvcatch.planner.specs import MLA, EngineFlags, ModelShape
from kvcatch.planner.tensors import Ranks, is_sparse, layer_matrices, own_layers
from kvcatch.planner.vision import tower_of
from kvcatch.units import GIB, MIB

#: Experts see at most this many tokens at once (VLLM_FUSED_MOE_CHUNK_SIZE).
_EXPERT_CHUNK = 16 * 1024
#: Longest context that an MLA prefill up-projects at once (determine_chunked_prefill_workspace_size).
_MLA_CONTEXT = 64 * 1024


class Constants(msgspec.Struct, frozen=True):
    """What no shape tells, fitted on the 32 boot logs of vLLM 0.19 in ``tests/data/plan_boot``.

    ``workspace_bytes``: the cuBLAS workspace (32 MiB on Hopper) and the runner's own input buffers.
    ``hidden_copies``: hidden-size tensors alive beside a feed-forward (residuals in and out, attention output, ...).
    ``non_torch_*``: CUDA modules of one process, and NCCL with its buffers for a tensor-parallel group.
    ``graph_*``: the engine's estimate of its CUDA graph pool: by layer, more for experts and for latent attention.
    """

    workspace_bytes: float = 42 * MIB
    hidden_copies: float = 3.6
    non_torch_single: float = 0.25 * GIB
    non_torch_group: float = 1.78 * GIB
    non_torch_rank: float = 0.03 * GIB
    graph_base: float = 0.17 * GIB
    graph_layer: float = 0.018 * GIB
    graph_experts: float = 0.16 * GIB
    graph_latent: float = 0.39 * GIB


FITTED = Constants()


class Activations(msgspec.Struct, frozen=True):
    """Peak bytes of one stage, what sets it (``sampler`` or ``layers``), and the bytes of each candidate."""

    bytes: int
    limit: str
    sampler: int
    layers: int


def activation_peak(
    shape: ModelShape,
    flags: EngineFlags,
    limits: Limits,
    *,
    indices: range,
    first: bool,
    last: bool,
    sms: int,
    constants: Constants = FITTED,
) -> Activations:
    """The profiled peak of one rank of the stage with layers ``indices`` on a GPU of ``sms`` multiprocessors."""
    tokens, hidden = limits.max_num_batched_tokens, shape.hidden_size or 0
    stream = tokens * hidden * 2
    experts = expert_workspace(shape, flags, tokens, indices)
    lasting = parse_version(flags.engine_version) >= (0, 13)
    kept = constants.workspace_bytes + (experts if lasting else 0)
    if first and shape.multimodal and not flags.language_model_only:
        kept += _image_batch(shape, tokens)
    widest = _widest_layer(shape, flags, limits, indices)
    layers = kept + (widest if lasting else max(widest, experts)) + constants.hidden_copies * stream
    sampler = 0.0
    if last and shape.vocab_size:
        seqs = min(limits.max_num_seqs, tokens)
        sampler = kept + stream + seqs * hidden * 2 + _sampler_bytes(shape, flags, seqs, sms)
    return Activations(
        int(max(layers, sampler)), "sampler" if sampler > layers else "layers", int(sampler), int(layers)
    )


def _sampler_bytes(shape: ModelShape, flags: EngineFlags, seqs: int, sms: int) -> int:
    """What profiling the sampler with ``seqs`` requests holds at its peak.

    Up to 0.12 logits were sorted: 38 bytes a logit with the sort's double buffers, read off the 7.38 GiB of
    gpt-oss-120b on 0.11 (case A76) and the 1.26 GiB of Llama-3-8B on 0.6.5 (case A22). Then: 16-bit and fp32 logits,
    softmax and exponential noise, 14 bytes, and one fp32 row per running program of the Triton top-k kernel. The
    second model runner (default on GPUs since 0.31) keeps 4 bytes and a bit per request and token for penalties
    (``PenaltiesState``); it profiles plain logits only until 0.33 runs the fp32 pipeline too (``_dummy_sampler_run``).
    """
    version, vocab = parse_version(flags.engine_version), shape.vocab_size or 0
    logits = seqs * ceil(vocab / 64) * 64
    if version < (0, 16):
        return logits * 38
    if version < (0, 31):
        return logits * 14 + min(sms, seqs) * vocab * 4
    penalties = seqs * (4 * vocab + 4 * ceil(vocab / 32))
    return logits * (14 if version >= (0, 33) else 2) + penalties


def expert_workspace(shape: ModelShape, flags: EngineFlags, tokens: int, indices: range) -> int:
    """Both scratch tensors of the fused experts (``workspace_shapes``), kept by the workspace manager since 0.13."""
    if not any(is_sparse(shape, index) for index in indices):
        return 0
    latent = shape.text.get("moe_latent_size")
    hidden = latent if isinstance(latent, int) else shape.hidden_size or 0
    split = 1 if flags.enable_expert_parallel else flags.tensor_parallel_size * flags.data_parallel_size
    width = ceil((shape.moe_intermediate_size or shape.intermediate_size or 0) / split)
    chunk = min(tokens * flags.data_parallel_size, _EXPERT_CHUNK)
    rows = chunk * max(1, shape.experts_per_token)
    if scheme_of(shape.quantization, flags.quantization).kind == "mxfp4":
        return (rows * width + chunk * hidden) * 2  # the Triton kernels allocate the rest inside, and free it
    return rows * (max(width, hidden) + max(2 * width, hidden)) * 2


def _image_batch(shape: ModelShape, tokens: int) -> int:
    """Encoder outputs and pixels of one batch of images that fills the encoder budget, in 16 bits."""
    tower = tower_of(shape)
    if tower is None:
        return 0
    return tokens * (shape.hidden_size or 0) * 2 + tokens * tower.pixels_per_token * 3 * 2


def _widest_layer(shape: ModelShape, flags: EngineFlags, limits: Limits, indices: range) -> int:
    """Intermediate tensors of the widest mixer or feed-forward: what goes in and what comes out of its middle."""
    mixers, tokens = own_layers(shape), limits.max_num_batched_tokens
    ranks = Ranks(flags.tensor_parallel_size, flags.tensor_parallel_size)
    dynamic = scheme_of(shape.quantization, flags.quantization).dynamic_input
    widest = 0
    for index in {index: None for index in indices if _representative(shape, index, indices)}:
        own = mixers.get(index, [])
        by_name: dict[str, list[tuple[int, int]]] = {}
        for matrix in layer_matrices(shape, own, index, ranks):
            by_name.setdefault(matrix.name, []).append((matrix.rows, matrix.cols))
        for name in ("mlp", "shared_expert", "self_attn", "mixer", "linear_attn"):
            if pair := by_name.get(name):
                inner, outer = pair[0][0], pair[-1][1]
                # An activation quantised at run time is one byte more per element of the middle.
                size = tokens * ((inner + outer) * 2 + (outer if dynamic and name == "mlp" else 0))
                widest = max(widest, size)
        if any(layer.kind == MLA for layer in own):
            widest = max(widest, _mla_prefill(shape, flags, limits))
    return widest


def _mla_prefill(shape: ModelShape, flags: EngineFlags, limits: Limits) -> int:
    """Up-projected keys and values of a cached context, as the profile run reserves them, and of the tokens."""
    heads = ceil(shape.num_heads / flags.tensor_parallel_size)
    nope, value = shape.qk_nope_head_dim or 128, shape.v_head_dim or shape.qk_nope_head_dim or 128
    rope, block = shape.qk_rope_head_dim or 0, flags.block_size or 64
    context = min(max(8 * limits.max_model_len, 4 * limits.max_num_seqs * block), _MLA_CONTEXT)
    rows = limits.max_num_batched_tokens * heads * (2 * (nope + rope) + nope + 2 * value)
    return context * heads * (nope + value) * 2 + rows * 2


def _representative(shape: ModelShape, index: int, indices: range) -> bool:
    """Layers repeat: look at the first two, the last, and where experts begin."""
    start = shape.moe_layers[0] if shape.moe_layers else indices.start
    return (
        index in (indices.start, indices.start + 1, indices.stop - 1, start) or "block_configs" in shape.text
    )

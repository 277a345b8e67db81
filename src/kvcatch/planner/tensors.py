"""The weight matrices one tensor-parallel rank holds, layer by layer, from the shape of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any, NamedTuple

from kvcatch.planner.mixers import Matrix, mixer_matrices, positive
from kvcatch.planner.specs import CROSS, ENCODER, FULL, LayerShape, ModelShape

#: Model types whose feed-forward is two matrices, not a gated three.
_TWO_MATRIX_MLP = frozenset(
    (
        *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_j", "codegen", "gpt_bigcode", "bloom", "opt", "mpt"),
        *("falcon", "falcon_mamba", "phi", "phi-msft", "persimmon", "starcoder2", "nemotron", "nemotron_h"),
        *("apertus", "arcee"),
        *("whisper", "bart", "t5", "rwkv"),
    )
)


class Ranks(NamedTuple):
    """How many ways matrices are cut: ``tp`` dense ones, ``expert_tp`` experts, ``ep`` the set of experts."""

    tp: int = 1
    expert_tp: int = 1
    ep: int = 1


def layer_matrices(
    shape: ModelShape, mixers: Sequence[LayerShape], index: int, ranks: Ranks
) -> Iterator[Matrix]:
    """Everything layer ``index`` holds on one rank; ``mixers`` are its token mixers, usually one."""
    hidden = shape.hidden_size or 0
    mixer_only, mlp_only = _single_part(shape, index)
    shared = _shares_block(shape, index)
    for layer in () if mlp_only else mixers:
        if not (shared and layer.kind == FULL):
            yield from mixer_matrices(shape, layer, ranks.tp)
    if shape.model_type.startswith("longcat"):
        yield from _second_block(shape, mixers, ranks.tp)
    if not mixer_only and not shared:
        yield from _feed_forward(shape, index, ranks)
    if per_layer := positive(shape.text, "hidden_size_per_layer_input"):
        yield Matrix("per_layer", per_layer, hidden, 3)
    yield Matrix(
        "norm",
        1,
        hidden * (4 if shape.model_type.startswith(("gemma2", "gemma3", "gemma4")) else 2),
        quantisable=False,
    )


def _shares_block(shape: ModelShape, index: int) -> bool:
    """Zamba: a few attention blocks with their feed-forward serve many layers; the rest of a layer is recurrent."""
    if not shape.model_type.startswith("zamba"):
        return False
    blocks = sorted(layer.index for layer in shape.layers if layer.kind == FULL)
    return index not in blocks[: positive(shape.text, "num_mem_blocks") or 1]


def _second_block(shape: ModelShape, mixers: Sequence[LayerShape], tp: int) -> Iterator[Matrix]:
    """LongCat: each layer is two attentions and two dense feed-forwards around one set of experts."""
    hidden, width = shape.hidden_size or 0, ceil((positive(shape.text, "ffn_hidden_size") or 0) / tp)
    for layer in mixers[:1] if len(mixers) == 1 else ():
        yield from mixer_matrices(shape, layer, tp)
    yield Matrix("mlp", 2 * width, hidden, 2)
    yield Matrix("mlp", hidden, width, 2)


def encoder_matrices(shape: ModelShape, tp: int) -> Iterator[Matrix]:
    """The encoder of an encoder-decoder model and the cross attention of its decoder."""
    if not shape.encoder_layers or not shape.hidden_size:
        return
    hidden, inter = (
        shape.hidden_size,
        positive(shape.text, "encoder_ffn_dim", "d_ff") or 4 * shape.hidden_size,
    )
    yield Matrix("encoder", ceil(4 * hidden / tp), hidden, shape.encoder_layers)
    yield Matrix("encoder", ceil(2 * inter / tp), hidden, shape.encoder_layers)
    crossed = sum(1 for layer in shape.layers if layer.kind == CROSS)
    yield Matrix("encoder_attn", ceil(4 * hidden / tp), hidden, crossed)


def own_layers(shape: ModelShape) -> dict[int, list[LayerShape]]:
    """Layer index → its own token mixers; cross attention, encoder and draft layers left out."""
    found: dict[int, list[LayerShape]] = {}
    for layer in shape.layers:
        if layer.draft or layer.role not in ("attention", "window") or layer.kind in (CROSS, ENCODER):
            continue
        found.setdefault(layer.index, []).append(layer)
    return found


def feed_forward_width(shape: ModelShape, index: int) -> int:
    """Intermediate size of the dense feed-forward in layer ``index``, all ranks together."""
    blocks = shape.text.get("block_configs")
    if isinstance(blocks, list) and index < len(blocks):
        width = _nas_width(blocks[index], shape.hidden_size or 0)
        if width is not None:
            return width
    wide = positive(shape.text, "intermediate_size_mlp") if shape.num_experts else None
    if shape.model_type.startswith("lfm2") and shape.text.get("block_auto_adjust_ff_dim", True):
        factor = shape.text.get("block_ffn_dim_multiplier") or 1.0
        adjusted = int(factor * int(2 * (shape.intermediate_size or 0) / 3))
        multiple = positive(shape.text, "block_multiple_of") or 256
        return ceil(adjusted / multiple) * multiple
    if shape.model_type == "qwen":
        return (shape.intermediate_size or 0) // 2  # the first Qwen counts gate and up together
    sizes = shape.text.get("intermediate_size")
    if isinstance(sizes, list):
        return int(sizes[min(index, len(sizes) - 1)])
    return wide or shape.intermediate_size or 4 * (shape.hidden_size or 0)


def is_sparse(shape: ModelShape, index: int) -> bool:
    """Whether layer ``index`` has routed experts."""
    pattern = shape.text.get("hybrid_override_pattern") or shape.text.get("layers_block_type")
    if shape.model_type == "nemotron_h" and pattern and index < len(pattern):
        return str(pattern[index]) in ("E", "moe")
    kinds = shape.text.get("mlp_layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return bool(kinds[index] != "dense")
    if shape.text.get("is_moe") is False:
        return False
    return shape.num_experts > 0 and (index in shape.moe_layers or not shape.moe_layers)


def is_gated(shape: ModelShape) -> bool:
    """Whether the feed-forward is gate, up and down rather than in and out."""
    return shape.model_type not in _TWO_MATRIX_MLP


def _feed_forward(shape: ModelShape, index: int, ranks: Ranks) -> Iterator[Matrix]:
    hidden = shape.hidden_size or 0
    up = 2 if is_gated(shape) else 1
    sparse = is_sparse(shape, index)
    # Gemma 4 runs a dense feed-forward beside its experts.
    if not sparse or shape.model_type.startswith("gemma4"):
        width = ceil(feed_forward_width(shape, index) / ranks.tp)
        bias = bool(shape.text.get("mlp_bias")) or not is_gated(shape)
        yield Matrix("mlp", up * width, hidden, bias=bias)
        yield Matrix("mlp", hidden, width, bias=bias)
    if not sparse:
        return
    width = ceil((shape.moe_intermediate_size or shape.intermediate_size or 0) / ranks.expert_tp)
    experts = ceil(shape.num_experts / ranks.ep)
    bias = shape.model_type.startswith("gpt_oss")
    inner = positive(shape.text, "moe_latent_size") or hidden
    yield Matrix("experts", up * width, inner, experts, bias=bias)
    yield Matrix("experts", inner, width, experts, bias=bias)
    if inner != hidden:
        yield Matrix("latent", 2 * inner, hidden)
    yield Matrix("router", shape.num_experts, hidden, quantisable=False)
    # Llama 4 runs one expert of the same width beside the routed ones and does not count it anywhere.
    own = shape.intermediate_size if shape.model_type.startswith("llama4") else None
    own = own or positive(shape.text, "shared_intermediate_size")
    shared = (
        shape.shared_expert_intermediate_size
        or own
        or (
            shape.num_shared_experts
            * (
                positive(shape.text, "moe_shared_expert_intermediate_size")
                or shape.moe_intermediate_size
                or 0
            )
        )
    )
    if shared:
        yield Matrix("shared_expert", up * ceil(shared / ranks.tp), hidden)
        yield Matrix("shared_expert", hidden, ceil(shared / ranks.tp))


def _single_part(shape: ModelShape, index: int) -> tuple[bool, bool]:
    """(mixer only, feed-forward only): Nemotron-H and Mamba layers hold one part each."""
    pattern = shape.text.get("hybrid_override_pattern") or shape.text.get("layers_block_type")
    if shape.model_type == "nemotron_h" and pattern and index < len(pattern):
        alone = str(pattern[index]) in ("-", "E", "mlp", "moe")
        return not alone, alone
    if shape.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return True, False
    return False, False


def _nas_width(block: Any, hidden: int) -> int | None:
    ffn = block.get("ffn") if isinstance(block, dict) else None
    if not isinstance(ffn, dict):
        return None
    if ffn.get("no_op"):
        return 0
    if isinstance(size := ffn.get("intermediate_size"), int):
        return size
    if isinstance(factor := ffn.get("ffn_mult"), (int, float)):
        return ceil(int(2 * factor * hidden / 3) / 256) * 256  # DeciLM's own rounding
    return hidden

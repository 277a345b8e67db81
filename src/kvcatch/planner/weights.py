"""Bytes of model weights on each pipeline stage, from parameter shapes and the checkpoint's quantisation.

Counts what vLLM's "Model loading took" line counts: parameters of the stage's layers, embedding and output
head, the scales of quantised matrices, rotary tables, and copies that kernels make after loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil

import msgspec

from kvcatch.planner.catalogue import find_model
from kvcatch.planner.checkpoint import TENSOR_BYTES
from kvcatch.planner.mixers import Matrix, positive
from kvcatch.planner.quant import DTYPE_BYTES, Scheme, scheme_of
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import EngineFlags, ModelShape
from kvcatch.planner.tensors import Ranks, encoder_matrices, layer_matrices, own_layers
from kvcatch.planner.vision import tower_of
from kvcatch.units import GIB, MIB

#: Modules whose share of a checkpoint the trimmed quantisation config may leave open, for the band.
_ATTENTION = ("self_attn", "linear_attn", "mixer", "indexer")
_TIED_BY_CLASS = (
    "gemma",
    "cohere",
    "gpt2",
    "bloom",
    "opt",
    "t5",
    "bart",
    "whisper",
    "gpt_bigcode",
    "mpt",
    "starcoder2",
    "minicpm",
)
#: Contraction sizes are padded to this by the Triton MXFP4 layout on compute capability 9: gpt-oss-120b loads
#: 64.38 GiB there (vllm issue 33155) where its checkpoint holds 60.8.
_MXFP4_HOPPER_ALIGN = 256


class StageWeights(msgspec.Struct, frozen=True):
    """Weights of one rank of one pipeline stage: bytes by part, and how far off they may be."""

    parts: dict[str, int]
    band: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All parts together, bytes."""
        return sum(self.parts.values())


class _Model(msgspec.Struct, frozen=True):
    """What all stages of one engine share."""

    shape: ModelShape
    flags: EngineFlags
    scheme: Scheme
    dtype: int
    ranks: Ranks
    capability: tuple[int, int] | None


def stage_weights(
    shape: ModelShape,
    flags: EngineFlags,
    stage_layers: Sequence[int],
    capability: tuple[int, int] | None = None,
) -> tuple[StageWeights, ...]:
    """Weights per stage; ``stage_layers`` = number of layers on each pipeline stage, in order."""
    dtype = DTYPE_BYTES.get(flags.dtype, 2 if shape.dtype == "float32" else DTYPE_BYTES.get(shape.dtype, 2))
    scheme = scheme_of(shape.quantization, flags.quantization, _expert_kind(shape))
    model = _Model(shape, flags, scheme, dtype, _ranks(shape, flags), capability)
    stages, start = [], 0
    for number, count in enumerate(stage_layers):
        first, last = number == 0, number == len(stage_layers) - 1
        stages.append(_stage(model, range(start, start + count), first=first, last=last))
        start += count
    stages[-1] = _with_draft(model, stages[-1])
    return _against_checkpoint(model, tuple(stages))


def _with_draft(model: _Model, last: StageWeights) -> StageWeights:
    """The last stage with a draft model of its own, which speculative decoding loads there."""
    name = model.flags.speculative_model
    if not name or "mtp" in (model.flags.speculative_method or ""):
        return last
    config = find_model(name)
    if config is None:
        note = f"draft model {name} not counted: it is not in the catalogue"
        return StageWeights(last.parts, last.band + 2 * GIB, (*last.notes, note))
    shape = model_shape(name, config)
    flags = EngineFlags(tensor_parallel_size=model.flags.tensor_parallel_size)
    draft = stage_weights(shape, flags, [shape.num_layers], model.capability)[0]
    return StageWeights({**last.parts, "draft": draft.total}, last.band + draft.band, last.notes)


def _against_checkpoint(model: _Model, stages: tuple[StageWeights, ...]) -> tuple[StageWeights, ...]:
    """The stages held against the bytes of the checkpoint's own tensors, where the folder tells them.

    Shapes that explain the checkpoint to 2 % stay as they are; else every part is scaled to it.
    """
    total = model.shape.config.get(TENSOR_BYTES)
    plain = model.flags.quantization is None and model.flags.dtype in ("auto", model.shape.dtype)
    if not isinstance(total, int) or not plain:
        return stages
    alone = msgspec.structs.replace(model, ranks=Ranks(), flags=EngineFlags())
    whole = _stage(alone, range(model.shape.num_layers), first=True, last=True)
    derived = whole.total - sum(whole.parts.get(name, 0) for name in ("rotary", "absorbed"))
    if derived <= 0:
        return stages
    ratio = total / derived
    # Draft layers lie in the checkpoint and are loaded only for speculative decoding.
    unloaded = model.shape.num_draft_layers / max(1, model.shape.num_layers)
    if 0.98 <= ratio <= 1.02 * (1 + unloaded):
        note = "agrees with the checkpoint's index"
        return tuple(
            StageWeights(s.parts, min(s.band, int(s.total * 0.01)), (*s.notes, note)) for s in stages
        )
    note = f"scaled to the checkpoint's index ({total / GIB:.2f} GiB; shapes alone give {derived / GIB:.2f})"
    return tuple(
        StageWeights(
            {name: int(size * ratio) for name, size in s.parts.items()}, int(s.total * ratio * 0.05), (note,)
        )
        for s in stages
    )


def allocated(size: int) -> int:
    """Bytes that one tensor of ``size`` bytes takes from torch's caching allocator.

    From 10 MiB on a segment is a multiple of 2 MiB, and a rest of at most 1 MiB is not split off
    (``round_size``, ``get_allocation_size`` and ``should_split`` of CUDACachingAllocator).
    """
    size = ceil(size / 512) * 512
    if size < 10 * MIB:
        return size
    rest = -size % (2 * MIB)
    return size + rest if rest <= MIB else size


def tied(shape: ModelShape) -> bool:
    """Whether the output head is the embedding itself (the class default where the file is silent)."""
    for source in (shape.text, shape.config):
        if isinstance(value := source.get("tie_word_embeddings"), bool):
            return value
    return shape.tie_word_embeddings or shape.model_type.startswith(_TIED_BY_CLASS)


def padded_vocab(shape: ModelShape, tp: int) -> int:
    """Vocabulary rows one rank holds: padded to 64 as VocabParallelEmbedding does, then split."""
    return ceil(ceil((shape.vocab_size or 0) / 64) * 64 / tp)


def _ranks(shape: ModelShape, flags: EngineFlags) -> Ranks:
    tp = flags.tensor_parallel_size
    # Experts are spread over every data-parallel rank too (FusedMoEParallelConfig.make).
    wide = tp * flags.data_parallel_size
    if flags.enable_expert_parallel:
        return Ranks(tp, 1, min(wide, max(1, shape.num_experts)))
    return Ranks(tp, wide, 1)


def _stage(model: _Model, indices: range, *, first: bool, last: bool) -> StageWeights:
    shape, ranks, hidden = model.shape, model.ranks, model.shape.hidden_size or 0
    parts: dict[str, int] = {}
    open_bytes = 0
    for matrix, index in _matrices(model, indices, first=first, last=last):
        stored = _scheme_for(matrix, index, model.scheme)
        size = _matrix_bytes(matrix, stored, model)
        # All experts of a layer live in one tensor, everything else in one tensor each.
        size = (
            allocated(size * matrix.copies) if matrix.name == "experts" else allocated(size) * matrix.copies
        )
        if model.scheme.skipped is None and stored.kind != "none" and matrix.name in _ATTENTION:
            open_bytes += matrix.copies * matrix.rows * matrix.cols * model.dtype - size
        part = "attention" if matrix.name in _ATTENTION else matrix.name
        parts[part] = parts.get(part, 0) + size
    vocab = padded_vocab(shape, ranks.tp) * hidden * model.dtype
    if first or (last and tied(shape)):
        parts["embedding"] = vocab + _extra_tables(shape, model.dtype)
    if last and not tied(shape):
        parts["lm_head"] = vocab
    parts["rotary"] = _rotary_bytes(shape, model.dtype)
    band = _band(sum(parts.values()), model.scheme) + open_bytes
    notes = ["the config does not list which layers stay unquantised"] if open_bytes else []
    if isinstance(blocks := shape.text.get("block_configs"), list) and "ffn" not in str(blocks[:1]):
        band += parts.get("mlp", 0) // 2
        notes.append("block_configs does not state the feed-forward widths")
    if shape.multimodal and first and not model.flags.language_model_only:
        size, off, note = _vision(model)
        parts["vision"] = size
        band += off
        notes.append(note)
    return StageWeights(parts, band, tuple(notes))


def _matrices(model: _Model, indices: range, *, first: bool, last: bool) -> Iterator[tuple[Matrix, int]]:
    """Every matrix of the stage with its layer index, -1 outside the layer stack."""
    shape, mixers = model.shape, own_layers(model.shape)
    for index in indices:
        for matrix in layer_matrices(shape, mixers.get(index, []), index, model.ranks):
            yield matrix, index
    if first:
        for matrix in encoder_matrices(shape, model.ranks.tp):
            yield matrix, -1
    if last and "mtp" in (model.flags.speculative_method or ""):
        hidden = shape.hidden_size or 0
        for layer in [layer for layer in shape.layers if layer.draft and layer.role == "attention"]:
            for matrix in layer_matrices(shape, [layer], shape.num_layers - 1, model.ranks):
                yield matrix, -1
            yield Matrix("eh_proj", hidden, 2 * hidden, quantisable=False), -1


def _vision(model: _Model) -> tuple[int, int, str]:
    """(bytes, band, note) of the image tower."""
    tower = tower_of(model.shape)
    if tower is None:
        return 0, 2 * GIB, "image or audio tower not counted: the config does not describe it"
    size = model.dtype * (ceil(tower.split_parameters / model.ranks.tp) + tower.whole_parameters)
    if tower.assumed:
        return size, size, "image tower from class defaults"
    return size, size // 20, "image tower from vision_config"


def _band(total: int, scheme: Scheme) -> int:
    """Half a percent for plain checkpoints (the published 0.19 logs stay below it), three for packed ones."""
    share = {"none": 0.005, "fp8_channel": 0.01, "fp8_block": 0.01, "int8": 0.01}.get(scheme.kind, 0.03)
    return int(total * share)


def _scheme_for(matrix: Matrix, index: int, scheme: Scheme) -> Scheme:
    plain = not matrix.quantisable or (scheme.only_experts and matrix.name != "experts")
    whole_layer = any(entry.rstrip("*.").endswith(f"layers.{index}") for entry in scheme.skipped or ())
    if plain or whole_layer or scheme.skips(matrix.name):
        return Scheme()
    if scheme.experts and matrix.name == "experts":
        return msgspec.structs.replace(scheme, kind=scheme.experts)
    return scheme


def _expert_kind(shape: ModelShape) -> str:
    """DeepSeek V4 keeps its experts in 4 bits unless the config says otherwise (``expert_dtype``)."""
    four_bits = shape.model_type.startswith("deepseek_v4") and shape.text.get("expert_dtype", "fp4") == "fp4"
    return "mxfp4" if four_bits else ""


def _matrix_bytes(matrix: Matrix, scheme: Scheme, model: _Model) -> int:
    rows, cols = matrix.rows, matrix.cols
    size = scheme.matrix_bytes(rows, cols, model.dtype) + (rows * model.dtype if matrix.bias else 0)
    if scheme.kind == "mxfp4" and model.capability is not None and model.capability[0] == 9:
        size += rows * (ceil(cols / _MXFP4_HOPPER_ALIGN) * _MXFP4_HOPPER_ALIGN - cols) // 2
    return size


def _extra_tables(shape: ModelShape, dtype: int) -> int:
    """Learned positions of the families without rotary embeddings, per-layer embeddings of Gemma 3n and 4."""
    rows = 0
    if shape.model_type in ("gpt2", "gpt_bigcode", "opt", "whisper", "bart", "gpt_neo"):
        rows = (shape.max_position_embeddings or 0) * (shape.hidden_size or 0)
    per_layer, vocab = (
        positive(shape.text, f"{name}_per_layer_input") for name in ("hidden_size", "vocab_size")
    )
    return (rows + (per_layer or 0) * (vocab or 0) * shape.num_layers) * dtype


def _rotary_bytes(shape: ModelShape, dtype: int) -> int:
    """Cosine and sine tables: as long as the scaled context, one more for layers with a base of their own.

    vLLM multiplies the stated length for linear and dynamic scaling, the original one for YaRN.
    """
    stated = shape.text.get("max_position_embeddings")
    plain = positions = stated if isinstance(stated, int) else shape.max_position_embeddings or 0
    scaling = shape.text.get("rope_scaling") or shape.text.get("rope_parameters")
    if isinstance(scaling, Mapping) and isinstance(factor := scaling.get("factor"), (int, float)):
        original = scaling.get("original_max_position_embeddings")
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind in ("linear", "dynamic"):
            positions = int(plain * factor)
        elif kind == "yarn" and isinstance(original, int):
            positions = int(original * factor)
    if shape.model_type.startswith("gemma3"):
        positions += plain
    width = shape.qk_rope_head_dim if shape.kv_lora_rank else shape.head_dim
    return positions * (width or 0) * dtype

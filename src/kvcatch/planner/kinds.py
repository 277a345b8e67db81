"""Which kind of cache each layer keeps, family by family.

The rules are those of the model classes of vLLM 0.32 (named beside each rule); families that vLLM does not run
are sized the same way from their configuration class and carry a warning.
"""

from __future__ import annotations

from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.planner import compressed, recurrent
from kvcatch.planner.configfile import Fields
from kvcatch.planner.specs import CHUNKED, CROSS, ENCODER, FULL, MAMBA, MLA, NONE, RING, SLIDING, LayerShape

Layers = tuple[LayerShape, ...]

#: What a ``layer_types`` entry (or its older spellings) means.
TYPE_KINDS = {
    "full_attention": FULL, "full": FULL, "attention": FULL, "global": FULL, "self_attention": FULL,
    "sparse": FULL, "compressed_attention": FULL,
    "sliding_attention": SLIDING, "sliding_window": SLIDING, "sliding_window_attention": SLIDING,
    "local": SLIDING, "local_attention": SLIDING,
    "chunked_attention": CHUNKED, "chunked_local_attention": CHUNKED,
    "indexed_attention": MLA, "mla": MLA, "mla_attention": MLA, "deepseek_sparse_attention": MLA,
    "linear_attention": MAMBA, "mamba": MAMBA, "mamba2": MAMBA, "conv": MAMBA, "recurrent": MAMBA, "kda": MAMBA,
    "gdn": MAMBA, "short_conv": MAMBA,
    "hybrid": "hybrid",
    "mlp": NONE, "moe": NONE, "dense": NONE,
}  # fmt: skip

#: Families whose layers alternate although the file may not say so: (every n-th layer is global, default n).
PATTERNS = {
    "gemma2": 2, "vaultgemma": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 6, "cohere2": 4, "exaone4": 4, "olmo3": 4,
    "gpt_oss": 2, "afmoe": 4,
}  # fmt: skip
#: Every attention layer of these uses ``sliding_window`` when it is set (``CacheConfig.sliding_window``).
NOT_MLA = {"minicpm3"}


def layer_shapes(
    fields: Fields, family: str, numbers: dict[str, int], root: Fields
) -> tuple[Layers, list[str]]:
    """All layers that may own cache, in engine order, and warnings. Raises KVCatchError naming a bad field."""
    from kvcatch.planner.shape import ENCODER_ONLY, STATE_ONLY

    warnings: list[str] = []
    count = numbers["layers"]
    if family in ENCODER_ONLY:
        return tuple(LayerShape(kind=ENCODER, index=index) for index in range(count)), warnings
    if family in STATE_ONLY:
        warnings.append(f"{family} keeps a recurrent state but no KV cache, and vLLM does not run it")
        return tuple(LayerShape(kind=NONE, index=index) for index in range(count)), warnings
    if compressed.applies(fields, family):
        return compressed.layers(fields, count), warnings
    if fields.get("block_configs") is not None:
        return _block_configs(fields, numbers), warnings
    kinds = _kinds(fields, family, count)
    attention = _attention(fields, family, numbers)
    built: list[LayerShape] = []
    shared_from = count - (fields.number("num_kv_shared_layers", least=0) or 0)
    per_layer_heads = fields.get("num_kv_heads", "num_key_value_heads_per_layer", "num_key_value_heads")
    if isinstance(per_layer_heads, list) and len(per_layer_heads) < count:
        raise fields.error(
            "num_key_value_heads", per_layer_heads, f"one entry for each of {count} layers is needed"
        )
    state = recurrent.state_of(fields, family, numbers) if MAMBA in kinds or "hybrid" in kinds else None
    for index, kind in enumerate(kinds):
        if kind not in (NONE, MAMBA):
            layer = attention[FULL if kind == "hybrid" else kind]
            if isinstance(per_layer_heads, list):
                layer = _with(layer, num_kv_heads=fields_entry(fields, per_layer_heads, index))
            built.append(_with(layer, index=index, shares_kv=index >= shared_from))
        if kind in (MAMBA, "hybrid"):
            assert state is not None
            built.append(LayerShape(kind=MAMBA, index=index, mamba_type=state[0], params=state[1]))
    if family == "zamba2":
        # Its attention blocks are shared and registered before all layers.
        built.sort(key=lambda layer: layer.kind == MAMBA)
    built = _expand(fields, family, numbers, built, root)
    if family in ("mpt", "gpt_neo", "codegen", "t5", "bart", "zamba", "recurrent_gemma"):
        warnings.append(f"vLLM 0.32 does not run {family}; sized from its configuration class")
    return tuple(built), warnings


def _with(layer: LayerShape, **changes: Any) -> LayerShape:
    import msgspec

    return msgspec.structs.replace(layer, **changes)


def fields_entry(fields: Fields, values: list[Any], index: int) -> int:
    """One per-layer integer of a list. Raises KVCatchError naming the entry."""
    value = values[index]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise fields.error(f"num_key_value_heads[{index}]", value, "an integer is expected")
    return value


def _kinds(fields: Fields, family: str, count: int) -> list[str]:
    """The kind of each decoder layer."""
    if family in ("mamba", "mamba2", "falcon_mamba"):
        return [MAMBA] * count
    if family == "falcon_h1":
        return ["hybrid"] * count
    found = recurrent.layer_kinds(fields, family, count)
    if found is not None:
        return found
    mla = fields.get("kv_lora_rank") is not None and family not in NOT_MLA
    sliding = _window(fields, family)
    stated = fields.raw.get("layer_types")
    if stated is None:
        stated = fields.raw.get("layers_block_type")
    if stated is not None:
        return _stated(fields, stated, count, mla, sliding)
    if mla:
        return [MLA] * count
    pattern = fields.raw.get("hybrid_layer_pattern")
    if pattern is not None:  # MiMo-V2: 1 = sliding
        return [SLIDING if value else FULL for value in fields.numbers("hybrid_layer_pattern", count) or []][
            :count
        ]
    if family == "gpt_neo":
        return _gpt_neo(fields, count)
    if family == "llama4":
        return _llama4(fields, count)
    if family in PATTERNS:
        every = fields.number(
            "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"
        )
        if every is None:
            every = PATTERNS[family]
            fields.assumed.append(f"every {every}. layer is global (default of the {family} family)")
        if sliding is None:
            return [FULL] * count
        # The last layer of Gemma 4 is global whatever the pattern says.
        kinds = [FULL if (index + 1) % every == 0 else SLIDING for index in range(count)]
        if family == "gemma4":
            kinds[-1] = FULL
        return kinds
    if family in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "dots1", "smollm3"):
        first = fields.number("max_window_layers", least=0)
        if sliding is None:
            return [FULL] * count
        first = count if first is None else first
        return [SLIDING if index >= first else FULL for index in range(count)]
    return [FULL if sliding is None else SLIDING] * count


def _stated(fields: Fields, stated: Any, count: int, mla: bool, sliding: int | None) -> list[str]:
    """Kinds from ``layer_types``. Raises KVCatchError for an unknown type."""
    name = "layer_types" if fields.raw.get("layer_types") is not None else "layers_block_type"
    if not isinstance(stated, list):
        raise fields.error(name, stated, "a list is expected")
    if len(stated) < count:
        raise KVCatchError(
            f"{fields.where}: field {name} has {len(stated)} entries for num_hidden_layers = {count}.",
            "Correct the one that is wrong.",
        )
    kinds: list[str] = []
    for index, entry in enumerate(stated[:count]):
        kind = TYPE_KINDS.get(entry) if isinstance(entry, str) else None
        if kind is None:
            raise fields.error(
                f"{name}[{index}]",
                entry,
                "an unknown attention type; known: " + ", ".join(sorted(TYPE_KINDS)),
            )
        if kind == FULL and mla:
            kind = MLA
        if kind == SLIDING and sliding is None:
            kind = FULL
        kinds.append(kind)
    return kinds


def _window(fields: Fields, family: str) -> int | None:
    """The sliding window in tokens, None when off (``use_sliding_window``: false, 0 or null)."""
    if fields.raw.get("use_sliding_window") is False or (
        "use_sliding_window" not in fields.raw and fields.defaults.get("use_sliding_window") is False
    ):
        return None
    window = fields.number(
        "sliding_window", "sliding_window_size", "window_size", "attention_window_size", least=0
    )
    return window or None


def _attention(fields: Fields, family: str, numbers: dict[str, int]) -> dict[str, LayerShape]:
    """The attention layer of each kind, without its index."""
    heads, head_dim = numbers["kv_heads"], numbers["head_dim"]
    if family == "minicpm3":  # keys padded with the rope part, values padded to the same width
        head_dim = (fields.number("qk_nope_head_dim") or 0) + (fields.number("qk_rope_head_dim") or 0)
    value_dim = head_dim
    if fields.get("kv_lora_rank") is None and fields.raw.get("v_head_dim") is not None:
        value_dim = fields.number("v_head_dim") or head_dim
    window = _window(fields, family)
    full = LayerShape(kind=FULL, num_kv_heads=heads, head_dim=head_dim, head_dim_v=value_dim)
    sliding = _with(full, kind=SLIDING, window=window)
    if family.startswith("mimo_v2"):
        sliding = _with(
            sliding,
            num_kv_heads=fields.number("swa_num_key_value_heads") or heads,
            head_dim=fields.number("swa_head_dim") or head_dim,
            head_dim_v=fields.number("swa_v_head_dim") or value_dim,
        )
    if family in ("gemma4", "diffusion_gemma"):
        wide = fields.number("global_head_dim")
        if wide is None:
            wide = head_dim if family != "gemma4" else 512
            fields.assumed.append(f"global_head_dim = {wide} (default of the {family} family)")
        fewer = fields.number("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
        full = _with(full, head_dim=wide, head_dim_v=wide, num_kv_heads=fewer or heads)
    if family.startswith("step3p"):
        other = fields.get("attention_other_setting")
        if isinstance(other, dict):
            groups = Fields(other, f"{fields.where}: attention_other_setting").number("num_attention_groups")
            sliding = _with(sliding, num_kv_heads=groups or heads)
    chunk = fields.number("attention_chunk_size")
    result = {FULL: full, SLIDING: sliding, CHUNKED: _with(full, kind=CHUNKED, window=chunk)}
    rank = fields.number("kv_lora_rank")
    if rank is not None:
        latent = rank + (fields.number("qk_rope_head_dim", least=0) or 0)
        result[MLA] = LayerShape(kind=MLA, num_kv_heads=1, head_dim=latent, latent_dim=latent)
        if family not in NOT_MLA:
            result[FULL] = result[MLA]
    return result


def _expand(
    fields: Fields, family: str, numbers: dict[str, int], layers: list[LayerShape], root: Fields
) -> list[LayerShape]:
    """Side caches and second attentions that a decoder layer brings along."""
    if family == "longcat_flash":  # two attentions a layer
        return [_with(layer, index=2 * layer.index + half) for layer in layers for half in (0, 1)]
    if family in ("whisper", "t5", "bart", "mbart") or root.raw.get("is_encoder_decoder") is True:
        cross = [_with(layer, kind=CROSS) for layer in layers if layer.kind == FULL]
        return [layer for pair in zip(layers, cross, strict=True) for layer in pair]
    crossing = fields.get("cross_attention_layers")
    if isinstance(crossing, list):  # Mllama
        return [_with(layer, kind=CROSS) if layer.index in crossing else layer for layer in layers]
    index_dim = fields.number("index_head_dim")
    if index_dim is not None and fields.get("index_topk") is not None:
        return _indexed(fields, layers, index_dim)
    sparse = fields.get("sparse_attention_config")
    if isinstance(sparse, dict) and sparse.get("use_sparse_attention"):
        # MiniMax-M3: one more key vector per token on every layer with block-sparse attention.
        where = Fields(sparse, f"{fields.where}: sparse_attention_config")
        used = where.numbers("sparse_attention_freq", numbers["layers"]) or [1] * numbers["layers"]
        width = where.need("sparse_index_dim")
        side = LayerShape(kind=MLA, num_kv_heads=1, head_dim=width, latent_dim=width, role="indexer-plain")
        return [
            each
            for layer in layers
            for each in ((layer, _with(side, index=layer.index)) if used[layer.index] else (layer,))
        ]
    return layers


def _indexed(fields: Fields, layers: list[LayerShape], index_dim: int) -> list[LayerShape]:
    """DeepSeek sparse attention: each layer that runs its own indexer keeps fp8 keys with one scale per 128."""
    width = index_dim + index_dim // 128 * 4
    pool = fields.number("index_kpool") or 1
    shared = fields.items("indexer_types")
    frequency = fields.number("index_topk_freq") or 1
    offset = fields.number("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    pattern = fields.get("index_topk_pattern")
    result: list[LayerShape] = []
    for layer in layers:
        result.append(layer)
        if layer.kind != MLA:
            continue
        skips = max(layer.index - offset + 1, 0) % frequency != 0
        if isinstance(pattern, (str, list)) and layer.index < len(pattern):
            skips = pattern[layer.index] == "S"
        if shared is not None and layer.index < len(shared):
            skips = shared[layer.index] == "shared"
        if not skips:
            side = LayerShape(kind=MLA, num_kv_heads=1, head_dim=width, latent_dim=width, role="indexer")
            result.append(_with(side, index=layer.index, tokens_per_state=pool))
            if pool > 1:
                # The pool still being filled: raw keys and gate scores (``Glm5NextTailCache``).
                ring = LayerShape(
                    kind=RING, index=layer.index, num_kv_heads=2, head_dim=index_dim, role="ring"
                )
                result.append(_with(ring, params={"pool": pool}))
    return result


def _block_configs(fields: Fields, numbers: dict[str, int]) -> Layers:
    """Nemotron-NAS: attention differs per block, and some have none (``nemotron_nas.py``)."""
    blocks = fields.items("block_configs", numbers["layers"]) or []
    built = []
    for index, block in enumerate(blocks[: numbers["layers"]]):
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise fields.error(f"block_configs[{index}]", block, "an object with attention is expected")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            continue
        where = Fields(attention, f"{fields.where}: block_configs[{index}].attention")
        group = where.need("n_heads_in_group")
        window = where.number("window_length")
        built.append(
            LayerShape(
                kind=FULL if window is None else SLIDING,
                index=index,
                num_kv_heads=numbers["heads"] // group,
                head_dim=numbers["head_dim"],
                head_dim_v=numbers["head_dim"],
                window=window,
            )
        )
    return tuple(built)


def _llama4(fields: Fields, count: int) -> list[str]:
    """Llama 4: every n-th layer has no rope and attends to everything, the others to their chunk."""
    rope = fields.numbers("no_rope_layers")
    if not rope:
        every = fields.number("no_rope_layer_interval") or 4
        rope = [int((index + 1) % every != 0) for index in range(count)]
    if len(rope) < count:
        raise fields.error("no_rope_layers", rope, f"one entry for each of {count} layers is needed")
    chunked = fields.number("attention_chunk_size") is not None
    return [CHUNKED if rope[index] and chunked else FULL for index in range(count)]


def _gpt_neo(fields: Fields, count: int) -> list[str]:
    stated = fields.get("attention_layers")
    if isinstance(stated, list) and len(stated) >= count:
        return [SLIDING if entry == "local" else FULL for entry in stated[:count]]
    return [FULL if index % 2 == 0 else SLIDING for index in range(count)]

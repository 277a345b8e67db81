"""From a ``config.json`` to a ``ModelShape``: nested configs, field aliases, class defaults.

Field names follow the model families; the resolution order is that of vLLM 0.32's
``transformers_utils/model_arch_config_convertor.py``. Class defaults are those of transformers 5.19
(``data/class_defaults.json``, written by ``tools/class_defaults.py``).
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.planner.configfile import Fields
from kvcatch.planner.lengths import stated_length
from kvcatch.planner.specs import ModelShape

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
KV_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
HEAD_DIM = ("head_dim", "hidden_size_per_head", "attention_head_dim", "kv_channels", "d_kv")
NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")
#: No decoder, so no KV cache at all.
ENCODER_ONLY = {
    "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "modernbert",
    "nomic_bert", "vit", "clip", "siglip", "camembert", "mpnet", "ernie", "eurobert", "new",
}  # fmt: skip
#: Recurrent models that vLLM does not run; they keep a state and no KV cache.
STATE_ONLY = {"rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "retnet"}
#: Families whose code divides hidden size by heads and takes no head_dim of its own.
FIXED_HEAD_DIM = {
    "gpt2",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "codegen",
    "gpt_neo",
}
_DTYPES = {
    "float16": "float16", "half": "float16", "fp16": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float32": "float32", "float": "float32", "fp32": "float32",
}  # fmt: skip


@functools.cache
def _all_defaults() -> dict[str, dict[str, Any]]:
    text = resources.files("kvcatch.planner").joinpath("data/class_defaults.json").read_text()
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def class_defaults(model_type: str) -> dict[str, Any]:
    """Scalar defaults of the configuration class of ``model_type``, empty when it is not known."""
    return _all_defaults().get(model_type, {})


def text_part(config: dict[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """The configuration of the language model inside, and whether it was nested."""
    current, nested = config, False
    for _ in range(3):
        inner = next((current[name] for name in NESTED if name in current), None)
        if inner is None:
            return current, nested
        if not isinstance(inner, dict):
            raise KVCatchError(f"{where}: field text_config is not an object.", "Correct the config.json.")
        current, nested = inner, True
    return current, nested


def _model_type(config: dict[str, Any], text: dict[str, Any], where: str) -> str:
    declared = text.get("model_type")
    if declared is None and text is not config:
        declared = class_defaults(str(config.get("model_type", ""))).get("_text")
    declared = declared or config.get("model_type")
    if not isinstance(declared, str) or not declared:
        raise KVCatchError(
            f"{where}: field model_type is {declared!r}.", "Add the model's type, for example llama or qwen3."
        )
    return declared


def family(model_type: str) -> str:
    """The model type without what only marks a nested text config."""
    for suffix in ("_text_model", "_text"):
        model_type = model_type.removesuffix(suffix)
    return model_type


def model_shape(name: str, config: dict[str, Any]) -> ModelShape:
    """The shape of a model. Raises KVCatchError naming the first missing or contradictory field."""
    from kvcatch.planner.kinds import layer_shapes

    text, nested = text_part(config, name)
    model_type = _model_type(config, text, name)
    # Nested configs are shipped as differences from their class, whole ones are not: a missing head count there
    # is a mistake in the file.
    defaults = class_defaults(model_type)
    required = () if nested else (*LAYERS, *HIDDEN, *HEADS)
    fields = Fields(text, name, {key: value for key, value in defaults.items() if key not in required})
    root = Fields(config, name)
    kind = family(model_type)
    encoder_decoder = bool(config.get("is_encoder_decoder")) or kind in ("whisper", "t5", "bart", "mbart")
    numbers = _sizes(fields, kind, encoder_decoder)
    layers, warnings = layer_shapes(fields, kind, numbers, root)
    tie = fields.get("tie_word_embeddings")
    tie = config.get("tie_word_embeddings", tie) if tie is None or nested else tie
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    experts = (
        fields.number("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts", least=0) or 0
    )
    quantization = config.get("quantization_config") or text.get("quantization_config")
    return ModelShape(
        name=name,
        architecture=architecture or model_type,
        model_type=model_type,
        num_layers=numbers["layers"],
        hidden_size=numbers["hidden"] or None,
        num_heads=numbers["heads"],
        num_kv_heads=numbers["kv_heads"],
        head_dim=numbers["head_dim"],
        layers=layers,
        vocab_size=fields.number("vocab_size", "padded_vocab_size") or root.number("vocab_size"),
        intermediate_size=_first(
            fields, "intermediate_size", "ffn_hidden_size", "n_inner", "decoder_ffn_dim", "d_ff"
        ),
        dtype=_dtype(text, config),
        max_position_embeddings=stated_length(fields, root),
        tie_word_embeddings=bool(tie),
        num_experts=experts,
        experts_per_token=_count(
            fields, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts"
        ),
        moe_intermediate_size=_first(fields, "moe_intermediate_size", "expert_ffn_hidden_size"),
        num_shared_experts=_count(fields, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        shared_expert_intermediate_size=_first(fields, "shared_expert_intermediate_size"),
        moe_layers=_moe_layers(fields, numbers["layers"]) if experts else (),
        q_lora_rank=fields.number("q_lora_rank"),
        kv_lora_rank=fields.number("kv_lora_rank"),
        qk_nope_head_dim=fields.number("qk_nope_head_dim", least=0),
        qk_rope_head_dim=fields.number("qk_rope_head_dim", least=0),
        v_head_dim=fields.number("v_head_dim", least=0),
        num_draft_layers=_count(
            fields,
            "num_nextn_predict_layers",
            "mtp_num_hidden_layers",
            "num_mtp_modules",
            "mtp_transformer_layers",
        ),
        encoder_layers=(fields.number("encoder_layers", "num_layers") or 0) if encoder_decoder else 0,
        max_source_positions=fields.number("max_source_positions"),
        multimodal=nested or "vision_config" in config or "audio_config" in config,
        quantization=quantization if isinstance(quantization, dict) else None,
        text=text,
        config=config,
        assumed=tuple(fields.assumed),
        warnings=tuple(warnings),
    )


def _sizes(fields: Fields, kind: str, encoder_decoder: bool) -> dict[str, int]:
    """layers, hidden, heads, kv_heads, head_dim of the decoder; 0 for what the family does not have."""
    if kind in ENCODER_ONLY or kind in STATE_ONLY:
        return {
            "layers": fields.need(*LAYERS),
            "hidden": fields.number(*HIDDEN) or 0,
            "heads": fields.number(*HEADS) or 0,
            "kv_heads": 0,
            "head_dim": 0,
        }
    pattern = fields.get("layers_block_type", "layer_types", "hybrid_override_pattern")
    names = ("decoder_layers", "num_decoder_layers", *LAYERS) if encoder_decoder else LAYERS
    layers = fields.number(*names)
    if layers is None and isinstance(pattern, (list, str)) and pattern:
        layers = len(pattern)
    layers = fields.need(*names) if layers is None else layers
    if layers > 10_000:
        raise fields.error(names[0], layers, "no model has so many layers")
    hidden = fields.need(*HIDDEN)
    if kind in ("mamba", "mamba2", "falcon_mamba"):
        return {"layers": layers, "hidden": hidden, "heads": 0, "kv_heads": 0, "head_dim": 0}
    heads = fields.need("decoder_attention_heads", *HEADS) if encoder_decoder else fields.need(*HEADS)
    kv_heads = _kv_heads(fields, kind, heads)
    head_dim = fields.number(*HEAD_DIM, least=0) or None
    even = hidden // heads if hidden % heads == 0 else None
    if head_dim is None and fields.get("kv_lora_rank") is None:
        if even is None:
            raise KVCatchError(
                f"{fields.where}: field hidden_size {hidden} does not divide by num_attention_heads {heads}, "
                "and head_dim is missing.",
                "Add head_dim.",
            )
        head_dim = even
    elif head_dim is not None and head_dim != even and fields.raw.get("head_dim") is not None:
        if kind in FIXED_HEAD_DIM:
            raise fields.error("head_dim", head_dim, f"{kind} has hidden_size / num_attention_heads = {even}")
        if head_dim % 8 and fields.get("kv_lora_rank") is None:
            raise fields.error(
                "head_dim",
                head_dim,
                f"contradicts hidden_size / num_attention_heads = {hidden / heads:g}, and no attention kernel takes it",
            )
    if head_dim is not None and head_dim > 4096:
        raise fields.error("head_dim", head_dim, "no attention kernel takes more than 4096")
    nope, rope = fields.number("qk_nope_head_dim", least=0), fields.number("qk_rope_head_dim", least=0)
    stated = fields.number("qk_head_dim")
    if (
        stated is not None
        and nope is not None
        and rope is not None
        and "qk_head_dim" in fields.raw
        and stated != nope + rope
    ):
        raise fields.error("qk_head_dim", stated, f"qk_nope_head_dim + qk_rope_head_dim = {nope + rope}")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim or 0,
    }


def _kv_heads(fields: Fields, kind: str, heads: int) -> int:
    """KV heads of the whole model: one for multi-query, all heads when nothing says otherwise."""
    attention = fields.get("attn_config")
    if isinstance(attention, dict) and attention.get("kv_n_heads") is not None:
        return Fields(attention, f"{fields.where}: attn_config").need("kv_n_heads")
    if kind == "gpt_bigcode":
        return 1 if fields.flag("multi_query", True) else heads
    if kind in ("falcon", "RefinedWeb", "RefinedWebModel"):
        if fields.flag("new_decoder_architecture"):
            return fields.number("num_kv_heads", "n_head_kv") or heads
        # The class fills num_kv_heads with all heads here; the weights have one.
        return 1 if fields.flag("multi_query", True) else heads
    if kind == "chatglm" and not fields.flag("multi_query_attention"):
        return heads
    value = fields.get(*KV_HEADS)
    if isinstance(value, list):
        return max((item for item in value if isinstance(item, int)), default=heads)
    kv_heads = fields.number(*KV_HEADS) or heads
    if kv_heads > heads and kind not in ("jetmoe",):
        raise fields.error("num_key_value_heads", kv_heads, f"more than the {heads} attention heads")
    if heads % kv_heads and kind not in ("jetmoe",):
        raise fields.error("num_key_value_heads", kv_heads, f"does not divide the {heads} attention heads")
    return kv_heads


def _dtype(text: dict[str, Any], config: dict[str, Any]) -> str:
    for holder in (text, config):
        for name in ("dtype", "torch_dtype"):
            value = holder.get(name)
            if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
                return _DTYPES[value.removeprefix("torch.")]
    return "float32"


def _first(fields: Fields, *names: str) -> int | None:
    value = fields.get(*names)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _count(fields: Fields, *names: str) -> int:
    value = fields.get(*names)
    if isinstance(value, list):
        value = max((item for item in value if isinstance(item, int)), default=0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _moe_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Indices of the layers with routed experts."""
    dense = fields.get("mlp_only_layers")
    dense = set(dense) if isinstance(dense, list) else set()
    first = _count(fields, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    frequency = fields.get(
        "moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "expert_layer_period"
    )
    if isinstance(frequency, list):
        return tuple(index for index, value in enumerate(frequency[:layers]) if value)
    step = frequency if isinstance(frequency, int) and frequency > 0 else 1
    offset = _count(fields, "expert_layer_offset")
    if fields.get("expert_layer_period") is not None:
        return tuple(index for index in range(layers) if index % step == offset)
    if fields.get("decoder_sparse_step", "interleave_moe_layer_step") is not None:
        return tuple(
            index for index in range(first, layers) if (index + 1) % step == 0 and index not in dense
        )
    return tuple(index for index in range(first, layers) if index % step == 0 and index not in dense)

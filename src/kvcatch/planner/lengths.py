"""The longest sequence a config promises: which field states it, and what rope scaling makes of it.

Read from ``_get_and_verify_max_len`` of vLLM 0.12, 0.24, 0.31, 0.32 and 0.33 and from the table of length fields beside
it. Two things differ between releases and models: up to 0.24 a YaRN model starts from the length it was trained
with, from 0.31 on the stated length counts as already scaled; and LongRoPE models start, unless told otherwise,
with the length before scaling.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvcatch.planner.configfile import Fields

#: fields that state a length; the smallest one counts
LENGTH = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "model_max_length",
    "max_target_positions",
    "seq_len",
)
#: looked at when no other is there; the engine itself then assumes 2,048
_LAST = "n_ctx"
#: rope types whose factor is part of the stated length, in every release
_SCALED = ("su", "longrope", "llama3", "mrope")
#: the same since YaRN counts as scaled
_SCALED_YARN = ("yarn", "telechat3-yarn", "deepseek_yarn", "deepseek_llama_scaling")
#: model types whose stated length contains the factor although their rope type would add it
_SCALED_MODELS = "gemma3"
YARN_SCALED_SINCE = (0, 31)
#: model type -> length before LongRoPE where the file leaves it to the configuration class (transformers 5.19)
_TRAINED = {"phi3": 4096, "phi4_multimodal": 4096}


class Lengths(msgspec.Struct, frozen=True):
    """Tokens; None where the config states nothing.

    longest: the largest --max-model-len that is taken without force. start: what the engine takes when told nothing.
    """

    longest: int | None = None
    start: int | None = None


def stated_length(fields: Fields, root: Fields) -> int | None:
    """What the config states before any scaling; of several fields the smallest, with ``model_max_length`` above all."""
    own = fields.number("model_max_length") if fields.raw.get("model_max_length") else None
    if own is not None:
        return own
    present = [
        value
        for name in LENGTH
        if fields.raw.get(name) is not None and (value := fields.number(name)) is not None
    ]
    return min(present) if present else fields.number(*LENGTH, _LAST) or root.number(*LENGTH, _LAST)


def lengths(stated: int | None, text: dict[str, Any], model_type: str, version: tuple[int, int]) -> Lengths:
    """What one release makes of a stated length.

    Args:
        stated: from ``stated_length``.
        text: the configuration of the language model.
        model_type: its type.
        version: the release.
    """
    if stated is None:
        return Lengths()
    ropes = list(_ropes(text))
    longest: float = stated
    if _SCALED_MODELS not in model_type:
        # As there: the last rope of the list decides.
        factor: float = 1.0
        for rope in ropes:
            kind = _kind(rope)
            if kind in _SCALED or (kind in _SCALED_YARN and version >= YARN_SCALED_SINCE):
                continue
            value = rope.get("factor", factor)
            factor = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 1.0
            trained = rope.get("original_max_position_embeddings")
            if kind in ("yarn", "telechat3-yarn") and isinstance(trained, int):
                longest = trained
        longest *= factor if factor > 0 else 1.0
    before = text.get("original_max_position_embeddings", _TRAINED.get(model_type))
    long_rope = any(_kind(rope) in ("su", "longrope") for rope in ropes)
    start = before if long_rope and isinstance(before, int) and before > 0 else longest
    return Lengths(longest=int(longest), start=int(start))


def _ropes(text: dict[str, Any]) -> list[dict[str, Any]]:
    """The rope parameters: one object, or one for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        holder = text.get(name)
        if not isinstance(holder, dict) or not holder:
            continue
        if all(isinstance(part, dict) or part is None for part in holder.values()):
            return [part for part in holder.values() if part]
        return [holder]
    return []


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))

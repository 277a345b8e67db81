"""Layers that speculative decoding adds to a model."""

from __future__ import annotations

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner.specs import FULL, MLA, EngineFlags, LayerShape, ModelShape


def with_drafts(shape: ModelShape, flags: EngineFlags) -> list[LayerShape]:
    """The model's layers plus those that ``--speculative-config`` adds: its own module (MTP) or a draft model.

    Drafts live on the last pipeline stage and are never divided further than the model itself.
    """
    layers = list(shape.layers)
    method = (flags.speculative_method or "").lower()
    if not flags.num_speculative_tokens:
        return layers
    if flags.speculative_model is not None:
        draft = draft_shape(flags.speculative_model)
        own = draft.layers if draft is not None else ()
        return layers + [_drafted(layer, shape.num_layers + layer.index) for layer in own]
    if "mtp" not in method:
        return layers
    base = [layer for layer in layers if layer.kind in (FULL, MLA) and not layer.role.startswith("indexer")]
    if not base:
        return layers
    last = base[-1]
    sides = [layer for layer in layers if layer.index == last.index and layer.role.startswith("indexer")]
    for number in range(max(1, shape.num_draft_layers)):
        layers += [_drafted(layer, shape.num_layers + number) for layer in (last, *sides)]
    return layers


def _drafted(layer: LayerShape, index: int) -> LayerShape:
    return msgspec.structs.replace(layer, index=index, draft=True, shares_kv=False)


def draft_shape(source: str) -> ModelShape | None:
    """The draft model's shape, None when its config is not at hand."""
    from kvcatch.planner.configfile import load_config
    from kvcatch.planner.shape import model_shape

    try:
        return model_shape(*load_config(source))
    except KVCatchError:
        return None

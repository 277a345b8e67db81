"""Spoil the KV cache of a CPU engine: KVCATCH_TEST_KV_SCALE="FACTOR[:LAYER[:PATH]]".

Layers (default: all; otherwise one number) store and read their keys and values with scale FACTOR. PATH ``decode``: only
what single-token steps write has that scale, and it is read with 1.0, as when a decode kernel is not told the scale.
Needs an fp8 KV cache: others have no scales.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may run more than once in a process."""
    spec = os.environ.get("KVCATCH_TEST_KV_SCALE")
    if not spec:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Backend

    if getattr(Backend, "_kvcatch_test_scale", False):
        return
    factor, layer, path = (*spec.split(":"), "", "")[:3]
    Backend._kvcatch_test_scale = True

    def wrap(name: str, decode_only: bool) -> None:
        original = getattr(Backend, name)

        @functools.wraps(original)
        def spoiled(self: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
            here = not layer or f".layers.{layer}." in owner.layer_name
            if not here or (decode_only and len(args[-1]) != 1):  # the slots of the step's tokens come last
                return original(self, owner, *args, **kwargs)
            kept = owner._k_scale_float, owner._v_scale_float
            owner._k_scale_float = owner._v_scale_float = float(factor)
            try:
                return original(self, owner, *args, **kwargs)
            finally:
                owner._k_scale_float, owner._v_scale_float = kept

        setattr(Backend, name, spoiled)

    wrap("do_kv_cache_update", path == "decode")
    if path != "decode":
        wrap("forward", False)

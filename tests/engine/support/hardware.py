"""What the processor must have for a test to be possible."""

from __future__ import annotations

import pytest
import torch

#: as vLLM decides it (0.32, ``v1/attention/backends/cpu_attn.py``, ``_get_attn_isa``)
FP8_CACHE = bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())
needs_fp8_cache = pytest.mark.skipif(
    not FP8_CACHE, reason="an fp8 KV cache on the CPU needs AVX-512 or AMX, which this processor lacks"
)

"""Number formats of a KV cache, emulated: what comes back when a value has been stored in so few bits.

Torch is imported by the first call.
"""

from __future__ import annotations

from typing import Any

from kvcatch.errors import missing_extra

#: bytes of one value with its share of the scales, for a head of 64 values
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
FORMATS = ("auto", "e4m3", "e5m2", "int8", "int4", "nvfp4")
#: magnitudes of a 4-bit float with two exponent bits and one of mantissa
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NVFP4_BLOCK = 16


def torch_() -> Any:
    """Torch, or the one-line error that names the extra."""
    try:
        import torch
    except ImportError:
        raise missing_extra("torch", "quality") from None
    return torch


#: how an engine rounds to fp8: GPUs to the nearest, vLLM 0.32 on CPU towards zero (twice the error)
ROUNDINGS = ("nearest", "zero")


def stored(values: Any, form: str, scale: float = 1.0, rounding: str = "nearest") -> Any:
    """What a cache of this format gives back, same shape and type.

    Args:
        values: keys or values, (…, tokens, head size).
        form: one of FORMATS; e4m3 and e5m2 divide by one scale per layer, the others find theirs per token and head
            (int8, int4) or per 16 values (nvfp4).
        scale: of the fp8 formats.
        rounding: of the fp8 formats, one of ROUNDINGS.
    """
    torch = torch_()
    if form == "auto":
        return values
    wide = values.to(torch.float32)
    if form in FP8_MAX:
        return (_fp8(torch, wide / scale, form, rounding) * scale).to(values.dtype)
    if form in ("int8", "int4"):
        top = 127.0 if form == "int8" else 7.0
        step = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / top
        return ((wide / step).round().clamp(-top, top) * step).to(values.dtype)
    if form == "nvfp4":
        return _nvfp4(torch, wide).to(values.dtype)
    raise ValueError(form)


def _fp8(torch: Any, wide: Any, form: str, rounding: str) -> Any:
    kind = torch.float8_e4m3fn if form == "e4m3" else torch.float8_e5m2
    wide = wide.clamp(-FP8_MAX[form], FP8_MAX[form])
    near = wide.to(kind)
    if rounding == "nearest":
        return near.to(torch.float32)
    # Codes of one sign are in the order of their values: the next one towards zero is the code before.
    away = near.to(torch.float32).abs() > wide.abs()
    return (near.view(torch.uint8) - away.to(torch.uint8)).view(kind).to(torch.float32)


def _nvfp4(torch: Any, wide: Any) -> Any:
    blocks = wide.reshape(*wide.shape[:-1], -1, _NVFP4_BLOCK)
    step = blocks.abs().amax(dim=-1, keepdim=True) / _E2M1[-1]
    step = step.clamp(2.0**-9, FP8_MAX["e4m3"]).to(torch.float8_e4m3fn).to(torch.float32)
    grid = torch.tensor(_E2M1)
    edges = (grid[1:] + grid[:-1]) / 2
    whole = grid[torch.bucketize((blocks / step).abs(), edges)] * blocks.sign()
    return (whole * step).reshape(wide.shape)


def bytes_per_value(form: str, head_size: int, auto_bytes: int = 2) -> float:
    """Bytes of one stored value, its share of the scales included."""
    if form == "auto":
        return float(auto_bytes)
    if form in FP8_MAX:
        return 1.0
    if form == "nvfp4":
        return 0.5 + 1 / _NVFP4_BLOCK
    return (1.0 if form == "int8" else 0.5) + 4 / head_size

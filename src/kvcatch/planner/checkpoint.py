"""What lies beside a ``config.json``: how many bytes the tensors take, and NVIDIA's second quantisation file.

Headers and indexes only; no tensor is read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

#: Key under which the bytes of a checkpoint's tensors travel with its configuration.
TENSOR_BYTES = "_tensor_bytes"
#: Largest index or header read, bytes; real ones stay below 20 MiB.
_MAX_JSON = 64 * 1024**2


def with_checkpoint(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what the files beside it add; unchanged when there are none."""
    found = dict(config)
    size = tensor_bytes(folder)
    if size is not None:
        found[TENSOR_BYTES] = size
    if "quantization_config" not in found and (second := _second_quantization(folder)):
        found["quantization_config"] = second
    return found


def tensor_bytes(folder: Path) -> int | None:
    """Bytes of all tensors: the index's total, else the sum over the headers of the safetensors files."""
    index = _json(folder / "model.safetensors.index.json")
    metadata = index.get("metadata") if index else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, int) and total > 0:
        return total
    sizes = [_header_bytes(path) for path in sorted(folder.glob("*.safetensors"))]
    return sum(size or 0 for size in sizes) if sizes and None not in sizes else None


def _header_bytes(path: Path) -> int | None:
    """End of the last tensor of one safetensors file: 8 bytes of length, JSON with offsets, data."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return None
        length = struct.unpack("<Q", start)[0]
        if length > _MAX_JSON:
            return None
        header = _parsed(file.read(length))
    ends = [
        entry["data_offsets"][1]
        for entry in (header or {}).values()
        if isinstance(entry, dict)
        and isinstance(entry.get("data_offsets"), list)
        and len(entry["data_offsets"]) == 2
    ]
    return max(ends, default=None) if all(isinstance(end, int) for end in ends) else None


def _second_quantization(folder: Path) -> dict[str, Any] | None:
    """``hf_quant_config.json`` of ModelOpt checkpoints as a ``quantization_config`` (vLLM reads both)."""
    second = _json(folder / "hf_quant_config.json")
    inner = second.get("quantization") if second else None
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else None


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file() or path.stat().st_size > _MAX_JSON:
        return None
    return _parsed(path.read_bytes())


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        loaded = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return loaded if isinstance(loaded, dict) else None

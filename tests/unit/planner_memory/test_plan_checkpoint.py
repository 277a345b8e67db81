"""Files beside a config.json: tensor bytes, ModelOpt's second file, and weights held against them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvcatch.planner.catalogue import find_model
from kvcatch.planner.checkpoint import TENSOR_BYTES, tensor_bytes, with_checkpoint
from kvcatch.planner.configfile import load_config
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import EngineFlags
from kvcatch.planner.weights import stage_weights
from kvcatch.units import GIB


def safetensors(path: Path, sizes: dict[str, int]) -> None:
    """A file with a header only; the tensors' bytes are not needed."""
    start, header = 0, {"__metadata__": {"format": "pt"}}
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [start, start + size]}  # type: ignore[dict-item]
        start += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_bytes_from_the_index_or_the_headers(tmp_path: Path) -> None:
    assert tensor_bytes(tmp_path) is None
    safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": 100, "b": 50})
    safetensors(tmp_path / "model-00002-of-00002.safetensors", {"c": 30})
    assert tensor_bytes(tmp_path) == 180
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 181}}))
    assert tensor_bytes(tmp_path) == 181


@pytest.mark.parametrize(
    "raw", [b"", b"abc", b"\xff" * 16, struct.pack("<Q", 4) + b"null", struct.pack("<Q", 9) + b"{"]
)
def test_broken_files_are_unknown(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "model.safetensors.index.json").write_bytes(b"[1]")
    (tmp_path / "hf_quant_config.json").write_bytes(b"{")
    assert with_checkpoint(tmp_path, {"a": 1}) == {"a": 1}


def folder(path: Path, config: dict[str, Any], total: int) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}}))
    return path


def weights(path: Path) -> tuple[int, str]:
    name, config = load_config(str(path))
    shape = model_shape(name, config)
    found = stage_weights(shape, EngineFlags(), [shape.num_layers])[0]
    return found.total, "; ".join(found.notes)


def test_an_index_that_agrees_confirms_the_shapes(tmp_path: Path) -> None:
    config = find_model("Qwen3-8B")
    assert config is not None
    # total_size of Qwen/Qwen3-8B's own index: 8,190,735,360 parameters in 16 bits.
    total, note = weights(folder(tmp_path, config, 16_381_470_720))
    assert total == pytest.approx(15.27 * GIB, rel=0.002)
    assert "agrees" in note


def test_draft_layers_in_the_checkpoint_are_not_loaded(tmp_path: Path) -> None:
    config = find_model("DeepSeek-V3")
    assert config is not None
    # The repository's index: 688,586,727,753 bytes, the multi-token-prediction layer included.
    total, note = weights(folder(tmp_path, config, 688_586_727_753))
    assert "agrees" in note
    assert total < 680e9


def test_an_index_that_disagrees_wins(tmp_path: Path) -> None:
    config = find_model("Qwen3-8B")
    assert config is not None
    total, note = weights(folder(tmp_path, config, 20 * GIB))
    assert total == pytest.approx(20 * GIB, rel=0.01)
    assert "scaled" in note


def test_modelopt_second_file(tmp_path: Path) -> None:
    config = find_model("Qwen3-8B")
    assert config is not None
    folder(tmp_path, config, 6 * GIB)
    quant = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    loaded = load_config(str(tmp_path))[1]
    assert loaded["quantization_config"]["quant_algo"] == "NVFP4"
    assert loaded[TENSOR_BYTES] == 6 * GIB
    total, _ = weights(tmp_path)
    # 6.95 billion in linear layers at 4.5 bits, 1.24 in embedding and head at 16: 5.95 GiB.
    assert total == pytest.approx(5.96 * GIB, rel=0.02)

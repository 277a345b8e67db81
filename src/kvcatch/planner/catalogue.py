"""Models and GPUs known by name, so that planning works offline.

``data/models.json.gz`` holds trimmed configurations with their sources (``data/README.md``),
``data/gpus.json`` the total memory each GPU reports to vLLM where a log proves it, else a nominal figure with
a wider band.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcatch.units import GIB

_DATA = Path(__file__).with_name("data")
#: Which entry wins when two describe the same checkpoint: real files first, class defaults last.
_RANK = {
    "checkpoint": 0,
    "boot-log": 1,
    "dimensions": 2,
    "checkpoint-preset": 3,
    "transformers-class-default": 9,
}
#: Endings that never change the shape of a model: tried last, one after the other.
_ENDINGS = ("instruct", "chat", "base", "it", "hf", "v01", "v02", "v03")
_GPU_NOISE = {
    *("nvidia", "geforce", "amd", "instinct", "tesla", "radeon", "workstation", "server", "edition"),
    *("hbm2", "hbm2e", "hbm3", "hbm3e"),
}


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the catalogue. ``config`` is its (trimmed) config.json, ``source`` where that was read."""

    name: str
    kind: str
    source: str
    config: msgspec.Raw

    def parsed(self) -> dict[str, Any]:
        """The configuration as a dictionary of its own."""
        built: dict[str, Any] = msgspec.json.decode(self.config, type=dict[str, Any])
        return built


class GPU(msgspec.Struct, frozen=True, kw_only=True):
    """A card as vLLM sees it: total memory in GiB ± band, CUDA compute capability or AMD architecture."""

    name: str
    aliases: list[str] = []
    gib: float
    band: float = 0.0
    capability: tuple[int, int] | None = None
    sms: int | None = None
    vendor: str = "nvidia"
    arch: str = ""
    source: str = ""
    exact: bool = False

    @property
    def memory_bytes(self) -> int:
        """Total memory as the driver reports it, bytes."""
        return int(self.gib * GIB)

    @property
    def band_bytes(self) -> int:
        """How far the total may be off, bytes."""
        return int(self.band * GIB)


def find_model(name: str) -> dict[str, Any] | None:
    """The configuration of a known model, None when there is none. Case, dashes and owner may be left out."""
    entry = find_model_entry(name)
    return entry.parsed() if entry else None


def find_model_entry(name: str) -> ModelEntry | None:
    """The catalogue's entry for a name like ``Qwen3-8B``, ``qwen/qwen3-8b`` or ``llama3.1-8b-instruct``."""
    index = _index()
    for candidate in _spellings(name):
        if candidate in index:
            return index[candidate]
    return None


def model_names() -> list[str]:
    """All names in the catalogue, class defaults left out, sorted."""
    return sorted(
        {entry.name for entry in models() if entry.kind != "transformers-class-default"}, key=str.lower
    )


@cache
def models() -> tuple[ModelEntry, ...]:
    """Every entry of the catalogue."""
    raw = zlib.decompress((_DATA / "models.json.gz").read_bytes(), wbits=31)
    return tuple(msgspec.json.Decoder(ModelEntry).decode_lines(raw))


def find_gpu(name: str) -> GPU | None:
    """The GPU of that name, None when unknown; ``H100``, ``h100-80gb``, ``NVIDIA L40S``, ``4090`` work."""
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word and word not in _GPU_NOISE]
    without_bus = [word for word in words if not re.fullmatch(r"pcie|sxm\d?|nvl", word)]
    without_size = [word for word in without_bus if not re.fullmatch(r"\d+gb", word)]
    for attempt in (words, without_bus, without_size):
        for gpu in gpus():
            if "".join(attempt) in {_plain(word) for word in (gpu.name, *gpu.aliases)}:
                return gpu
    return None


@cache
def gpus() -> tuple[GPU, ...]:
    """Every GPU of the catalogue."""
    raw = (_DATA / "gpus.json").read_bytes()
    return tuple(msgspec.json.decode(raw, type=list[GPU]))


@cache
def _index() -> dict[str, ModelEntry]:
    index: dict[str, ModelEntry] = {}
    ranked = sorted(models(), key=lambda entry: _RANK.get(entry.kind, 8))
    named = [(entry, list(_spellings(entry.name))) for entry in ranked]
    # A checkpoint's own names win over the shortened names of another one.
    for exact in (True, False):
        for entry, spellings in named:
            if entry.kind == "transformers-class-default":
                index.setdefault(_plain(entry.name), entry)
                continue
            for spelling in spellings[:2] if exact else spellings[2:]:
                index.setdefault(spelling, entry)
    return index


def _spellings(name: str) -> Iterator[str]:
    """Names that mean the same, the closest first: without owner, without Meta's prefix, without endings."""
    text = name.replace("--", "/").strip().rstrip("/")
    bare = _plain(re.sub(r"(?i)^meta-", "", text.rpartition("/")[2]))
    yield _plain(text)
    yield bare
    shorter = True
    while shorter:
        shorter = False
        for ending in _ENDINGS:
            if bare.endswith(ending) and len(bare) > len(ending) + 3:
                bare, shorter = bare.removesuffix(ending), True
                yield bare


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())

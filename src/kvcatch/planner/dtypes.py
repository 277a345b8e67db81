"""Whether a KV dtype has a kernel on a GPU, in an engine version and attention backend, with the line that says so.

The table ``data/kv_dtypes.json`` is generated from vLLM's source (``tools/kv_dtype_table.py``); the selection here
follows ``Platform.get_attn_backend_cls``: backends are tried in the order of the platform, the first that takes
capability, head size and KV dtype wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcatch.planner.catalogue import GPU, find_gpu
from kvcatch.planner.engine import parse_version
from kvcatch.planner.specs import EngineFlags, ModelShape

#: What to try instead, closest first: fewer bytes saved rather than another meaning.
_EIGHT_BITS = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")
_FOUR_BITS = ("nvfp4", "int4_per_token_head", "turboquant_4bit_nc", "turboquant_k8v4")
_SIXTEEN_BITS = ("auto", "bfloat16", "float16")
#: ROCm tries these; its own choice depends on environment switches of AITER.
_ROCM_ORDER = ("ROCM_ATTN", "TRITON_ATTN", "TURBOQUANT", "ROCM_OCTAVE", "ULTRAQUANT")
#: Families with attention sinks: on CUDA only these backends read them (``supports_sink``).
_SINK_MODELS = ("gpt_oss",)


class Refusal(msgspec.Struct, frozen=True):
    """Why one backend is out, with the line of vLLM's source."""

    backend: str
    reason: str
    source: str
    step: int = 0  # how far the backend got: the one that got furthest tells what is really missing


class _Target(msgspec.Struct, frozen=True):
    """What a backend has to serve."""

    capability: tuple[int, int] | None
    platform: str  # cuda | rocm | cpu
    mla: bool
    sparse: bool
    head_size: int
    sinks: bool


def kv_dtype_support(shape: ModelShape, flags: EngineFlags, gpu: GPU | None = None) -> dict[str, Any] | None:
    """Support of ``flags.kv_cache_dtype``; None when the card, or how the model's layers are served, is unknown.

    Keys: ``supported``, ``backend``, ``source`` (file:line of the table), ``reason``, ``switches_off``,
    ``nearest`` (a dtype that works, when this one does not), ``refusals``, ``table_version``, ``exact_version``.
    """
    target = _target(shape, flags, gpu)
    if target is None:
        return None
    version, exact = _table_version(flags.engine_version)
    release = _table()[version]
    dtype = flags.kv_cache_dtype
    answer: dict[str, Any] = {
        "kv_cache_dtype": dtype,
        "table_version": version,
        "exact_version": exact,
        "supported": False,
        "backend": None,
        "source": release["cache_dtypes_source"],
        "reason": "",
        "switches_off": [],
        "nearest": None,
        "refusals": [],
    }
    if dtype not in release["cache_dtypes"]:
        answer["reason"] = f"vLLM {version} has no KV dtype {dtype}"
        answer["nearest"] = _nearest(release, target, flags, dtype)
        return answer
    refusals: list[Refusal] = []
    chosen = _choose(release, target, flags, dtype, refusals)
    answer["refusals"] = [msgspec.to_builtins(refusal) for refusal in refusals]
    if chosen is None:
        closest = max(refusals, key=lambda refusal: refusal.step)
        answer["reason"], answer["source"] = closest.reason, closest.source
        answer["nearest"] = _nearest(release, target, flags, dtype)
        return answer
    answer.update(supported=True, backend=chosen, source=release["backends"][chosen]["source"])
    answer["switches_off"] = list(_switched_off(release, target, flags, chosen))
    return answer


@cache
def _table() -> dict[str, Any]:
    raw = Path(__file__).with_name("data").joinpath("kv_dtypes.json").read_bytes()
    loaded: dict[str, Any] = msgspec.json.decode(raw)
    return loaded


def _table_version(version: str) -> tuple[str, bool]:
    """The release in the table closest to ``version``, and whether it is that very one."""
    major, minor = parse_version(version)
    known = {text: tuple(int(part) for part in text.split(".")) for text in _table()}
    closest = min(known, key=lambda text: (abs(known[text][0] - major), abs(known[text][1] - minor)))
    return closest, known[closest] == (major, minor)


def _target(shape: ModelShape, flags: EngineFlags, gpu: GPU | None) -> _Target | None:
    layers = [layer for layer in shape.layers if layer.kind in ("full", "sliding", "chunked", "mla")]
    if not layers or any(layer.role in ("window", "latent") for layer in layers):
        return None  # no attention, or DeepSeek V4's, which has backends of its own
    card = gpu or (find_gpu(flags.gpu) if flags.gpu else None)
    platform = (
        "cpu" if flags.device == "cpu" else "rocm" if card is not None and card.vendor == "amd" else "cuda"
    )
    if platform == "cuda" and (card is None or card.capability is None):
        return None
    mla = any(layer.kind == "mla" and layer.role in ("attention", "latent") for layer in layers)
    head = max((layer.latent_dim if mla else layer.head_dim) for layer in layers)
    return _Target(
        card.capability if card is not None else None,
        platform,
        mla,
        sparse=mla and any(layer.role.startswith("indexer") for layer in shape.layers),
        head_size=head,
        sinks=shape.model_type.startswith(_SINK_MODELS),
    )


def _order(release: dict[str, Any], target: _Target, flags: EngineFlags) -> list[str]:
    """Backends in the order the platform tries them; the one asked for alone when there is one."""
    if flags.attention_backend:
        wanted = flags.attention_backend.upper().removesuffix("_VLLM_V1")
        return [wanted]
    if target.platform == "cpu":
        return ["CPU_MLA" if target.mla else "CPU_ATTN"]
    if target.platform == "rocm":
        if target.mla:
            return ["ROCM_AITER_MLA_SPARSE"] if target.sparse else ["TRITON_MLA", "ROCM_AITER_MLA"]
        return list(_ROCM_ORDER)
    kind = "mla" if target.mla else "mha"
    major = target.capability[0] if target.capability else 0
    tried = release["priorities"]
    listed: list[str] = tried.get(f"{kind}/{major}") or tried[f"{kind}/*"]
    return listed


def _choose(
    release: dict[str, Any], target: _Target, flags: EngineFlags, dtype: str, refusals: list[Refusal]
) -> str | None:
    for name in _order(release, target, flags):
        refusal = _refusal(release, target, name, dtype)
        if refusal is None:
            return name
        refusals.append(refusal)
    return None


def _refusal(release: dict[str, Any], target: _Target, name: str, dtype: str) -> Refusal | None:
    """The first reason why a backend cannot serve, None when it can."""
    row = release["backends"].get(name)
    if row is None:
        return Refusal(name, f"{name} is not a backend of this version", release["priorities"]["source"])
    cuda, where = target.platform == "cuda", row["source"]
    if bool(row.get("mla")) != target.mla:
        return Refusal(
            name, f"{name} is {'only' if row.get('mla') else 'not'} for latent attention", where, 1
        )
    if bool(row.get("sparse")) != target.sparse and cuda:
        return Refusal(
            name, f"{name} {'needs' if row.get('sparse') else 'has no'} sparse attention", where, 2
        )
    capability = row.get("capability", {})
    if cuda and (capability is None or not _capable(capability, target.capability)):
        line = (capability or row).get("source", where)
        return Refusal(name, f"{name} does not run on compute capability {_text(target.capability)}", line, 3)
    sizes = row.get("head_sizes")
    if sizes and target.head_size not in sizes:
        return Refusal(name, f"{name} has no kernel for head size {target.head_size}", where, 5)
    if dtype not in row["dtypes"]:
        return Refusal(name, f"{name} does not take {dtype}", where, 4)
    if target.sinks and cuda and not _takes_sinks(name, target.capability):
        return Refusal(name, f"{name} has no attention sinks here", where, 5)
    for condition in release["conditions"] if cuda else ():
        concerned = condition["backend"] == name and dtype.startswith(tuple(condition["dtypes"]))
        if concerned and not _holds(condition, target):
            return Refusal(name, condition["reason"], condition["source"], 6)
    return None


def _capable(condition: dict[str, Any], capability: tuple[int, int] | None) -> bool:
    if capability is None:
        return True
    majors, least, most = condition.get("majors"), condition.get("least"), condition.get("most")
    return (
        (majors is None or capability[0] in majors)
        and (least is None or capability >= tuple(least))
        and (most is None or capability <= tuple(most))
    )


def _holds(condition: dict[str, Any], target: _Target) -> bool:
    if not _capable(condition, target.capability):
        return False
    below = target.capability is not None and target.capability[0] != 10
    return not (below and condition.get("head_size_not") == target.head_size)


def _takes_sinks(name: str, capability: tuple[int, int] | None) -> bool:
    """FlashAttention 3 and 4 read sinks, so do the TRT-LLM kernels behind FlashInfer (``supports_sink``)."""
    majors = {"FLASH_ATTN": (9, 10), "FLASHINFER": (10, 12)}.get(name)
    return majors is None or (capability is not None and capability[0] in majors)


def _nearest(release: dict[str, Any], target: _Target, flags: EngineFlags, dtype: str) -> str | None:
    """The closest KV dtype that has a kernel here."""
    four = any(part in dtype for part in ("4", "3bit", "k3"))
    wanted: tuple[str, ...] = (
        *(_FOUR_BITS if four and "fp8" not in dtype else ()),
        *_EIGHT_BITS,
        *_SIXTEEN_BITS,
    )
    offered: list[str] = release["cache_dtypes"]
    for candidate in wanted:
        known = candidate != dtype and candidate in offered
        if known and _choose(release, target, flags, candidate, []) is not None:
            return candidate
    return None


def _switched_off(
    release: dict[str, Any], target: _Target, flags: EngineFlags, chosen: str
) -> Iterator[dict[str, str]]:
    """What the engine would have used with a 16-bit cache and does not use now."""
    usual = _choose(release, target, flags, "auto", [])
    if usual is None or usual == chosen:
        return
    yield {
        "what": f"the {usual} backend",
        "source": release["priorities"]["source"],
    }
    if usual in release["cascade"] and chosen not in release["cascade"]:
        yield {
            "what": "cascade attention (shared prefixes read once a batch)",
            "source": release["backends"][usual]["source"],
        }


def _text(capability: tuple[int, int] | None) -> str:
    return f"{capability[0]}.{capability[1]}" if capability else "unknown"

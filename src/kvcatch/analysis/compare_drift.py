"""What differs between the configurations of two runs, and the flag that restores the first one's value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcatch.analysis.engine_flags import DOTTED, SETTABLE
from kvcatch.events import EngineInfo
from kvcatch.results import Result

#: configuration name -> vLLM's flag where it is not the name itself
_FLAGS = {
    "cache_dtype": "--kv-cache-dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "policy": "--scheduling-policy",
    "num_gpu_blocks": "--num-gpu-blocks-override",
    "num_blocks": "--num-gpu-blocks-override",
    "prefix_caching": "--enable-prefix-caching",
    "watermark": "--watermark",
    "watermark_free_ratio": "--watermark",
    "scheduler": "--scheduler-cls",
    "runner_type": "--runner",
    "tp_size": "--tensor-parallel-size",
    "pp_size": "--pipeline-parallel-size",
    "dp_size": "--data-parallel-size",
}
#: settings with a flag of their name that the engine resolves further: the flag would not restore them
_RESOLVED = {"max_num_scheduled_tokens", "max_num_active_seqs"}
_TOP = (
    "engine", "engine_version", "model", "device", "num_blocks", "block_size", "block_bytes", "kv_cache_dtype",
    "prefix_caching", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "watermark_free_ratio", "policy",
    "scheduler", "async_scheduling", "speculative", "kv_connector", "tp_size", "pp_size", "dp_size", "groups",
)  # fmt: skip
#: names in the nested configuration of the top-level fields that repeat them
_SAME = {
    "num_blocks": "num_gpu_blocks", "kv_cache_dtype": "cache_dtype", "prefix_caching": "enable_prefix_caching",
    "watermark_free_ratio": "watermark", "tp_size": "tensor_parallel_size", "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
}  # fmt: skip
#: chosen by the machine or by the run, not by a person
_IGNORED = {"num_gpu_blocks_override", "data_parallel_rank", "kv_cache_memory_bytes_used", "seed"}


class Drift(Result, frozen=True):
    """One setting that differs. ``restore``: what to add to the second run's command to have the first value."""

    name: str
    a: Any
    b: Any
    restore: str | None = None


def drift(a: EngineInfo, b: EngineInfo) -> tuple[Drift, ...]:
    """Every setting known on both sides that differs, versions first; environment variables also where one lacks them."""
    left, right = flatten(a), flatten(b)
    rows = []
    for name in left:
        if name in right and left[name] != right[name]:
            rows.append(Drift(name=name, a=left[name], b=right[name], restore=_restore(name, left[name])))
    if a.env and b.env:
        # A variable that only one run had is a difference too: unset is a value.
        for name in (*left, *right):
            if name.startswith("env.") and (name in left) != (name in right):
                was = left.get(name)
                restore = f"unset {name.removeprefix('env.')}" if was is None else _restore(name, was)
                rows.append(Drift(name=name, a=was, b=right.get(name), restore=restore))
    return tuple(rows)


def one_sided(a: EngineInfo, b: EngineInfo) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings, with their values, that only the first or only the second run has: removed and new ones.

    Empty unless both runs were recorded: a page knows so little that its gaps say nothing.
    """
    left, right = flatten(a), flatten(b)
    if not all("scheduler" in info.config for info in (a, b)):
        return {}, {}
    return (
        {name: value for name, value in left.items() if name not in right and not name.startswith("env.")},
        {name: value for name, value in right.items() if name not in left and not name.startswith("env.")},
    )


def flatten(info: EngineInfo) -> dict[str, Any]:
    """The resolved configuration as one table: ``section.name``, ``env.NAME``, and what stands above sections."""
    nested: dict[str, Any] = {}
    _walk("", info.config, nested)
    leaves = {name.rpartition(".")[2] for name in nested}
    table: dict[str, Any] = {}
    for name in _TOP:
        value = getattr(info, name)
        if name == "groups":
            value = ", ".join(f"{g.kind} x{g.layers} ({g.block_size} tokens)" for g in value) or None
        elif _SAME.get(name, name) in leaves:
            continue
        if value not in (None, 0, "unknown") or isinstance(value, bool):
            table[name] = value
    table |= {name: value for name, value in nested.items() if name.rpartition(".")[2] not in _IGNORED}
    table |= {f"env.{name}": value for name, value in sorted(info.env.items())}
    return table


def _walk(prefix: str, value: Mapping[str, Any], into: dict[str, Any]) -> None:
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if isinstance(inner, Mapping):
            _walk(f"{path}.", inner, into)
        elif inner is None or isinstance(inner, (bool, int, float, str)):
            into[path] = inner


def _restore(name: str, value: Any) -> str | None:
    leaf = name.rpartition(".")[2]
    if name.startswith("env."):
        return f"export {leaf}={value}" if leaf.isupper() else None
    flag = _flag(name, leaf)
    if flag is None:
        return None
    if flag.count(".") and value is not None:
        return f"{flag} {str(value).lower() if isinstance(value, bool) else value}"
    if leaf == "scheduler" and str(value).startswith("vllm."):
        return f"leave out {flag}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    if value is None:
        return f"leave out {flag}"
    return f"{flag} {str(value).removeprefix('torch.')}"


def _flag(name: str, leaf: str) -> str | None:
    """The flag that sets a setting; None where no release is known to have one."""
    if leaf in _FLAGS:
        return _FLAGS[leaf]
    section, _, rest = name.partition(".")
    if section in DOTTED and rest:
        return f"--{section}-config.{rest}"
    return "--" + leaf.replace("_", "-") if leaf in SETTABLE - _RESOLVED else None

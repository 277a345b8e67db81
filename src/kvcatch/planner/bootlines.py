"""The sentences of a start-up log, one pattern each, over all releases of vLLM (and SGLang's one line).

``facts`` yields (line number, rank, name, value). Sizes come out in bytes and their names say so: what vLLM 0.2-0.6 prints as "GB" is
divided by 2**30 there too, so both units mean GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcatch.units import GIB

_ANSI = re.compile(r"\x1b\[[0-9;]*m|\^\[\[[0-9;]*m")
_RANK = re.compile(
    r"^\s*\((?P<who>(?:Vllm)?Worker\w*(?:[ _-]?(?:rank=|TP|PP|DP|EP)?\d+\w*)?|[A-Za-z_]+?\w*) (?:pid|rank)=\d+\)"
)
_N = r"(-?[\d.]+)"

#: (name, pattern, kind of its groups). Kinds: g = GiB, i = integer, f = number, s = text.
_PATTERNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("version",), r"API server version v?(\d\S*)", "s"),
    (("version",), r"LLM engine \(v(\d[^)\s]*)\)", "s"),
    (("version",), r"█.* version (\d\S*)", "s"),
    (("model",), r"LLM engine .*?\bmodel='([^']+)'", "s"),
    (("model",), r"'model(?:_tag)?': '([^']+)'", "s"),
    (("max_num_batched_tokens",), r"max_num_batched_tokens=(\d+)", "i"),
    (("max_model_len",), r"Using max model len (\d+)", "i"),
    (("weights",), rf"[Mm]odel (?:weights|loading) took {_N} Gi?B", "g"),
    # 0.6.4: one line of key=value; peak_torch_memory includes the weights there.
    (("total",), rf"total_gpu_memory={_N}GiB", "g"),
    (("already_used",), rf"initial_memory_usage={_N}GiB", "g"),
    (("torch_peak",), rf"peak_torch_memory={_N}GiB", "g"),
    (("non_torch",), rf"non_torch_memory={_N}GiB kv", "g"),
    (("available_kv",), rf"kv_cache_size={_N}GiB", "g"),
    (("utilization",), rf"gpu_memory_utilization={_N}(?:$|[ ,)])", "f"),
    # 0.6.5: a table; 0.7 to 0.9 V0: two sentences.
    (("total",), rf"total_gpu_memory {{2,}}{_N}GiB", "g"),
    (("utilization",), rf"gpu_memory_utilization {{2,}}{_N}", "f"),
    (("requested",), rf"vLLM instance can use {{2,}}{_N}GiB", "g"),
    (("weights",), rf"model weights take {{2,}}{_N}GiB", "g"),
    (("non_torch",), rf"non_torch_memory {{2,}}{_N}GiB", "g"),
    (("activation",), rf"activation peak memory {{2,}}{_N}GiB", "g"),
    (("available_kv",), rf"available_kv_cache_memory {{2,}}{_N}GiB", "g"),
    (
        ("total", "utilization", "requested"),
        rf"total_gpu_memory \({_N}GiB\) x gpu_memory_utilization \({_N}\) = {_N}GiB",
        "gfg",
    ),
    (
        ("weights", "non_torch", "activation", "available_kv"),
        (
            rf"model weights take {_N}GiB; non_torch_memory takes {_N}GiB; PyTorch activation peak memory takes "
            rf"{_N}GiB; the rest of the memory reserved for KV Cache is {_N}GiB"
        ),
        "gggg",
    ),
    # V1.
    (
        ("free", "utilization", "requested"),
        rf"Initial free memory: {_N} GiB; Requested memory: {_N} \(util\), {_N} GiB",
        "gfg",
    ),
    (
        ("non_kv", "activation", "non_torch", "weights"),
        (
            rf"non KV cache memory: {_N} ?GiB; torch peak memory increase: {_N} ?GiB; non-torch forward increase memory: "
            rf"{_N} ?GiB; weights memory: {_N} ?GiB"
        ),
        "gggg",
    ),
    (
        ("non_kv", "torch_increase", "consumed", "weights"),
        (
            rf"non KV cache memory: {_N} ?GiB; torch peak memory increase: {_N} ?GiB; total consumed "
            rf"\(from mem_get_info\): {_N} ?GiB; weights memory: {_N} ?GiB"
        ),
        "gggg",
    ),
    (
        ("free", "total", "utilization", "requested"),
        rf"Free memory on device \({_N}/{_N} GiB\) on startup\. Desired GPU memory utilization is \({_N}, {_N} GiB\)",
        "ggfg",
    ),
    (
        ("weights", "activation", "non_torch", "graphs"),
        (
            rf"Actual usage is {_N} GiB for weight, {_N} GiB for peak activation, {_N} GiB for non-torch memory, "
            rf"and {_N} GiB for CUDAGraph memory"
        ),
        "gggg",
    ),
    (
        ("consumed", "peak_with_graphs", "graphs"),
        (
            rf"Actual usage is {_N} GiB for consumed memory \(weights \+ non-torch\), {_N} GiB for peak activation, "
            rf"and {_N} GiB for CUDAGraph memory"
        ),
        "ggg",
    ),
    (("hint_requested_bytes",), r"--kv-cache-memory=(-?\d+)` \([^)]*\) to fit into requested memory", "i"),
    (("hint_full_bytes",), r"--kv-cache-memory=(-?\d+)` \([^)]*\) to fully utilize", "i"),
    (("available_kv",), rf"Available KV cache memory: {_N} GiB", "g"),
    (("given_kv",), rf"Explicitly set \({_N}/[\d.]+\) GiB for KV cache", "g"),
    (("given_kv",), rf"reserved {_N} GiB memory for KV Cache as specified", "g"),
    (("graphs",), rf"Graph capturing finished in \d+ secs, took {_N} GiB", "g"),
    (("graphs_estimate",), rf"Estimated CUDA graph memory: {_N} GiB total", "g"),
    (("graphs", "graphs_estimate"), rf"CUDA graph pool memory: {_N} GiB \(actual\), {_N} GiB \(estimated\)", "gg"),
    (
        ("utilization", "equivalent_utilization", "needed_utilization"),
        (
            rf"current --gpu-memory-utilization={_N} is equivalent to --gpu-memory-utilization={_N} without .* "
            rf"--gpu-memory-utilization to ([\d.]+?)\.? "
        ),
        "fff",
    ),
    # Capacity.
    (("num_gpu_blocks",), r"# (?:GPU|CUDA|cuda) blocks: (\d+)", "i"),
    (("num_cpu_blocks",), r"# CPU blocks: (\d+)", "i"),
    (("blocks_profiled", "num_gpu_blocks"), r"Overriding num_gpu_blocks=(\d+) with num_gpu_blocks_override=(\d+)", "ii"),
    (("kv_cache_tokens",), r"[A-Z]+ KV cache size: ([\d,]+) tokens", "i"),
    (("max_model_len", "max_concurrency"), r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x", "if"),
    (("attention_block_size",), r"Setting attention block size to (\d+) tokens", "i"),
    (("state_padding",), rf"Padding mamba page size by {_N}%", "f"),
    (("padding_layers", "padding_waste"), rf"Add (\d+) padding layers, may waste at most {_N}%", "if"),
    (("sglang_tokens",), r"KV Cache is allocated\. .*?#tokens: (\d+)", "i"),
    # Refusals.
    (
        ("refused_len", "refused_tokens"),
        r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)",
        "ii",
    ),
    (
        ("refused_len", "needed", "available_kv", "estimated_len"),
        (
            rf"max seq len \((\d+)\), \({_N} GiB KV cache is needed, which is larger than the available KV cache memory "
            rf"\({_N} GiB\)\. Based on the available memory, the estimated maximum model length is (\d+)"
        ),
        "iggi",
    ),
    (
        ("free", "total", "refused_utilization", "requested"),
        (
            rf"Free memory on device \({_N}/{_N} GiB\)(?: on startup)? is less than desired GPU memory utilization "
            rf"\({_N}, {_N} GiB\)"
        ),
        "ggfg",
    ),
    (("no_blocks",), r"(No available memory for the cache blocks)", "s"),
    (("layers_per_stage",), r"(?:unevenly partitioned: \[|VLLM_PP_LAYER_PARTITION=)([\d,]+)", "s"),
    # Out of memory.
    (("oom_asked",), r"Tried to allocate ([\d.]+ [KMGT]iB)", "b"),
    (("oom_total",), r"total capacity of ([\d.]+ [KMGT]iB)", "b"),
    (("oom_free",), r"of which ([\d.]+ [KMGT]iB) is free", "b"),
    (("oom_allocated",), r"Of the allocated memory ([\d.]+ [KMGT]iB) is allocated by PyTorch", "b"),
    (("oom_reserved",), r"and ([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated", "b"),
    (("oom_graphs",), r"with ([\d.]+ [KMGT]iB) allocated in private pools", "b"),
    (("oom_sampler_requests",), r"warming up sampler with (\d+) dummy requests", "i"),
    # Resolved configuration.
    (("tensor_parallel_size",), r"\btensor_parallel_size=(\d+)", "i"),
    (("pipeline_parallel_size",), r"\bpipeline_parallel_size=(\d+)", "i"),
    (("data_parallel_size",), r"\bdata_parallel_size=(\d+)", "i"),
    (("max_model_len",), r"\bmax_seq_len=(\d+)", "i"),
    (("kv_cache_dtype",), r"\bkv_cache_dtype=([a-z0-9_]+)", "s"),
    (("quantization",), r"\bquantization=([a-z0-9_-]+)", "s"),
    (("enable_prefix_caching",), r"\benable_prefix_caching=(True|False)", "s"),
    (("enforce_eager",), r"\benforce_eager=(True|False)", "s"),
    (("block_size",), r"'block_size': (\d+)", "i"),
    (("pipeline_parallel_size",), r"'pipeline_parallel_size': (\d+)", "i"),
    (("tensor_parallel_size",), r"'tensor_parallel_size': (\d+)", "i"),
)  # fmt: skip
_COMPILED = tuple((names, re.compile(pattern), kinds) for names, pattern, kinds in _PATTERNS)
_UNITS = {"KiB": 1024, "MiB": 1024**2, "GiB": GIB, "TiB": 1024**4}

Value = int | float | str


def facts(text: str) -> Iterator[tuple[int, str, str, Value]]:
    """(line number, rank, name, value) of every known sentence; rank is "" where the log does not say."""
    for number, raw in enumerate(text.splitlines(), 1):
        line = _ANSI.sub("", raw)
        rank = _rank(line)
        for names, pattern, kinds in _COMPILED:
            match = pattern.search(line)
            if match is None:
                continue
            for name, kind, value in zip(names, kinds, match.groups(), strict=True):
                parsed = _parsed(kind, value)
                if parsed is not None:
                    yield number, rank, f"{name}_bytes" if kind in "gb" else name, parsed


def _rank(line: str) -> str:
    match = _RANK.match(line)
    who = match["who"] if match else ""
    return who if "orker" in who else ""


def _parsed(kind: str, text: str) -> Value | None:
    """The value, None for digits that are no number ("1.2.3")."""
    if kind == "s":
        return text
    if kind == "b":
        number, unit = text.split(" ")
        return int(float(number) * _UNITS[unit]) if number.count(".") < 2 else None
    digits = text.replace(",", "")
    if digits.count(".") > 1 or digits in ("", ".", "-", "-."):
        return None
    if kind == "i":
        return int(digits) if len(digits) < 20 else None
    return int(float(digits) * GIB) if kind == "g" else float(digits)

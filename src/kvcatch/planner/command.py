"""vLLM's own flags: one table for the options of ``plan`` and for pasted commands.

A pasted command may be ``vllm serve …``, ``python -m vllm.entrypoints.…`` or ``docker run … vllm/vllm-openai:TAG …``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcatch.errors import KVCatchError
from kvcatch.units import parse_size


def whole(text: str) -> int:
    """An integer as vLLM takes it: ``8192``, ``32k`` (thousand), ``32K`` (1,024), ``1m``, ``1M``."""
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip().replace("_", "").replace(",", ""))
    if match is None:
        raise KVCatchError(f"not a number: {text!r}.", "Write for example 8192, 32k or 32K.")
    power = " kmgt".index(match.group(2).lower() or " ")
    base = 1024 if match.group(2).isupper() else 1000
    return int(float(match.group(1)) * base**power)


def length(text: str) -> int:
    """A model length; ``auto`` is -1, the longest that fits."""
    return -1 if text.strip().lower() == "auto" else whole(text)


def size(text: str) -> int:
    """Bytes: ``80GiB``, ``80GB``, or vLLM's ``25.6G``."""
    return parse_size(text)


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part for part in re.split(r"[,\s]+", text.strip("[] ")) if part]
    return tuple(whole(part) for part in parts)


class Flag(NamedTuple):
    """One option: the field of ``EngineFlags`` it sets, how its text is read, its spellings and its help."""

    field: str
    read: Callable[[str], Any] | bool
    names: tuple[str, ...]
    help: str
    metavar: str = "N"


#: A boolean instead of a reader: a switch that sets this value.
FLAGS = (
    Flag("tensor_parallel_size", whole, ("--tensor-parallel-size", "-tp"), "tensor-parallel ranks"),
    Flag("pipeline_parallel_size", whole, ("--pipeline-parallel-size", "-pp"), "pipeline stages"),
    Flag("data_parallel_size", whole, ("--data-parallel-size", "-dp"), "independent replicas"),
    Flag(
        "decode_context_parallel_size",
        whole,
        ("--decode-context-parallel-size", "-dcp"),
        "KV split by tokens",
    ),
    Flag("enable_expert_parallel", True, ("--enable-expert-parallel", "-ep"), "experts spread over ranks"),
    Flag("dtype", str, ("--dtype",), "compute dtype", "NAME"),
    Flag("quantization", str, ("--quantization", "-q"), "weight quantisation", "NAME"),
    Flag("kv_cache_dtype", str, ("--kv-cache-dtype",), "auto, fp8, int8_per_token_head, nvfp4, ...", "NAME"),
    Flag("block_size", whole, ("--block-size",), "tokens per block"),
    Flag("max_model_len", length, ("--max-model-len",), "longest request in tokens, or auto"),
    Flag("max_num_seqs", whole, ("--max-num-seqs",), "requests at once"),
    Flag("max_num_batched_tokens", whole, ("--max-num-batched-tokens",), "tokens per step"),
    Flag("gpu_memory_utilization", float, ("--gpu-memory-utilization",), "share of the card", "RATIO"),
    Flag(
        "kv_cache_memory_bytes",
        size,
        ("--kv-cache-memory-bytes", "--kv-cache-memory"),
        "KV cache per GPU",
        "SIZE",
    ),
    Flag("num_gpu_blocks_override", whole, ("--num-gpu-blocks-override",), "blocks, whatever the memory"),
    Flag("enforce_eager", True, ("--enforce-eager",), "no CUDA graphs"),
    Flag(
        "cudagraph_capture_sizes", _numbers, ("--cudagraph-capture-sizes",), "batch sizes of graphs", "LIST"
    ),
    Flag("enable_prefix_caching", True, ("--enable-prefix-caching",), "reuse of prefixes on"),
    Flag("enable_prefix_caching", False, ("--no-enable-prefix-caching",), "reuse of prefixes off"),
    Flag("enable_chunked_prefill", True, ("--enable-chunked-prefill",), "prompts in chunks"),
    Flag("enable_chunked_prefill", False, ("--no-enable-chunked-prefill",), "prompts whole"),
    Flag("async_scheduling", True, ("--async-scheduling",), "overlapping steps on"),
    Flag("async_scheduling", False, ("--no-async-scheduling",), "overlapping steps off"),
    Flag(
        "disable_hybrid_kv_cache_manager",
        True,
        ("--disable-hybrid-kv-cache-manager",),
        "windows hold every token",
    ),
    Flag("mamba_cache_mode", str, ("--mamba-cache-mode",), "none or align", "NAME"),
    Flag("mamba_block_size", whole, ("--mamba-block-size",), "tokens between kept states"),
    Flag("mamba_cache_dtype", str, ("--mamba-cache-dtype",), "dtype of recurrent states", "NAME"),
    Flag("mamba_ssm_cache_dtype", str, ("--mamba-ssm-cache-dtype",), "dtype of the SSM part", "NAME"),
    Flag("attention_backend", str, ("--attention-backend",), "for example FLASHMLA", "NAME"),
    Flag("cpu_offload_gb", float, ("--cpu-offload-gb",), "GiB of weights kept on the host"),
    Flag("swap_space_bytes", lambda text: int(float(text) * 1024**3), ("--swap-space",), "GiB, old versions"),
    Flag("max_logprobs", whole, ("--max-logprobs",), "logprobs a request may ask for"),
    Flag("language_model_only", True, ("--language-model-only",), "no vision or audio tower"),
)
#: Spellings of the model argument and of ignored options that take no value.
_MODEL = ("--model", "--model-path", "--model-tag")
_SWITCHES = {
    "--trust-remote-code", "--disable-log-requests", "--disable-log-stats", "--enable-auto-tool-choice",
    "--enable-lora", "--disable-custom-all-reduce", "--enable-log-requests", "--headless", "--rm", "-it", "-d",
    "--privileged", "--ipc=host", "--init", "--enable-reasoning", "--disable-sliding-window", "--use-v2-block-manager",
    "--enable-dbo", "--enable-eplb", "--allow-credentials", "--return-tokens-as-token-ids",
}  # fmt: skip
_RUNNERS = {
    "vllm",
    "python",
    "python3",
    "docker",
    "podman",
    "sudo",
    "env",
    "nohup",
    "uv",
    "nerdctl",
    "torchrun",
}


def is_command(words: list[str]) -> bool:
    """Whether the words are a pasted command rather than the names of models."""
    if not words:
        return False
    first = words[0].split()[0] if words[0].split() else ""
    name = first.rsplit("/", 1)[-1]
    return (
        name in _RUNNERS
        or re.match(r"python3?(\.\d+)?$", name) is not None
        or re.match(r"[A-Z_]+=", first) is not None
    )


def parse_command(words: list[str]) -> tuple[str, dict[str, Any], list[str]]:
    """(model, fields of EngineFlags, notes) of a pasted command. Raises KVCatchError when it names no model."""
    if len(words) == 1:
        words = shlex.split(words[0].replace("\\\n", " "))
    words = [word for word in words if word.strip() not in ("", "\\")]
    found: dict[str, Any] = {}
    notes: list[str] = []
    model: str | None = None
    positional: list[str] = []
    table = {name: flag for flag in FLAGS for name in flag.names}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if re.match(r"[A-Z][A-Z0-9_]*=", word) and not word.startswith("-"):
            _environment(word, found)
            continue
        image = re.match(r"(?:[\w.\-]+/)*(?:vllm-openai|vllm)[\w\-]*:v?(\d+\.\d+[\w.]*)", word)
        if image:
            found["engine_version"] = image.group(1)
            positional.clear()
            continue
        if not word.startswith("-"):
            positional.append(word)
            continue
        name, _, value = word.partition("=")
        spelled = name.replace("_", "-") if name.startswith("--") else name
        following = words[index] if index < len(words) else None
        has_value = bool(_) or (following is not None and not following.startswith("-"))
        if name in ("-e", "--env") and has_value:
            _environment(value if _ else words[index], found)
            index += 0 if _ else 1
            continue
        flag = table.get(spelled)
        if flag is not None and isinstance(flag.read, bool):
            found[flag.field] = flag.read if not _ else (value.lower() != "false") == flag.read
            continue
        if spelled in _SWITCHES or word in _SWITCHES or not has_value:
            continue
        if not _:
            value = words[index]
            index += 1
        if spelled in _MODEL:
            model = value
        elif spelled in ("--speculative-config", "-sc"):
            _speculative(value, found)
        elif spelled in ("--compilation-config", "-O", "--hf-overrides", "--kv-transfer-config"):
            notes.append(f"{spelled} is not evaluated")
        elif flag is not None:
            assert callable(flag.read)
            found[flag.field] = _read(flag, value)
    if model is None:
        model = _positional_model(positional)
    if model is None:
        raise KVCatchError(
            "the command names no model.", "Paste it whole: vllm serve MODEL …, or … --model MODEL."
        )
    return model, found, notes


def _read(flag: Flag, value: str) -> Any:
    assert callable(flag.read)
    try:
        return flag.read(value)
    except ValueError as error:
        raise KVCatchError(f"{flag.names[0]} is {value!r}: {error}.", "Correct the value.") from error


def _positional_model(words: list[str]) -> str | None:
    """The word after ``serve``; after a container image the first one."""
    for index, word in enumerate(words):
        if word == "serve" and index + 1 < len(words):
            return words[index + 1]
    rest = [
        word
        for word in words
        if word not in _RUNNERS and not word.startswith("vllm.") and word not in ("run", "serve")
    ]
    rest = [word for word in rest if not re.match(r"python3?(\.\d+)?$", word.rsplit("/", 1)[-1])]
    return rest[0] if rest else None


def _environment(word: str, found: dict[str, Any]) -> None:
    name, _, value = word.partition("=")
    if name == "VLLM_PP_LAYER_PARTITION":
        found["pp_layer_partition"] = _numbers(value)
    elif name == "VLLM_CPU_KVCACHE_SPACE":
        found["kv_cache_memory_bytes"] = int(float(value) * 1024**3)
        found["device"] = "cpu"
    elif name == "VLLM_ATTENTION_BACKEND":
        found["attention_backend"] = value


def _speculative(text: str, found: dict[str, Any]) -> None:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise KVCatchError(
            f"--speculative-config is not JSON: {text[:60]!r}.", "Quote it as one word."
        ) from error
    if not isinstance(config, dict):
        raise KVCatchError(f"--speculative-config is {text[:60]!r}.", "A JSON object is expected.")
    method = config.get("method")
    if isinstance(method, str):
        found["speculative_method"] = method
    tokens = config.get("num_speculative_tokens")
    if isinstance(tokens, int):
        found["num_speculative_tokens"] = tokens
    if isinstance(config.get("model"), str):
        found["speculative_model"] = config["model"]


def speculative(text: str) -> dict[str, Any]:
    """Fields of ``EngineFlags`` from the JSON of ``--speculative-config``. Raises KVCatchError."""
    found: dict[str, Any] = {}
    _speculative(text, found)
    return found

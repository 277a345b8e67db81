"""An engine's start-up log: where its memory went, and what its own figures get wrong.

Reads every wording from vLLM 0.2 to 0.33. The memory identity is rebuilt from the printed parts and compared with
the printed result; ``corrections`` names each figure of the engine that is known to mislead, with the right one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner.bootlines import Value, facts
from kvcatch.planner.specs import ModelShape
from kvcatch.results import Result

#: A start-up log is a few megabytes at most; the start of a longer file is enough.
MAX_LOG_BYTES = 64 * 1024**2
#: What vLLM prints to two decimals of a GiB.
ROUNDING = int(0.005 * 1024**3) + 1
_PER_RANK = (
    *(
        "total_bytes",
        "free_bytes",
        "already_used_bytes",
        "utilization",
        "requested_bytes",
        "weights_bytes",
        "activation_bytes",
        "non_torch_bytes",
        "consumed_bytes",
    ),
    *(
        "graphs_bytes",
        "graphs_estimate_bytes",
        "available_kv_bytes",
        "given_kv_bytes",
        "kv_cache_tokens",
        "max_concurrency",
    ),
    *("torch_peak_bytes", "peak_with_graphs_bytes", "hint_requested_bytes", "hint_full_bytes"),
)

_SETTINGS = (
    *("max_num_batched_tokens", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("kv_cache_dtype", "quantization", "enable_prefix_caching", "enforce_eager", "attention_block_size"),
    *(
        "state_padding",
        "layers_per_stage",
        "equivalent_utilization",
        "needed_utilization",
        "refused_utilization",
    ),
)
_REFUSAL = (
    "refused_len",
    "refused_tokens",
    "needed_bytes",
    "available_kv_bytes",
    "estimated_len",
    "refused_utilization",
)

Found = dict[str, list[tuple[str, Value]]]


class RankMemory(Result, frozen=True):
    """What one rank printed about its memory, bytes. ``rank`` is "" where the log does not name one."""

    rank: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    already_used_bytes: int | None = None
    utilization: float | None = None
    requested_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    consumed_bytes: int | None = None
    graphs_bytes: int | None = None
    graphs_estimate_bytes: int | None = None
    available_kv_bytes: int | None = None
    given_kv_bytes: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    torch_peak_bytes: int | None = None
    peak_with_graphs_bytes: int | None = None
    hint_requested_bytes: int | None = None
    hint_full_bytes: int | None = None


class Correction(Result, frozen=True):
    """A figure of the engine that misleads: what it printed, what is right, and why."""

    code: str
    printed: str
    corrected: str
    why: str


class BootLog(Result, frozen=True):
    """The answer of ``kvcatch plan --log``. Sizes in bytes; None = the log does not say."""

    schema_version: int = 1
    engine: str = "vllm"
    version: str | None = None
    model: str | None = None
    start_ups: int = 1  # several in one file: this is the last
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    ranks: tuple[RankMemory, ...] = ()
    binding_rank: str | None = None
    num_gpu_blocks: int | None = None
    num_cpu_blocks: int | None = None
    block_size: int | None = None
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None
    padding: tuple[tuple[int, float], ...] = ()
    starts: bool | None = None
    refusal: dict[str, Any] | None = None
    out_of_memory: dict[str, Any] | None = None
    parts_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    took_most: str | None = None
    identity_error_bytes: int | None = None
    corrections: tuple[Correction, ...] = ()
    source_lines: dict[str, int] = msgspec.field(default_factory=dict)

    def lines(self) -> list[str]:
        """The answer for people."""
        from kvcatch.planner.boottext import boot_lines

        return boot_lines(self)


def read_boot_log(source: str | Path, shape: ModelShape | None = None) -> BootLog:
    """Read a log file, or its text. Raises KVCatchError when nothing in it is a start-up line.

    ``shape``: the model, where the caller knows it; else the model named in the log is looked up in the catalogue.
    """
    text, where = _text(source)
    found: Found = {}
    lines: dict[str, int] = {}
    for number, rank, name, value in facts(text):
        found.setdefault(name, []).append((rank, value))
        lines.setdefault(name, number)
    if not found.keys() - {"model", "version"}:
        raise KVCatchError(
            f"{where}: no start-up line of vLLM or SGLang in it.",
            "Give the engine's own log from its start, with VLLM_LOGGING_LEVEL=DEBUG for every part.",
        )
    log = _assembled(found, lines)
    from kvcatch.planner.bootchecks import checked

    return checked(log, shape or _known_shape(log.model))


def _text(source: str | Path) -> tuple[str, str]:
    if isinstance(source, str) and ("\n" in source or not source or len(source) > 4096):
        return source, "log"
    path = Path(source).expanduser()
    if not path.is_file():
        if isinstance(source, str) and " " in source:
            return source, "log"
        raise KVCatchError(f"no such file: {source}.", "Give the engine's start-up log.")
    with path.open("rb") as file:
        return file.read(MAX_LOG_BYTES).decode("utf-8", "replace"), str(source)


def _known_shape(model: str | None) -> ModelShape | None:
    if model is None:
        return None
    from kvcatch.planner.catalogue import find_model
    from kvcatch.planner.shape import model_shape

    config = find_model(model)
    return model_shape(model, config) if config else None


def _assembled(found: Found, lines: dict[str, int]) -> BootLog:
    def last(name: str) -> Any:
        return found[name][-1][1] if name in found else None

    ranks = _ranks(found)
    refused = "refused_len" in found or "refused_utilization" in found
    refusal: dict[str, Any] = {name: last(name) for name in _REFUSAL if name in found} if refused else {}
    if not refusal and "no_blocks" in found:
        refusal = {"no_blocks": True}
    asked = {name.removeprefix("oom_"): last(name) for name in found if name.startswith("oom_")}
    tokens, blocks = last("kv_cache_tokens") or last("sglang_tokens"), last("num_gpu_blocks")
    each = [rank.max_concurrency for rank in ranks if rank.max_concurrency is not None]
    started = None
    if refusal or asked:
        started = False
    elif tokens is not None or blocks is not None:
        started = True
    named = any(rank for rank, _ in found.get("available_kv_bytes", []))
    waste = zip(found.get("padding_layers", []), found.get("padding_waste", []), strict=False)
    return BootLog(
        engine="sglang" if "sglang_tokens" in found else "vllm",
        version=str(found["version"][0][1]) if "version" in found else None,
        model=str(found["model"][0][1]) if "model" in found else None,
        start_ups=len(found.get("kv_cache_tokens", [])) if named else 1,
        settings={name: _plain(last(name)) for name in _SETTINGS if name in found},
        ranks=ranks,
        num_gpu_blocks=blocks,
        num_cpu_blocks=last("num_cpu_blocks"),
        block_size=last("attention_block_size") or last("block_size"),
        kv_cache_tokens=tokens,
        max_model_len=last("refused_len") or last("max_model_len"),
        max_concurrency=min(each) if each else None,
        padding=tuple((int(layers[1]), float(share[1])) for layers, share in waste),
        starts=started,
        refusal=refusal or None,
        out_of_memory=asked or None,
        source_lines=lines,
    )


def _ranks(found: Found) -> tuple[RankMemory, ...]:
    """One entry a rank; lines that name none are added to every rank, or told apart by coming more than once."""
    named = list(dict.fromkeys(rank for name in _PER_RANK for rank, _ in found.get(name, []) if rank))
    counted = ("available_kv_bytes", "kv_cache_tokens", "max_concurrency")
    repeats = max((len(found.get(name, [])) for name in counted), default=0)
    ranks = []
    if not named and repeats > 1 and _same_run(found, repeats):
        for index in range(repeats):
            values: dict[str, Any] = {"rank": f"#{index}"}
            for name in _PER_RANK:
                if name in found:
                    values[name] = found[name][index if len(found[name]) == repeats else -1][1]
            ranks.append(RankMemory(**values))
        return tuple(ranks)
    for rank in named or [""]:
        values = {"rank": rank}
        for name in _PER_RANK:
            mine = [value for who, value in found.get(name, []) if who in (rank, "")]
            if mine:
                values[name] = mine[-1]
        ranks.append(RankMemory(**values))
    return tuple(ranks)


def _same_run(found: Found, repeats: int) -> bool:
    """Whether repeated lines are ranks of one start-up: same length asked for each time."""
    lengths = {value for _, value in found.get("max_model_len", [])}
    return len(lengths) <= 1 and len(found.get("version", [])) <= 2 and repeats <= 1024


def _plain(value: Any) -> Any:
    if value in ("True", "False"):
        return value == "True"
    return None if value == "None" else value

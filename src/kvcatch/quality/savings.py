"""What the candidate saves, by the planner, and whether the pool is what binds, by a capture."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from kvcatch.errors import KVCatchError
from kvcatch.planner.command import parse_command
from kvcatch.planner.planning import plan
from kvcatch.quality.serving import Side, option
from kvcatch.results import Result

_MAX_HEADER = 64 * 1024**2
_NUMBERS = {"F32": "<f", "F64": "<d", "F16": "<e"}


class Savings(Result, frozen=True):
    """KV bytes of one token on one GPU, scale overhead included; None = the model's configuration is not at hand."""

    baseline_bytes_per_token: int | None = None
    candidate_bytes_per_token: int | None = None
    saved_ratio: float | None = None
    baseline_dtype: str | None = None
    candidate_dtype: str | None = None


class Need(Result, frozen=True):
    """Whether more KV cache would have helped a recorded load.

    helps = yes (blocks bound steps or cost preemptions) | no (they never did) | None: not recorded.
    """

    helps: str | None
    reason: str
    steps: int
    bound_by_blocks_ratio: float | None
    peak_active_ratio: float | None
    preemptions: int | None


def savings(baseline: Side, candidate: Side, roots: Sequence[str]) -> Savings:
    """Bytes per token of both sides; a URL is planned by the model that it names, with ``auto``."""
    sizes, dtypes = [], []
    for where, root in zip((baseline, candidate), roots, strict=True):
        if any(word.startswith("--hf-overrides") for word in where.command):
            return Savings()  # the planner does not read them
        try:
            model, fields, _ = parse_command(list(where.command)) if where.command else (root, {}, [])
            made = plan(model, advise=False, **fields)
        except (KVCatchError, OSError):
            return Savings()
        # A server that is only known by its URL does not tell its KV dtype.
        known = where.command or baseline.url == candidate.url
        sizes.append(made.bytes_per_token_per_gpu if known else None)
        dtypes.append(made.kv_cache_dtype if known else None)
    before, after = sizes
    return Savings(
        baseline_bytes_per_token=before,
        candidate_bytes_per_token=after,
        saved_ratio=1 - after / before if before and after else None,
        baseline_dtype=dtypes[0],
        candidate_dtype=dtypes[1],
    )


def is_quantised(where: Side) -> bool:
    """Whether a command asks for a KV cache of fewer bits."""
    dtype = option(where.command, "--kv-cache-dtype")
    return dtype is not None and dtype not in ("auto", "bfloat16", "float16", "float32")


def windowed(where: Side, tokens: int) -> Side:
    """The same engine with a sliding window in every layer, by configuration: old blocks are freed, there are no sinks.

    Raises KVCatchError for a URL, and when the model's number of layers is not at hand.
    """
    if not where.command:
        raise KVCatchError("--window needs the engine's command.", "Give it after --.")
    from kvcatch.planner.configfile import load_config

    model, _, _ = parse_command(list(where.command))
    _, config = load_config(model)
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise KVCatchError(
            f"{model}: its config names no num_hidden_layers.", "Use --candidate with --hf-overrides."
        )
    overrides = {"layer_types": ["sliding_attention"] * layers, "sliding_window": tokens}
    return Side(None, (*where.command, "--hf-overrides", json.dumps(overrides, separators=(",", ":"))))


def need(path: str) -> Need:
    """Read a recording: did the block pool bind? Raises KVCatchError when it is none."""
    from kvcatch.store.base import BOUNDS
    from kvcatch.store.columns import read_recording

    samples = read_recording(path).samples
    steps = len(samples["unix_ns"])
    if not steps:
        raise KVCatchError(f"{path}: no step was recorded.", "Record for longer.")
    bound = float((samples["bound"] == BOUNDS.index("blocks")).mean())
    total = samples["active_blocks"] + samples["cached_blocks"] + samples["free_blocks"]
    peak = float((samples["active_blocks"] / total.clip(min=1)).max())
    preempted = int(samples["preemptions"].sum())
    if bound > 0 or preempted:
        helps, reason = "yes", "the block pool made requests wait or preempted them"
    else:
        helps, reason = (
            "no",
            "the block pool never bound a step: half the bytes would change nothing that users see",
        )
    return Need(
        helps=helps,
        reason=reason,
        steps=steps,
        bound_by_blocks_ratio=bound,
        peak_active_ratio=peak,
        preemptions=preempted,
    )


def checkpoint_scales(folder: str) -> tuple[float, ...] | None:
    """The k and v scales that a checkpoint carries, () when it has none, None when it is not at hand.

    Only scalars named ``*.k_scale``, ``*.v_scale`` or ``*.kv_scale`` are read.
    """
    paths = sorted(Path(folder).glob("*.safetensors")) if os.path.isdir(folder) else []
    if not paths:
        return None
    found: list[tuple[str, float]] = []
    for path in paths:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
            if length > _MAX_HEADER:
                return None
            try:
                header = json.loads(file.read(length))
            except (ValueError, RecursionError):
                return None
            for name, entry in header.items() if isinstance(header, dict) else ():
                if not name.endswith((".k_scale", ".v_scale", ".kv_scale")) or not isinstance(entry, dict):
                    continue
                form, offsets = _NUMBERS.get(str(entry.get("dtype"))), entry.get("data_offsets")
                if form is None or not isinstance(offsets, list) or len(offsets) != 2:
                    continue
                size = struct.calcsize(form)
                if offsets[1] - offsets[0] != size:
                    continue
                file.seek(8 + length + offsets[0])
                found.append((name, struct.unpack(form, file.read(size))[0]))
    return tuple(value for _, value in sorted(found))


def model_digest(root: str, baseline: Side) -> str:
    """What tells two models apart: a hash of the configuration and the sizes of the weights, else the name."""
    import hashlib

    path = Path(option(baseline.command, "--model") or root)
    parts = [root.rsplit("/", 1)[-1]]
    if path.is_dir():
        config = path / "config.json"
        parts += [config.read_text(encoding="utf-8", errors="replace")] if config.is_file() else []
        parts += [f"{one.name} {one.stat().st_size}" for one in sorted(path.glob("*.safetensors"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

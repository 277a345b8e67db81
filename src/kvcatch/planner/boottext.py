"""A start-up log's answer as lines for people."""

from __future__ import annotations

from kvcatch.planner.bootlog import BootLog
from kvcatch.units import human_bytes, human_count

_NAMES = {
    "weights": "weights",
    "activation_peak": "activation peak",
    "non_torch": "CUDA, NCCL and others",
    "cuda_graphs": "CUDA graphs",
    "other_processes": "other processes",
    "kv_cache": "KV cache",
}


def boot_lines(log: BootLog) -> list[str]:
    """Verdict first, then the split, then what to distrust."""
    version = f" {log.version}" if log.version else ""
    head = f"{log.engine}{version}" + (f", {log.model}" if log.model else "")
    lines = [f"{head}: {_verdict(log)}"]
    if log.start_ups > 1:
        lines.append(f"{log.start_ups} start-ups in this file; this is the last")
    given = next((rank.given_kv_bytes for rank in log.ranks if rank.given_kv_bytes is not None), None)
    if given is not None:
        lines.append(f"the pool was given: {human_bytes(given)}")
    if log.parts_bytes:
        total = sum(log.parts_bytes.values())
        lines.append("")
        for name, size in sorted(log.parts_bytes.items(), key=lambda item: -item[1]):
            lines.append(f"  {_NAMES.get(name, name):24} {human_bytes(size):>12}  {100 * size / total:5.1f}%")
        most = log.took_most or ""
        lines.append(f"  most of it: {_NAMES.get(most, most)}")
        if log.identity_error_bytes is not None:
            state = "add up" if abs(log.identity_error_bytes) < 0.05 * 1024**3 else "do not add up"
            lines.append(f"  the printed parts {state} (off by {human_bytes(log.identity_error_bytes)})")
    if log.binding_rank and len(log.ranks) > 1:
        lines.append(f"  binding rank: {log.binding_rank} of {len(log.ranks)}")
    for correction in log.corrections:
        lines += [
            "",
            f"{correction.code}: {correction.printed} -> {correction.corrected}",
            f"  {correction.why}",
        ]
    return lines


def _verdict(log: BootLog) -> str:
    if log.out_of_memory is not None:
        return "out of memory while it started"
    if log.refusal is not None:
        length = log.refusal.get("refused_len")
        holds = log.refusal.get("refused_tokens") or log.refusal.get("estimated_len")
        if length:
            return f"refused to start: {length:,} tokens do not fit" + (
                f", it says {holds:,} do" if holds else ""
            )
        return "refused to start"
    capacity = f"{human_count(log.kv_cache_tokens)} tokens"
    if log.kv_cache_tokens is None and log.num_gpu_blocks is not None:
        capacity = f"{human_count(log.num_gpu_blocks)} blocks"
    if log.max_concurrency is not None and log.max_model_len is not None:
        capacity += f", {log.max_concurrency:g} requests of {log.max_model_len:,} tokens"
    return capacity

"""The budget question: peak concurrency times peak length, and why the mean misleads."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner import capacity
from kvcatch.planner.capacity import Pool
from kvcatch.planner.specs import EngineFlags, Plan


def with_peak(result: Plan, question: Any, pool: Pool, flags: EngineFlags) -> Plan:
    """The plan with the answer to ``question``. Raises KVCatchError when the question cannot be asked."""
    limits = pool.limits
    requests = limits.max_num_seqs if question.concurrency is None else question.concurrency
    context = (limits.max_model_len if question.context is None else question.context) + question.output
    if requests < 1 or context < 1 or question.output < 0:
        raise KVCatchError(
            f"nothing to plan: {requests} requests of {context} tokens.",
            "Give --concurrency and --context above 0.",
        )
    if context > limits.max_model_len and (question.context is not None or question.output):
        raise KVCatchError(
            f"--context and --output add up to {context:,} tokens, more than max_model_len {limits.max_model_len:,}.",
            "Raise --max-model-len or ask for less.",
        )
    each = capacity.request_blocks(pool, context)
    widest = max(pool.stage_block_bytes, default=0)
    needed = requests * each
    changes: dict[str, Any] = {
        "peak_concurrency": requests,
        "peak_context": context,
        "peak_kv_bytes": needed * widest,
    }
    if result.usable_blocks is not None:
        fits = needed <= result.usable_blocks
        changes |= {
            "peak_fits": fits or not pool.groups,
            "shortfall_bytes": max(0, needed - result.usable_blocks) * widest,
            "margin_bytes": (result.usable_blocks - needed) * widest,
            "max_concurrency_that_fits": capacity.concurrency_that_fits(pool, result.usable_blocks, context)
            if pool.groups
            else requests,
            "max_context_that_fits": capacity.longest_in_blocks(
                pool, result.usable_blocks, limits.max_model_len, requests
            )
            if pool.groups
            else limits.max_model_len,
        }
    if question.lengths:
        changes["expected_lengths"] = expected(
            pool, question.lengths, requests, context, result.usable_blocks
        )
    return msgspec.structs.replace(result, **changes)


def expected(
    pool: Pool, lengths: tuple[int, ...], requests: int, peak: int, usable: int | None
) -> dict[str, Any]:
    """What ``requests`` requests need if all had the mean, the p99 or the longest of the expected lengths."""
    ordered = sorted(lengths)
    widest = max(pool.stage_block_bytes, default=0)
    points = {
        "mean": -(-sum(ordered) // len(ordered)),
        "p50": ordered[(len(ordered) - 1) // 2],
        "p99": ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)],
        "max": ordered[-1],
        "peak": peak,
    }
    rows = []
    for name, length in points.items():
        blocks = requests * capacity.request_blocks(pool, length)
        rows.append(
            {
                "name": name,
                "tokens": length,
                "kv_bytes": blocks * widest,
                "fits": None if usable is None else blocks <= usable,
                "max_concurrency": None
                if usable is None
                else capacity.concurrency_that_fits(pool, usable, length),
            }
        )
    beyond = sum(1 for length in ordered if length > pool.limits.max_model_len)
    return {"requests": len(ordered), "rows": rows, "beyond_max_model_len": beyond}

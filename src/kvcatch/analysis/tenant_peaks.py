"""Tenants of an engine whose requests are not known one by one: shares of the pool from kvcatch's own exporter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcatch.sources.exported import Holdings

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TenantPeak:
    """One tenant at its largest while requests waited for blocks, where no request is known.

    others_blocks, others_running: of all other tenants at that moment. running counts are None where unknown.
    """

    tenant: str
    blocks: float
    share: float
    running: float | None
    others_blocks: float
    others_running: float | None
    unix: float


def while_blocked(
    holdings: Holdings, unix: Floats, seconds: Floats, blocked: Floats
) -> tuple[dict[str, tuple[float, float]], tuple[TenantPeak, ...]]:
    """Who held the pool while requests waited for blocks.

    Args:
        holdings: blocks by tenant over time.
        unix, seconds, blocked: rows of the engine's own series: when, for how long, how many waited for blocks.

    Returns:
        Tenant -> (mean share of the pool, unix seconds of its largest), and each tenant at its largest.
    """
    pressed = np.flatnonzero(np.nan_to_num(blocked) > 0)
    held, running, capacity = holdings.at(unix[pressed])
    tenants: dict[str, tuple[float, float]] = {}
    if not len(pressed) or not len(held):
        return tenants, ()
    nothing = np.full(len(pressed), np.nan)
    total = np.nansum(np.array(list(held.values())), axis=0)
    at_work = np.nansum(np.array([running.get(name, nothing) for name in held]), axis=0)
    weights = np.maximum(seconds[pressed], 1e-9)
    peaks = []
    for name, blocks in held.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.nan_to_num(np.where(capacity > 0, blocks / capacity, np.nan))
        worst = int(np.argmax(shares))
        when = float(unix[pressed[worst]])
        tenants[name] = (float((shares * weights).sum() / weights.sum()), when)
        own = float(running.get(name, nothing)[worst])
        if shares[worst] <= 0:
            continue
        peaks.append(
            TenantPeak(
                tenant=name, blocks=float(blocks[worst]), share=float(shares[worst]),
                running=None if np.isnan(own) else own, others_blocks=float(total[worst] - blocks[worst]),
                others_running=None if np.isnan(own) else float(at_work[worst] - own), unix=when,
            )
        )  # fmt: skip
    return tenants, tuple(sorted(peaks, key=lambda peak: -peak.share))

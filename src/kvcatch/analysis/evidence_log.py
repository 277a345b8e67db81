"""An engine's log as cases for the rules."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvcatch.analysis.evidence import Case, Floats, Series, blocked_by_usage
from kvcatch.events import EngineInfo, KVGroup
from kvcatch.sources.failures import Failures
from kvcatch.sources.logs import LogCapture, LogRow


def from_log(
    capture: LogCapture, failures: Failures, start: int | None = None, stop: int | None = None
) -> list[Case]:
    """A case per engine of a log; without periodic lines one case with what it says at start."""
    info = _with_groups(capture.info, failures)
    groups: dict[str, list[LogRow]] = {}
    for row in capture.rows:
        at = None if row.unix_seconds is None else row.unix_seconds * 1e9
        if at is not None and ((start is not None and at < start) or (stop is not None and at >= stop)):
            continue
        groups.setdefault(row.engine, []).append(row)
    cases = []
    for engine, rows in sorted(groups.items()) or [("0", [])]:
        target = capture.target if len(groups) < 2 else f"{capture.target}#engine={engine}"
        case = Case(
            target=target, kind="log", log=failures, info=info, engine=engine, loss=capture.loss,
            moment=capture.snapshot(),
        )  # fmt: skip
        if rows:
            case.series = _log_series(rows)
        cases.append(case)
    return cases


def _with_groups(info: EngineInfo, failures: Failures) -> EngineInfo:
    """The block sizes of KV groups where the log prints them; smaller blocks than the largest are windows or states."""
    sizes = failures.group_blocks
    if len(sizes) < 2 or min(sizes) <= 0:
        return info
    largest = max(sizes)
    groups = [
        KVGroup(kind="full" if size == largest else "other", layers=0, block_size=size) for size in sizes
    ]
    return msgspec.structs.replace(info, groups=tuple(groups), block_size=info.block_size or largest)


def _log_series(rows: Sequence[LogRow]) -> Series:
    stamps = [row.unix_seconds for row in rows]
    if None in stamps or len(set(stamps)) != len(stamps):
        # vLLM prints every ten seconds unless told otherwise.
        unix = np.arange(len(rows), dtype=np.float64) * 10.0
    else:
        unix = np.array(stamps, np.float64)
    seconds = np.diff(unix, prepend=unix[0] - 10.0)

    def column(name: str) -> Floats:
        return np.array([np.nan if getattr(row, name) is None else getattr(row, name) for row in rows])

    columns = {name: column(name) for name in ("running", "waiting", "hit_ratio", "deferred")}
    columns["usage"] = column("usage_ratio")
    columns["preemptions"] = column("preempted")
    columns["prefill_tokens"] = column("prompt_rate") * seconds
    columns["decode_tokens"] = column("generation_rate") * seconds
    columns["blocked"] = np.full(len(rows), np.nan)
    series = Series(unix, seconds, columns, steps=False)
    blocked_by_usage(series)
    return series

"""Lookups from request logs and traces: JSON lines with token ids, messages, or ids of prefix blocks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcatch.analysis.prefix import Ints, Lookups
from kvcatch.errors import KVCatchError
from kvcatch.sources.traces import read_workload
from kvcatch.workload import Workload

#: fields of a record that are looked at beside the prompt
_CACHED = ("cached_tokens", "num_cached_tokens")
_NAMES = ("request_id", "id", "i")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line, gzip or plain. Raises KVCatchError with the line that is none."""
    path = Path(path)
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if zipped else path.open("rb") as stream:
            lines = stream.read().decode("utf-8", errors="replace").splitlines()
    except (OSError, EOFError) as error:
        raise KVCatchError(f"cannot read {path}: {error}.") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            raise KVCatchError(
                f"{path} line {number}: not JSON.", "Each line must be one JSON object."
            ) from None
        if not isinstance(record, dict):
            raise KVCatchError(f"{path} line {number}: not a JSON object.")
        records.append(record)
    if not records:
        raise KVCatchError(f"{path}: empty file.", "Give a request log with one JSON object a line.")
    return records


def from_log(
    path: str | Path,
    *,
    block_size: int | None = None,
    usable: int | None = None,
    window_seconds: float = 60.0,
    tenant_key: str = "",
) -> Lookups:
    """The lookups of a log that names prompts by ids or characters. Raises KVCatchError."""
    workload = read_workload(path, tenant_key=tenant_key)
    records = read_records(path)
    if len(records) != len(workload):
        raise KVCatchError(
            f"{path}: {len(records)} lines but {len(workload)} requests.", "Give one request a line."
        )
    return look_at(
        workload, in_order(records), block_size=block_size, usable=usable, window_seconds=window_seconds
    )


def in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records by arrival, as the workload has them."""
    for name, scale in (("arrival_ns", 1), ("arrival_s", 1), ("arrival_time", 1), ("timestamp", 1)):
        if all(isinstance(record.get(name), int | float) for record in records):
            return sorted(records, key=lambda record: float(record[name]) * scale)
    return records


def look_at(
    workload: Workload,
    records: Sequence[dict[str, Any]],
    *,
    block_size: int | None = None,
    usable: int | None = None,
    window_seconds: float = 60.0,
) -> Lookups:
    """Lookups of a workload whose records may say more: cached tokens, engine, cache salt."""
    size = block_size or (workload.grain if workload.grain > 1 else 16)
    notes = list(workload.notes)
    if size % workload.grain:
        notes.append(f"sharing below {workload.grain} tokens is unknown; blocks of {size} are cut from it")
    hit = None
    if all(any(isinstance(record.get(name), int) for name in _CACHED) for record in records):
        hit = np.array(
            [next(record[n] for n in _CACHED if isinstance(record.get(n), int)) for record in records],
            np.int64,
        )
        broken = int((hit > workload.prompt_tokens).sum())
        if broken:
            notes.append(f"{broken} requests have more cached than prompt tokens; counted as all cached")
    return Lookups(
        workload=workload,
        names=[_name(record, number) for number, record in enumerate(records)],
        block_size=size,
        usable=usable,
        hit=hit,
        engine=_codes(records, ("engine", "server", "upstream", "instance")),
        salt=_codes(records, ("cache_salt", "lora", "lora_name")),
        window_seconds=window_seconds,
        notes=notes,
    )


def _name(record: dict[str, Any], number: int) -> str:
    return next((str(record[name]) for name in _NAMES if name in record), f"line {number + 1}")


def _codes(records: Sequence[dict[str, Any]], names: tuple[str, ...]) -> Ints | None:
    """Numbers for the values of the first field that any record has; None when all are alike."""
    values = [
        next((str(record[name]) for name in names if record.get(name) is not None), "") for record in records
    ]
    known = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([known[value] for value in values], np.int64) if len(known) > 1 else None

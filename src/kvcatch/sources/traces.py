"""Readers of public trace formats and request logs: each gives a ``Workload``.

The format is recognised from the first record. Malformed records are refused with their line number.
"""

from __future__ import annotations

import csv
import datetime as dt
import gzip
import io
import itertools
import json
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.workload import Workload, build

Row = dict[str, Any]
#: a note of workloads whose tenants are people
USERS = "tenants are the records' users"
_MAX_BYTES = 1 << 30
_HINT = "Known: Mooncake, Bailian, Azure CSV, LMBench, ShareGPT JSON, request logs (messages or token ids)."


def read_workload(path: str | Path, *, trace_block_size: int | None = None, tenant_key: str = "") -> Workload:
    """Read a trace file, gzip or plain.

    Args:
        path: the file.
        trace_block_size: tokens behind one id, where the format leaves it open.
        tenant_key: field of a record that names its tenant; by default ``tenant``, ``user`` or ``type``.

    Raises:
        KVCatchError: the file is missing, of no known format, or a record contradicts itself.
    """
    path = Path(path)
    text = _text(path)
    stripped = text.lstrip("\ufeff \t\r\n")
    if not stripped:
        raise KVCatchError(f"{path}: empty file.", _HINT)
    if stripped[0] == "[":
        return _sharegpt(path.name, _whole(path, stripped))
    if stripped[0] != "{":
        return _azure(path.name, path, stripped)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    records = [_record(path, number, line) for number, line in lines]
    reader = _pick(path, records[0])
    rows: list[Row] = []
    chosen = trace_block_size or _default_block_size(records)
    for (number, _), record in zip(lines, records, strict=True):
        try:
            row = reader(record, chosen)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise KVCatchError(
                f"{path} line {number}: {type(error).__name__} {error}.",
                "The record lacks or garbles a field.",
            ) from None
        if row["prompt"] < 1 or row["output"] < 0:
            raise KVCatchError(
                f"{path} line {number}: {row['prompt']} prompt and {row['output']} output tokens.",
                "A request needs at least one prompt token.",
            )
        if any(tokens < 1 or not isinstance(identity, Hashable) for identity, tokens in row["segments"]):
            raise KVCatchError(
                f"{path} line {number}: an id that is a list, or a piece of no tokens.",
                "Ids are numbers or strings, and every piece of a prompt has a token.",
            )
        row["tenant"] = _tenant(record, tenant_key)
        rows.append(row)
    grain = 1 if reader in (_segments, _token_ids) else _CHARS if reader is _messages else chosen
    notes = []
    if reader is _messages:
        notes.append(f"token counts estimated at {_CHARS} characters a token")
    if not tenant_key and any("user" in record and "tenant" not in record for record in records):
        notes.append(USERS)
    if any(isinstance(record.get("timestamp"), str) for record in records):
        notes.append("timestamps were strings")
    return build(path.name, rows, grain=grain, notes=notes)


def _text(path: Path) -> str:
    if not path.is_file():
        raise KVCatchError(f"{path}: no such file.", "Give the path of a trace.")
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if zipped else path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except (OSError, EOFError) as error:
        raise KVCatchError(f"{path}: cannot be read ({error}).", "Fetch the file again.") from None
    if len(data) > _MAX_BYTES:
        raise KVCatchError(f"{path}: more than 1 GiB of text.", "Cut the trace into pieces.")
    return data.decode("utf-8", errors="replace")


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        raise KVCatchError(f"{path} line {number}: not JSON.", "Each line must be one JSON object.") from None
    if not isinstance(record, dict):
        raise KVCatchError(f"{path} line {number}: not a JSON object.", "Each line must be one JSON object.")
    return record


def _whole(path: Path, text: str) -> list[Any]:
    try:
        records: list[Any] = json.loads(text)
    except ValueError as error:
        raise KVCatchError(f"{path}: not JSON ({error}).", _HINT) from None
    if not records or not all(isinstance(record, dict) for record in records):
        raise KVCatchError(f"{path}: not a list of JSON objects.", _HINT)
    return records


def _pick(path: Path, record: Row) -> Callable[[Row, int], Row]:
    if "prefix_segments" in record:
        return _segments
    if "hash_ids" in record and "last_block_tokens" in record:
        return _hash_ids_tail
    if "hash_ids" in record:
        return _hash_ids
    if "prompt_token_ids" in record or "input_ids" in record or "token_ids" in record:
        return _token_ids
    if "messages" in record or "prompt" in record:
        return _messages
    raise KVCatchError(f"{path}: fields {sorted(record)[:8]} fit no known trace format.", _HINT)


def _default_block_size(records: list[Row]) -> int:
    """512 for Mooncake, 16 for Bailian, which carries chat ids; else what the lengths say."""
    first = records[0]
    if isinstance(first.get("block_size"), int) and first["block_size"] > 0:
        return int(first["block_size"])
    if "last_block_tokens" in first:
        tails = [record.get("last_block_tokens") for record in records]
        return max([tail for tail in tails if isinstance(tail, int) and tail > 0], default=512)
    if "chat_id" in first or "parent_chat_id" in first:
        return 16
    sized = [(record.get("input_length"), record.get("hash_ids")) for record in records]
    usable = [
        (n, len(ids)) for n, ids in sized if isinstance(n, int) and isinstance(ids, list) and len(ids) > 1
    ]
    if usable:
        for guess in (512, 64, 16, 32, 128, 256):
            if all(-(-n // guess) == count for n, count in usable):
                return guess
    return 512


def _first(record: Row, *names: str) -> Any:
    """The first of the fields that the record has, 0 without any."""
    return next((record[name] for name in names if name in record), 0)


def _int(record: Row, *names: str) -> int:
    return int(_first(record, *names))


def _seconds(record: Row) -> float:
    """Arrival in seconds: Bailian counts seconds, Mooncake milliseconds, LMBench nanoseconds in strings."""
    for key, scale in (("arrival_ns", 1e-9), ("arrival_s", 1.0), ("arrival_time", 1.0)):
        if key in record:
            return float(record[key]) * scale
    value = record.get("timestamp", 0)
    if isinstance(value, str):
        if value.replace(".", "", 1).isdigit():
            return float(value) * (1e-9 if len(value.split(".")[0]) > 15 else 1.0)
        return _clock(value)
    return float(value) * (1.0 if "chat_id" in record else 1e-3)


def _clock(text: str) -> float:
    """Seconds since 1970 of a date with a time; more than six decimals are cut."""
    head, dot, fraction = text.strip().partition(".")
    moment = dt.datetime.fromisoformat(head)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    digits = "".join(itertools.takewhile(str.isdigit, fraction)) if dot else ""
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _hash_ids(record: Row, block_size: int) -> Row:
    prompt = _int(record, "input_length", "input_tokens")
    ids = list(record["hash_ids"])
    prompt = prompt or len(ids) * block_size
    scope = (
        (record.get("session_id", record.get("chat_id")),) if record.get("hash_id_scope") == "local" else ()
    )
    segments = []
    left = prompt
    for identity in ids:
        take = min(block_size, left)
        if take <= 0:
            break
        segments.append(((*scope, identity) if scope else identity, take))
        left -= take
    if left > 0:
        # Sparse hashes: the tail that no id covers is shared with nobody.
        segments.append((object(), left))
    return {
        "arrival": _seconds(record),
        "prompt": prompt,
        "output": _int(record, "output_length", "output_tokens"),
        "segments": segments,
    }


def _hash_ids_tail(record: Row, block_size: int) -> Row:
    ids, tail = list(record["hash_ids"]), int(record["last_block_tokens"])
    lengths = [block_size] * (len(ids) - 1) + [tail]
    return {
        "arrival": float(_first(record, "arrival_s", "i")),
        "prompt": sum(lengths),
        "output": int(record["output_tokens"]),
        "segments": list(zip(ids, lengths, strict=True)),
    }


def _segments(record: Row, _block_size: int) -> Row:
    segments = [(int(identity), int(tokens)) for identity, tokens in record["prefix_segments"]]
    return {
        "arrival": _seconds(record),
        "prompt": sum(tokens for _, tokens in segments),
        "output": _int(record, "output_tokens"),
        "segments": segments,
    }


def _token_ids(record: Row, _block_size: int) -> Row:
    tokens = record.get("prompt_token_ids") or record.get("input_ids") or record["token_ids"]
    return {
        "arrival": _seconds(record),
        "prompt": len(tokens),
        "output": _int(record, "output_tokens", "max_tokens"),
        "segments": [(int(token), 1) for token in tokens],
    }


_CHARS = 4


def _messages(record: Row, _block_size: int) -> Row:
    """Text is only compared, four characters a token, and never kept."""
    if "messages" in record:
        text = "\n".join(f"{m.get('role', '')}:{m['content']}" for m in record["messages"])
    else:
        text = str(record["prompt"])
    return {
        "arrival": _seconds(record),
        "output": _int(record, "output_tokens", "max_tokens"),
        **_characters(text),
    }


def _characters(text: str) -> Row:
    pieces = [hash(text[start : start + _CHARS]) for start in range(0, len(text), _CHARS)] or [0]
    return {"prompt": len(pieces), "segments": [(piece, 1) for piece in pieces]}


def _sharegpt(name: str, records: list[Any]) -> Workload:
    """Conversations: every answer is one request whose prompt is all that was said before it."""
    rows: list[Row] = []
    for index, record in enumerate(records):
        said = ""
        for turn in record.get("conversations", []):
            value = str(turn.get("value", ""))
            if turn.get("from") in ("gpt", "assistant", "bard") and said:
                row = _characters(said)
                rows.append({"arrival": float(index), "output": max(1, len(value) // _CHARS), **row})
            said += f"{turn.get('from', '')}:{value}\n"
    if not rows:
        raise KVCatchError(f"{name}: no conversation with an answer in it.", _HINT)
    return build(name, rows, grain=1, notes=[f"token counts estimated at {_CHARS} characters a token"])


def _azure(name: str, path: Path, text: str) -> Workload:
    reader = csv.DictReader(io.StringIO(text))
    needed = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not needed <= set(reader.fieldnames or ()):
        raise KVCatchError(f"{path}: columns {reader.fieldnames} fit no known trace format.", _HINT)
    return build(
        name, list(_azure_rows(path, reader)), grain=1, notes=["lengths only: no prefix can be shared"]
    )


def _azure_rows(path: Path, reader: csv.DictReader[str]) -> Iterator[Row]:
    for number, record in enumerate(reader, 2):
        try:
            prompt, output = int(record["ContextTokens"]), int(record["GeneratedTokens"])
            arrival = _clock(record["TIMESTAMP"])
        except (TypeError, ValueError) as error:
            raise KVCatchError(f"{path} line {number}: {error}.", "The row is damaged.") from None
        if prompt > 0:
            yield {"arrival": arrival, "prompt": prompt, "output": output, "segments": [(number, prompt)]}


def _tenant(record: Row, key: str) -> str:
    for name in (key,) if key else ("tenant", "user", "type"):
        if name in record:
            return str(record[name])
    return ""

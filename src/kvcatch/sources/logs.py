"""Engine logs as a ``Capture``: the periodic line over time, and the facts printed at start-up.

Wordings of vLLM from 0.2 to 0.33 and of SGLang. A log line has no year and no zone: the file's own time
gives the year, and the clock is taken to be this machine's.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from kvcatch import __version__
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.results import Latency, LossView, Pool, Preemption, Prefix, Queues, RequestView, Snapshot
from kvcatch.store.base import SAMPLE_COLUMNS, Capture, Columns

NEVER_KNOWN = ("requests", "tenants", "cached_blocks", "free_blocks", "recomputed_tokens", "bound_by", "ttft")
#: a log line longer than this is not one of ours
_MAX_LINE = 1 << 16

_NUMBER = r"([\d.]+)"
_STAMP = re.compile(r"\b(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_PERIODIC = re.compile(
    r"(?:Engine (?P<engine>\d+): )?Avg prompt throughput: " + _NUMBER.replace("(", "(?P<prompt>", 1)
    + r" tokens/s, Avg generation throughput: (?P<generation>[\d.]+) tokens/s, Running: (?P<running>\d+) reqs, "
    r"(?:Swapped: (?P<swapped>\d+) reqs, )?(?:Pending|Waiting): (?P<waiting>\d+) reqs"
    r"(?:, Deferred: (?P<deferred>\d+) reqs)?(?:, KV fetch: [^%]*?completed waiting)?(?:, Preemptions: (?P<preempted>\d+))?"
    r", \w+ KV cache usage: (?P<usage>[\d.]+)%"
    r"(?:, CPU KV cache usage: [\d.]+%)?(?:, Prefix cache hit rate: (?P<hits>[\d.]+)%)?"
)  # fmt: skip
_SGLANG = re.compile(
    r"Decode batch[^,]*, #running-req: (?P<running>\d+), #(?:full )?token: (?P<tokens>\d+), "
    r"(?:full )?token usage: (?P<usage>[\d.]+)"
)
_SGLANG_RATE = re.compile(r"gen throughput \(token/s\): (?P<generation>[\d.]+)")
_SGLANG_QUEUE = re.compile(r"#queue-req: (?P<waiting>\d+)")
_OLD_HITS = re.compile(r"Prefix cache hit rate: GPU: (?P<hits>-?[\d.]+)%")
_CUMULATIVE = re.compile(r"is preempted by PreemptionMode\.\w+.*total_num_cumulative_preemption=(\d+)")

#: fact -> pattern of the line that states it; numbers may carry thousands separators
_FACTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("version", re.compile(r"\(v(\d[\w.+]*)\) with config|\bversion (\d+\.[\w.+]+)\s*$")),
    ("model", re.compile(r"with config: model='([^']+)'|█.*\bmodel\s+(\S+)\s*$")),
    ("num_blocks", re.compile(r"# (?:GPU|CPU|HPU|XPU|\w+) blocks: (\d+)")),
    ("num_blocks", re.compile(r"\bnum_(?:gpu_)?blocks['\"]?[=:] ?(\d+)")),
    ("num_blocks_override", re.compile(r"num_gpu_blocks_override'?[=:] ?(\d+)")),
    ("kv_cache_tokens", re.compile(r"\w+ KV cache size: ([\d,]+) tokens")),
    ("kv_cache_tokens", re.compile(r"KV Cache is allocated\. #tokens: (\d+)")),
    ("max_concurrency", re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")),
    ("max_model_len", re.compile(r"Maximum concurrency for ([\d,]+) tokens per request")),
    ("max_model_len", re.compile(r"Using max model len (\d+)")),
    ("available_kv_gib", re.compile(r"Available KV cache memory: ([\d.]+) GiB")),
    ("available_kv_gib", re.compile(r"reserved for KV Cache is ([\d.]+)GiB")),
    ("available_kv_gib", re.compile(r"kv_cache_size=([\d.]+)GiB")),
    ("weights_gib", re.compile(r"Model loading took ([\d.]+) (?:GiB|GB)")),
    ("weights_gib", re.compile(r"model weights take ([\d.]+)GiB")),
    ("weights_gib", re.compile(r"Loading model weights took ([\d.]+) GB")),
    ("activation_gib", re.compile(r"PyTorch activation peak memory takes ([\d.]+)GiB")),
    ("non_torch_gib", re.compile(r"non_torch(?:_memory takes |_memory=)([\d.]+)GiB")),
    ("total_gpu_gib", re.compile(r"total_gpu_memory(?: \(|=)([\d.]+)GiB")),
    ("block_size", re.compile(r"Setting attention block size to (\d+) tokens")),
    ("block_size", re.compile(r"'block_size': (\d+)")),
    ("max_num_seqs", re.compile(r"'max_num_seqs': (\d+)")),
    ("max_num_batched_tokens", re.compile(r"max_num_batched_tokens'?[=:] ?(\d+)")),
    ("prefix_caching", re.compile(r"enable_prefix_caching=(True|False)")),
    ("kv_cache_dtype", re.compile(r"kv_cache_dtype=(\w+)")),
    ("longest_that_fits", re.compile(r"estimated maximum model length is (\d+)")),
    ("longest_that_fits", re.compile(r"can be stored in KV cache \((\d+)\)")),
)


class LogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One periodic line. Ratios are 0 to 1; None is not printed."""

    engine: str
    unix_seconds: float | None
    running: int
    waiting: int | None = None
    deferred: int | None = None
    swapped: int | None = None
    preempted: int | None = None
    usage_ratio: float | None = None
    hit_ratio: float | None = None
    prompt_rate: float | None = None
    generation_rate: float | None = None
    tokens: int | None = None


class LogCapture(Capture):
    """What one log file says."""

    def __init__(self, target: str, lines: Iterable[str], file_unix_seconds: float) -> None:
        self.target = target
        self.facts: dict[str, str] = {}
        self.rows: list[LogRow] = []
        self.preemptions: int | None = None
        self._year = time.localtime(file_unix_seconds).tm_year
        for line in lines:
            self._line(line[:_MAX_LINE])
        self.info = self._describe()

    def _line(self, line: str) -> None:
        row = _row(line, self._stamp(line))
        if row is not None:
            self.rows.append(row)
            if row.preempted is not None:
                self.preemptions = (self.preemptions or 0) + row.preempted
            return
        old = _OLD_HITS.search(line)
        if old and self.rows and not old.group("hits").startswith("-"):
            self.rows[-1] = msgspec.structs.replace(self.rows[-1], hit_ratio=float(old.group("hits")) / 100)
            return
        total = _CUMULATIVE.search(line)
        if total:
            self.preemptions = int(total.group(1))
            return
        for name, pattern in _FACTS:
            match = pattern.search(line)
            if match:
                # The first line that states a fact is the engine's own; later ones repeat or correct workers.
                value = next(group for group in match.groups() if group)
                self.facts.setdefault(name, value.replace(",", ""))

    def _stamp(self, line: str) -> float | None:
        match = _STAMP.search(line)
        if match is None:
            return None
        year, *rest = match.groups()
        month, day, hour, minute, second = (int(part) for part in rest)
        try:
            return (
                datetime(int(year or self._year), month, day, hour, minute, second).astimezone().timestamp()
            )
        except ValueError:
            return None

    def _describe(self) -> EngineInfo:
        facts = self.facts
        block_size = _int(facts.get("block_size")) or 0
        blocks = _int(facts.get("num_blocks_override")) or _int(facts.get("num_blocks")) or 0
        tokens = _int(facts.get("kv_cache_tokens"))
        if not blocks and tokens and block_size and tokens % block_size == 0:
            # With one KV group the printed size is blocks x block size, null block included.
            blocks = tokens // block_size
        caching = {"True": True, "False": False}.get(facts.get("prefix_caching", ""))
        return EngineInfo(
            engine="sglang" if any(row.tokens is not None for row in self.rows) else "vllm",
            engine_version=facts.get("version", "unknown"),
            adapter="log",
            model=facts.get("model"),
            num_blocks=blocks,
            block_size=block_size,
            kv_cache_dtype=facts.get("kv_cache_dtype"),
            prefix_caching=caching,
            max_model_len=_int(facts.get("max_model_len")),
            max_num_seqs=_int(facts.get("max_num_seqs")),
            max_num_batched_tokens=_int(facts.get("max_num_batched_tokens")),
            dp_size=max(1, len({row.engine for row in self.rows})),
            config=dict(facts),
            unknown=NEVER_KNOWN,
        )

    def refresh(self) -> None:
        """Nothing: a log is read once."""

    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        """The newest line of each engine added up, maxima over the window."""
        newest = {row.engine: row for row in self.rows}
        if not newest:
            return Snapshot(
                kvcatch_version=__version__, target=self.target, state="ended", source="scrape",
                engine=self.info.engine, model=self.info.model, pool=self._pool(None, []), loss=self.loss,
            )  # fmt: skip
        stamp = max((row.unix_seconds or 0.0 for row in newest.values()), default=0.0) or None
        window = [
            row for row in self.rows
            if stamp is None or row.unix_seconds is None or row.unix_seconds > stamp - window_seconds
        ]  # fmt: skip
        now = list(newest.values())
        usage = sum(row.usage_ratio or 0.0 for row in now) / len(now)
        waiting = _total([row.waiting for row in now])
        version = self.info.engine_version
        return Snapshot(
            kvcatch_version=__version__,
            target=self.target,
            state="ended",
            source="scrape",
            engine=self.info.engine,
            engine_version=None if version == "unknown" else version,
            model=self.info.model,
            unix_seconds=stamp,
            pool=self._pool(usage, window),
            queues=Queues(
                running=_total([row.running for row in now]),
                waiting=waiting,
                waiting_for_blocks=0 if waiting == 0 else None,
                waiting_other=_total([row.deferred for row in now]),
                running_max=max(row.running for row in window),
                waiting_max=max((row.waiting for row in window if row.waiting is not None), default=None),
            ),
            prefix=Prefix(hit_ratio=now[0].hit_ratio if len(now) == 1 else None),
            preemption=Preemption(preemptions=self.preemptions),
            latency=Latency(
                output_tokens_per_second=_total([row.generation_rate for row in now]),
                prompt_tokens_per_second=_total([row.prompt_rate for row in now]),
            ),
            loss=self.loss,
        )

    def _pool(self, usage: float | None, window: list[LogRow]) -> Pool:
        usable = self.info.usable_blocks or None
        most = max((row.usage_ratio for row in window if row.usage_ratio is not None), default=None)
        return Pool(
            num_blocks=usable,
            block_size=self.info.block_size or None,
            active_blocks=_share(usage, usable),
            active_blocks_max=_share(most, usable),
            utilization_ratio=usage,
        )

    def samples(self, start: int | None = None, stop: int | None = None) -> Columns:
        """One row per periodic line; what a log does not print is NaN."""
        rows = [row for row in self.rows if _inside(row.unix_seconds, start, stop)]
        columns: Columns = {name: np.full(len(rows), np.nan) for name in SAMPLE_COLUMNS}
        columns["unix_ns"] = np.array(
            [round((row.unix_seconds or 0.0) * 1e9) for row in rows], dtype=np.int64
        )
        columns["step"] = np.arange(len(rows), dtype=np.int64)
        usable = self.info.usable_blocks or None
        for index, row in enumerate(rows):
            values = {
                "running": row.running,
                "waiting": row.waiting,
                "deferred": row.deferred,
                "active_blocks": _share(row.usage_ratio, usable),
                "held_tokens": row.tokens,
                "preemptions": row.preempted,
            }
            for name, value in values.items():
                if value is not None:
                    columns[name][index] = value
        return columns

    def requests(self) -> list[RequestView]:
        """Empty: the periodic lines name no request."""
        return []

    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        """The facts first, then every periodic line."""
        if start is None:
            yield {"kind": "log_facts", "unix_ns": 0, **self.facts}
        for row in self.rows:
            if _inside(row.unix_seconds, start, stop):
                record = {
                    name: value for name, value in msgspec.structs.asdict(row).items() if value is not None
                }
                yield {"kind": "log", "unix_ns": round((record.pop("unix_seconds", 0.0)) * 1e9), **record}

    @property
    def loss(self) -> LossView:
        """What a log cannot say."""
        warnings = ["block counts are usage in percent, to one decimal, times the pool"]
        if self.rows and all(row.unix_seconds is None for row in self.rows):
            warnings.append("no time stamps")
        return LossView(unknown=NEVER_KNOWN, warnings=tuple(warnings))


def _row(line: str, stamp: float | None) -> LogRow | None:
    match = _PERIODIC.search(line)
    if match is not None:
        got = match.groupdict()
        return LogRow(
            engine=str(int(got["engine"] or 0)),
            unix_seconds=stamp,
            running=int(got["running"]),
            waiting=int(got["waiting"]),
            deferred=_int(got["deferred"]),
            swapped=_int(got["swapped"]),
            preempted=_int(got["preempted"]),
            usage_ratio=float(got["usage"]) / 100,
            hit_ratio=None if got["hits"] is None else float(got["hits"]) / 100,
            prompt_rate=float(got["prompt"]),
            generation_rate=float(got["generation"]),
        )
    match = _SGLANG.search(line)
    if match is None:
        return None
    rate, queue = _SGLANG_RATE.search(line), _SGLANG_QUEUE.search(line)
    return LogRow(
        engine="0",
        unix_seconds=stamp,
        running=int(match.group("running")),
        waiting=int(queue.group("waiting")) if queue else None,
        usage_ratio=float(match.group("usage")),
        generation_rate=float(rate.group("generation")) if rate else None,
        tokens=int(match.group("tokens")),
    )


def _int(text: str | None) -> int | None:
    return int(text) if text else None


def _total(values: list[Any]) -> Any:
    return None if any(value is None for value in values) else sum(values)


def _share(ratio: float | None, blocks: int | None) -> int | None:
    return round(ratio * blocks) if ratio is not None and blocks else None


def _inside(seconds: float | None, start: int | None, stop: int | None) -> bool:
    nanoseconds = round((seconds or 0.0) * 1e9)
    return (start is None or nanoseconds >= start) and (stop is None or nanoseconds < stop)


def looks_like_log(head: str) -> bool:
    """True when the first lines of a file are an engine's log."""
    return bool(
        _PERIODIC.search(head) or _SGLANG.search(head)
        or re.search(r"\b(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d|level=\w+ name=vllm", head)
        or any(pattern.search(head) for _, pattern in _FACTS)
    )  # fmt: skip


def open_log(path: str) -> LogCapture:
    """A log file of an engine. Raises KVCatchError when it cannot be read or says nothing we know."""
    try:
        changed = os.path.getmtime(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            capture = LogCapture(path, file, changed)
    except OSError as error:
        raise KVCatchError(f"{path}: {error.strerror}.") from None
    if not capture.rows and not capture.facts:
        raise KVCatchError(
            f"{path}: no line of a vLLM or SGLang log that says anything about the KV cache.",
            "Give the log of the server, from its start if possible.",
        )
    return capture

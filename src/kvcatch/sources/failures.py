"""What an engine's log says when something went wrong: out-of-memory texts, refusals, memory that did not add up.

The load over time is read by ``sources/logs.py``. Wordings of vLLM 0.2 to 0.33 and of PyTorch. Sizes are bytes.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from kvcatch.errors import KVCatchError
from kvcatch.units import parse_size

_MAX_BYTES = 1 << 30
_SIZE = r"([\d.]+ ?[KMGT]i?B)"
_OOM = re.compile(rf"out of memory\. Tried to allocate {_SIZE}", re.IGNORECASE)
_OOM_PARTS = {
    "total": re.compile(rf"total capacity of {_SIZE}|{_SIZE} total capacity"),
    "free": re.compile(rf"of which {_SIZE} is free|{_SIZE} free"),
    "in_use": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated"),
    "private": re.compile(rf"with {_SIZE} allocated in private pools"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{_SIZE} reserved in total by PyTorch"),
}
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_FRAME = re.compile(r'File "[^"]*", line \d+, in (\w+)')
_DUMMIES = re.compile(r"warming up (?:sampler|pooler)[^\d]*(\d+) dummy requests")
_REFUSED = re.compile(
    r"serve at least one request with the models?'s? max seq len \((\d+)\), \(([\d.]+) GiB KV\s*cache is needed, "
    r"which is larger than the available KV cache memory \(([\d.]+) GiB\)"
)
_REFUSED_FITS = re.compile(r"estimated maximum model length is (\d+)")
_REFUSED_V0 = re.compile(
    r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((\d+)\)"
)
_PROFILE = re.compile(
    r"Error in memory profiling\. Initial (?:free memory|used memory) ([\d.]+)(?: GiB)?, "
    r"current (?:free memory|used memory) ([\d.]+)"
)
_START = re.compile(
    r"Free memory on device (?:\S+ )?\(([\d.]+)/([\d.]+) GiB\) on startup.*?"
    r"(?:utilization \(([\d.]+), ([\d.]+) GiB\)|utilization is \(([\d.]+), ([\d.]+) GiB\))"
)
_MULTIMODAL = re.compile(r"(\d[\d,]*) (?:tokens )?(?:worst case|is less than the total number of multimodal)")
_TIME = re.compile(
    r"\b(\d{2})-(\d{2}) (\d{2}):(\d{2}):(\d{2})\b|\b(\d{4}-\d{2}-\d{2})[T ](\d{2}:\d{2}:\d{2})"
)
_ARGS = re.compile(r"non-default args: (\{.*\})")
_CAP = 200  # frames of one traceback and findings of one kind that are kept


@dataclass
class OutOfMemory:
    """One CUDA out-of-memory text, with the functions of the traceback before it."""

    requested: int
    total: int | None = None
    free: int | None = None
    in_use: int | None = None
    allocated: int | None = None
    private: int | None = None
    unallocated: int | None = None
    others: list[tuple[int, int]] = field(default_factory=list)  # (pid, bytes)
    frames: tuple[str, ...] = ()
    dummy_requests: int | None = None
    unix_seconds: float | None = None
    line: int = 0


@dataclass
class Failures:
    """Everything a log told about memory and settings. GiB where vLLM prints GiB with two decimals."""

    name: str
    num_blocks: int | None = None
    kv_tokens: int | None = None
    available_kv: dict[str, int] = field(default_factory=dict)  # worker -> bytes, of the last start
    weights: int | None = None
    graphs: int | None = None
    activation_peak: int | None = None
    non_torch: int | None = None
    total: int | None = None
    utilization: float | None = None
    args: dict[str, object] = field(default_factory=dict)  # what was asked for
    config: dict[str, str] = field(default_factory=dict)  # what is in effect
    oom: list[OutOfMemory] = field(default_factory=list)
    refused: tuple[int, float | None, float | None, int | None] | None = (
        None  # max len, GiB needed, GiB there, fits
    )
    no_memory: bool = False
    profile: tuple[float, float] | None = None  # GiB before, GiB after
    start_memory: tuple[float, float, float, float] | None = None  # free, total GiB, utilisation, wanted GiB
    preemptions: int | None = None
    swapping: bool = False
    attention_block: int | None = None
    mamba_block: int | None = None  # tokens from one kept state to the next
    mamba_mode: str | None = None
    group_blocks: tuple[int, ...] = ()  # tokens of a block, KV group by KV group
    speculative: str | None = None  # method of speculative decoding
    padding: tuple[int, float] | None = None
    multimodal: int | None = None
    random_seed: bool = False
    external_hits: list[tuple[int, int, int]] = field(default_factory=list)  # total, hit, need to load
    chunk_size: int | None = None
    started: bool = False


def read_failures(path: str | Path) -> Failures:
    """Read a log file. Raises KVCatchError when it cannot be read."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if size > _MAX_BYTES:
                file.seek(size - _MAX_BYTES)
            text = file.read().decode("utf-8", errors="replace")
        year = time.localtime(path.stat().st_mtime).tm_year
    except OSError as error:
        raise KVCatchError(f"cannot read {path}: {error.strerror}.") from error
    return parse_failures(text.splitlines(), name=str(path), year=year)


def parse_failures(lines: Iterable[str], name: str = "log", year: int | None = None) -> Failures:
    """The facts in the lines of a log."""
    log = Failures(name)
    frames: list[str] = []
    year = year or time.localtime().tm_year
    stamp: float | None = None
    pending: OutOfMemory | None = None
    for number, raw in enumerate(lines, 1):
        line = raw.rstrip("\n")[:20_000]
        stamp = line_time(line, year) or stamp
        frame = _FRAME.search(line)
        if frame:
            frames.append(frame.group(1))
            del frames[:-_CAP]
            continue
        oom = _oom(line)
        if oom is not None and len(log.oom) < _CAP:
            oom.frames, oom.unix_seconds, oom.line = tuple(frames), stamp, number
            # Each rank, and the parent once more, prints the same text.
            same = [old for old in log.oom if (old.requested, old.in_use) == (oom.requested, oom.in_use)]
            if not same:
                log.oom.append(oom)
            pending = same[0] if same else oom
            frames = []
        dummies = _DUMMIES.search(line)
        if dummies and pending is not None:
            pending.dummy_requests = int(dummies.group(1))
        if "Traceback (most recent call last)" in line:
            frames = []
        _facts(log, line)
    return log


def line_time(line: str, year: int) -> float | None:
    """Unix seconds of a log line's stamp, which has no year and this machine's zone; None without one."""
    match = _TIME.search(line, 0, 200)
    if match is None:
        return None
    try:
        if match.group(6):
            return datetime.fromisoformat(f"{match.group(6)}T{match.group(7)}").timestamp()
        month, day, hour, minute, second = (int(part) for part in match.groups()[:5])
        return datetime(year, month, day, hour, minute, second).timestamp()
    except (ValueError, OverflowError):
        return None


def _oom(line: str) -> OutOfMemory | None:
    match = _OOM.search(line)
    if match is None:
        return None
    oom = OutOfMemory(requested=parse_size(match.group(1)))
    for name, pattern in _OOM_PARTS.items():
        found = pattern.search(line)
        if found:
            size = parse_size(next(group for group in found.groups() if group))
            if name == "reserved":
                oom.unallocated = size - (oom.allocated or size)
            else:
                setattr(oom, name, size)
    for pid, size_text in _OTHERS.findall(line):
        oom.others.append((int(pid), parse_size(size_text)))
    return oom


def _number(text: str) -> int:
    return int(text.replace(",", ""))


_GIB = 1 << 30
#: pattern -> (field, scale); sizes in GiB become bytes
_SIMPLE: tuple[tuple[re.Pattern[str], str, float], ...] = (
    (re.compile(r"(?:GPU|CPU|XPU) KV cache size: ([\d,]+) tokens"), "kv_tokens", 1),
    (re.compile(r"# (?:GPU|CPU|cuda|xpu) blocks: (\d+)"), "num_blocks", 1),
    (re.compile(r"KV Cache is allocated\. #tokens: (\d+)"), "kv_tokens", 1),
    (re.compile(r"(?:Model loading took|Loading model weights took|model weights take) ([\d.]+) ?Gi?B"), "weights", _GIB),
    (re.compile(r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB"), "graphs", _GIB),
    (re.compile(r"PyTorch activation peak memory takes ([\d.]+) ?GiB"), "activation_peak", _GIB),
    (re.compile(r"non_torch_memory takes ([\d.]+) ?GiB"), "non_torch", _GIB),
    (re.compile(r"total_gpu_memory (?:\(|=)([\d.]+) ?GiB"), "total", _GIB),
    (re.compile(r"Setting attention block size to (\d+) tokens"), "attention_block", 1),
    (re.compile(r"\bmamba[-_]block[-_]size['\"]?[=: ]+(\d+)"), "mamba_block", 1),
    (re.compile(r"total_num_cumulative_preemption=(\d+)"), "preemptions", 1),
    (re.compile(r"\bchunk_size['\"]?[=:] ?(\d+)"), "chunk_size", 1),
)  # fmt: skip


_WORDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("mamba_mode", re.compile(r"[Mm]amba[-_ ]cache[-_ ](?:mode|'(?=\w+' mode))(?: is set to|['\"]?[=:])?[ '\"]*(all|align|none)\b")),
    ("speculative", re.compile(r"speculative[-_]config\W.{0,60}?method\W{1,6}(\w+)")),
)  # fmt: skip
_GROUPS = re.compile(r"group_block_sizes['\"]?[=:] ?[(\[]([\d, ]+)[)\]]")
#: switches that count when they stand on a command line in the log
_SWITCHES = ("kv_cache_metrics", "disable_log_stats")


def _facts(log: Failures, line: str) -> None:
    for pattern, name, scale in _SIMPLE:
        match = pattern.search(line)
        if match:
            setattr(log, name, int(float(match.group(1).replace(",", "")) * scale))
    match = re.search(r"Available KV cache memory: ([\d.]+) GiB", line)
    if match:
        worker = re.search(r"\((?:Ray)?Worker\w*?_?((?:[A-Z]+\d+_?)+|rank \d+)|\((\w+ pid=\d+)", line)
        name = (worker.group(1) or worker.group(2)) if worker else str(len(log.available_kv))
        if log.started or name in log.available_kv:
            # The engine was started again.
            log.available_kv.clear()
            log.started = False
        if len(log.available_kv) < _CAP:
            log.available_kv[name] = int(float(match.group(1)) * _GIB)
    elif "KV cache size:" in line:
        log.started = True
    match = re.search(r"gpu_memory_utilization['\"]?\s*[(=:]\s*([\d.]+)", line)
    if match:
        log.utilization = float(match.group(1).rstrip("."))
    match = _REFUSED.search(line)
    if match:
        fits = _REFUSED_FITS.search(line)
        log.refused = (
            int(match.group(1)), float(match.group(2)), float(match.group(3)), int(fits.group(1)) if fits else None,
        )  # fmt: skip
    match = _REFUSED_V0.search(line)
    if match:
        log.refused = (int(match.group(1)), None, None, int(match.group(2)))
    if "No available memory for the cache blocks" in line:
        log.no_memory = True
    match = _PROFILE.search(line)
    if match:
        log.profile = (float(match.group(1)), float(match.group(2)))
    match = _START.search(line)
    if match:
        numbers = [float(group) for group in match.groups() if group]
        log.start_memory = (numbers[0], numbers[1], numbers[2], numbers[3])
    match = re.search(r"Add (\d+) padding layers, may waste at most ([\d.]+)%", line)
    if match:
        log.padding = (int(match.group(1)), float(match.group(2)) / 100)
    match = _MULTIMODAL.search(line)
    if match:
        log.multimodal = _number(match.group(1))
    log.swapping = log.swapping or "PreemptionMode.SWAP" in line
    if "PreemptionMode" in line:
        log.preemptions = max(log.preemptions or 0, 1)
    log.random_seed = log.random_seed or "without PYTHONHASHSEED" in line
    match = re.search(
        r"[Tt]otal tokens? (\d+), LMCache hit tokens?: (\d+)(?:, need to load: (-?\d+))?", line
    ) or re.search(r"()LMCache hit tokens?: (\d+)(?:, need to load: (-?\d+))?", line)
    if match and len(log.external_hits) < 10_000:
        log.external_hits.append((int(match.group(1) or 0), int(match.group(2)), int(match.group(3) or 0)))
    _settings(log, line)


def _settings(log: Failures, line: str) -> None:
    match = _ARGS.search(line)
    if match:
        # Read pair by pair: some values are no Python literals.
        for key, text in re.findall(r"'(\w+)': ('[^']*'|[\w.+-]+)", match.group(1)):
            try:
                log.args[key] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                log.args[key] = text
    for name in ("enable_prefix_caching", "kv_cache_dtype", "block_size"):
        match = re.search(rf"\b{name}=['\"]?([\w.]+)", line)
        if match:
            log.config[name] = match.group(1)
    for name, pattern in _WORDS:
        match = pattern.search(line)
        if match:
            setattr(log, name, match.group(1))
    match = _GROUPS.search(line)
    if match:
        log.group_blocks = tuple(int(part) for part in re.findall(r"\d+", match.group(1)))
    for flag in _SWITCHES:
        if f"--{flag.replace('_', '-')}" in line:
            log.args[flag] = True
    match = re.search(r"--(no-)?enable-prefix-caching", line)
    if match:
        log.args["enable_prefix_caching"] = match.group(1) is None


def looks_like_failure(text: str) -> bool:
    """Whether a text has a line that this module reads."""
    if "Traceback (most recent call last)" in text or _OOM.search(text) or _REFUSED.search(text):
        return True
    failures = parse_failures(text.splitlines()[:2000])
    empty = Failures(failures.name)
    return any(getattr(failures, name) != getattr(empty, name) for name in Failures.__annotations__)

"""ServeGen's client parameters as a ``Workload``: arrivals and lengths drawn from what each client of a service did.

A folder (or a tar of one) with ``chunk-N-trace.csv`` and ``chunk-N-dataset.json`` per client, as in github.com/alibaba/ServeGen.
Rows of the first: start of a ten-minute window, requests a second, coefficient of variation, family (Gamma, Weibull or
none) and its shape and scale in seconds. The second: per window, length -> probability. Prefixes are not in it.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.workload import Workload, build

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WINDOW_SECONDS = 600.0
DEFAULT_SPAN_SECONDS = 600.0
#: a service of millions of requests an hour is asked for in pieces
_MOST_REQUESTS = 2_000_000
_FILE = re.compile(r"(?:^|/)chunk-(\d+)-(trace\.csv|dataset\.json)$")
_MOST_BYTES = 1 << 28
#: parts of a prompt: tokens of each kind, and how many pieces of it a request has
_PARTS = (
    ("input_tokens", ""), ("text_tokens", ""), ("image_tokens", "image_count"), ("audio_tokens", "audio_count"),
    ("video_tokens", "video_count"),
)  # fmt: skip


@dataclass(frozen=True)
class _Window:
    start: float
    rate: float
    family: str
    shape: float
    scale: float


def is_servegen(path: str | Path) -> bool:
    """Whether this is a folder of client parameters, or a tar of one."""
    path = Path(path)
    if path.is_dir():
        return any(path.rglob("chunk-*-trace.csv"))
    return path.is_file() and path.name.endswith((".tar", ".tar.gz", ".tgz")) and tarfile.is_tarfile(path)


def read_servegen(
    path: str | Path, *, pool: str = "", start: float = 0.0, span: float = DEFAULT_SPAN_SECONDS, seed: int = 0
) -> Workload:
    """Requests of ``span`` seconds from ``start`` on, drawn anew for each seed; a tenant is a client.

    Args:
        path: a folder or a tar.
        pool: part of the paths to use, where it holds several pools (``reason``).
        start, span: seconds of the service's day.
        seed: of the draws.

    Raises:
        KVCatchError: no client in it, several pools and none chosen, or a damaged file.
    """
    if not span > 0 or start < 0:
        raise KVCatchError(f"a span of {span:g} s from {start:g} s on.", "Give a positive one.")
    texts = {name: text for name, text in _files(Path(path)) if pool in name}
    clients = sorted({_client(name) for name in texts})
    pools = sorted({folder for folder, _ in clients})
    if not clients:
        raise KVCatchError(f"{path}: no chunk-N-trace.csv with {pool!r} in its path.", "Choose another pool.")
    if len(pools) > 1:
        raise KVCatchError(f"{path} holds {len(pools)} pools: {', '.join(pools)}.", "Choose one of them.")
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for folder, number in clients:
        stem = f"{folder}/chunk-{number}" if folder else f"chunk-{number}"
        if f"{stem}-trace.csv" not in texts or f"{stem}-dataset.json" not in texts:
            continue
        windows = _windows(stem, texts[f"{stem}-trace.csv"])
        lengths = _lengths(stem, texts[f"{stem}-dataset.json"])
        for window in windows:
            low, high = max(window.start, start), min(window.start + WINDOW_SECONDS, start + span)
            if low >= high or window.rate <= 0 or not lengths:
                continue
            if len(rows) + window.rate * (high - low) > _MOST_REQUESTS:
                raise KVCatchError(
                    f"more than {_MOST_REQUESTS:,} requests in {span:g} s.", "Give a shorter span."
                )
            arrivals = _arrivals(window, low, high, rng)
            table = lengths[max((key for key in lengths if key <= window.start), default=min(lengths))]
            prompts, outputs = _drawn(table, len(arrivals), rng)
            for when, prompt, output in zip(
                arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True
            ):
                rows.append({"arrival": when - start, "prompt": prompt, "output": output, "tenant": f"client-{number}",
                             "segments": [((number, len(rows)), prompt)]})  # fmt: skip
    if not rows:
        raise KVCatchError(f"{path}: no request in {span:g} s from {start:g} s on.", "Give a longer span.")
    rows.sort(key=lambda row: float(row["arrival"]))
    notes = [f"drawn from parameters of {len(clients)} clients, seed {seed}: no prefix can be shared"]
    return build(f"{Path(path).name} {pools[0]}".strip(), rows, grain=1, notes=notes)


def _files(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every parameter file."""
    if path.is_dir():
        for one in sorted(path.rglob("chunk-*")):
            if _FILE.search(one.as_posix()):
                yield one.relative_to(path).as_posix(), one.read_text(errors="replace")
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and _FILE.search(member.name) and member.size < _MOST_BYTES:
                    file = archive.extractfile(member)
                    if file is not None:
                        yield member.name, file.read().decode("utf-8", "replace")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise KVCatchError(f"{path}: cannot be read ({error}).", "Fetch the file again.") from None


def _client(name: str) -> tuple[str, int]:
    folder, _, _ = name.rpartition("/")
    match = _FILE.search(name)
    assert match is not None
    return folder, int(match.group(1))


def _windows(stem: str, text: str) -> list[_Window]:
    found = []
    for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
        try:
            start, rate, family = float(row[0]), float(row[1]), row[3]
            shape, scale = (float(row[4]), float(row[5])) if family else (0.0, 0.0)
        except (ValueError, IndexError) as error:
            raise KVCatchError(f"{stem}-trace.csv line {number}: {error}.", "The row is damaged.") from None
        if family not in ("", "Gamma", "Weibull") or (family and not (shape > 0 and scale > 0)):
            raise KVCatchError(f"{stem}-trace.csv line {number}: family {family!r} {shape:g} {scale:g}.",
                               "Known: Gamma and Weibull of positive shape and scale.")  # fmt: skip
        found.append(_Window(start, rate, family, shape, scale))
    return found


def _lengths(stem: str, text: str) -> dict[float, dict[str, dict[int, float]]]:
    """Window start -> quantity -> length -> probability; windows in which nothing was seen are left out."""
    try:
        document = json.loads(text)
        return {
            float(key): {
                name: _distribution(words) for name, words in table.items() if isinstance(words, str)
            }
            for key, table in document.items()
            if _distribution(table.get("output_tokens", "{}"))
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise KVCatchError(f"{stem}-dataset.json: {error}.", "The file is damaged.") from None


_PAIR = re.compile(r"(\d+)(?:\.\d+)?: ([0-9.eE+-]+)")


def _distribution(words: str) -> dict[int, float]:
    """``{50: 0.04, 51: 0.08}``; keys that are no whole numbers are shares that nobody asks for."""
    return {int(key): float(value) for key, value in _PAIR.findall(words)}


def _arrivals(window: _Window, low: float, high: float, rng: np.random.Generator) -> Floats:
    """Times of a renewal process between two moments of a window."""
    found: list[Floats] = []
    now = low
    while now < high:
        count = int(window.rate * (high - now) * 1.2) + 16
        if window.family == "Gamma":
            gaps = rng.gamma(window.shape, window.scale, count)
        elif window.family == "Weibull":
            gaps = window.scale * rng.weibull(window.shape, count)
        else:
            gaps = rng.exponential(1 / window.rate, count)
        times = now + np.cumsum(gaps)
        found.append(times[times < high])
        if sum(len(part) for part in found) > _MOST_REQUESTS:
            raise KVCatchError("a window of endless requests.", "Its shape or scale is damaged.")
        now = float(times[-1])
    return np.concatenate(found) if found else np.zeros(0)


def _drawn(
    table: Mapping[str, Mapping[int, float]], count: int, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    prompts = np.zeros(count, np.int64)
    for tokens, pieces in _PARTS:
        if table.get(tokens):
            each = _choose(table[tokens], count, rng)
            prompts += each * (_choose(table[pieces], count, rng) if table.get(pieces) else 1)
    return np.maximum(prompts, 1), np.maximum(_choose(table["output_tokens"], count, rng), 1)


def _choose(distribution: Mapping[int, float], count: int, rng: np.random.Generator) -> Ints:
    values = np.array(list(distribution), np.int64)
    weights = np.array(list(distribution.values()), np.float64)
    total = weights.sum()
    if not total > 0:
        return np.full(count, values[0] if len(values) else 0)
    chosen: Ints = rng.choice(values, count, p=weights / total)
    return chosen

"""Sizes, durations and numbers: parsing what people type, printing what people read."""

from __future__ import annotations

import re

from kvcatch.errors import KVCatchError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "kib": KIB,
    "m": 1000**2, "mb": 1000**2, "mib": MIB,
    "g": 1000**3, "gb": 1000**3, "gib": GIB,
    "t": 1000**4, "tb": 1000**4, "tib": 1024**4,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*")
_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|m|h|d)?\s*")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def parse_size(text: str) -> int:
    """Bytes from ``80GiB``, ``80GB``, ``512MiB`` or a plain number of bytes. Raises KVCatchError."""
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise KVCatchError(f"not a size: {text!r}.", "Write for example 80GiB, 80GB or 512MiB.")
    return int(float(match.group(1)) * factor)


def parse_duration(text: str) -> float:
    """Seconds from ``15m``, ``90s``, ``250ms``, ``2h`` or a plain number. Raises KVCatchError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise KVCatchError(f"not a duration: {text!r}.", "Write for example 90s, 15m or 2h.")
    return float(match.group(1)) * _SECONDS[match.group(2)]


def human_bytes(value: float | None) -> str:
    """Binary units with the unit name, ``n/a`` for None."""
    if value is None:
        return "n/a"
    sign, size = ("-", -value) if value < 0 else ("", float(value))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.2f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} TiB"


def human_count(value: float | None) -> str:
    """Thousands separators, ``n/a`` for None."""
    return "n/a" if value is None else f"{value:,.0f}"


def human_ratio(value: float | None, digits: int = 1) -> str:
    """A 0–1 ratio as a percentage, ``n/a`` for None."""
    return "n/a" if value is None else f"{100 * value:.{digits}f}%"


def human_seconds(value: float | None) -> str:
    """A duration with a fitting unit, ``n/a`` for None."""
    if value is None:
        return "n/a"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    if value < 120:
        return f"{value:.2f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{seconds:02d}s" if hours else f"{minutes}m{seconds:02d}s"

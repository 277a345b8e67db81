"""The hit ratio against capacity as text: one bar a size, today's marked."""

from __future__ import annotations

from dataclasses import dataclass

from kvcatch.simulator.curve import Curve
from kvcatch.units import GIB, human_bytes, human_count, human_ratio
from kvcatch.views.palette import Line, Look


@dataclass(frozen=True)
class Today:
    """The size in use: usable blocks, and bytes a token where known."""

    blocks: int | None = None
    bytes_per_token: int | None = None


def curve_lines(curve: Curve, look: Look, today: Today, *, rows: int = 14) -> list[Line]:
    """A title that says the point, a bar for each capacity, what the next GiB would win."""
    sizes = curve.capacities(rows)
    if today.blocks is not None:
        sizes = sorted({*sizes, today.blocks})
    top = max(curve.ratio(sizes[-1]), 1e-9)
    width = max(10, look.width - (46 if curve.errors is None else 52))
    plus_minus = "+-" if look.ascii else "±"
    out: list[Line] = [[(_title(curve, today), "title")]]
    for size in sizes:
        ratio = curve.ratio(size)
        bar = look.glyphs.active * round(width * ratio / top)
        here = size == today.blocks
        room = size * curve.block_size
        out.append(
            [
                (">" if here else " ", "watermark"),
                (f"{human_count(size):>11} {_size(room, today):>11}", "title" if here else ""),
                (f" {human_ratio(ratio):>6} {_bar(curve, size, plus_minus)}", "title" if here else ""),
                (bar, "cached"),
                (" today" if here else "", "watermark"),
            ]
        )
    out.append(
        [("     blocks " + ("        size" if today.bytes_per_token else "      tokens") + "    hit", "dim")]
    )
    now, best = curve.ratio(today.blocks or 0), curve.ratio(curve.saturated_at)
    if today.blocks is not None and best > now:
        half = curve.reaching((now + best) / 2)
        need = f"{human_count(half)} blocks"
        if today.bytes_per_token:
            need += f", {_size(half * curve.block_size, today)}"
        out.append([(f"half of what can be won needs {need}", "")])
    if curve.sampled is not None:
        words = f"{human_count(curve.sampled)} of {human_count(curve.queried_blocks)} references (1 block in {curve.step})"
        out.append([(f"estimated from {words}; {plus_minus} is the 95 % interval", "dim")])
    elif not curve.exact:
        out.append([("prompts of whole blocks repeat: off by those blocks at most", "dim")])
    return out


def next_gib(curve: Curve, today: Today) -> float | None:
    """Hit ratio that one more GiB would add; None where today's size or its bytes are unknown or a sample too coarse."""
    if today.blocks is None or not today.bytes_per_token:
        return None
    more = GIB // (today.bytes_per_token * curve.block_size)
    if more < curve.step:
        return None  # finer than the sample tells
    return curve.ratio(today.blocks + more) - curve.ratio(today.blocks)


def _title(curve: Curve, today: Today) -> str:
    best = curve.ratio(curve.saturated_at)
    if today.blocks is None:
        text = f"At most {human_ratio(best)} of prompt tokens can be hit; {human_count(curve.saturated_at)} blocks"
        return text + " are enough for that"
    text = (
        f"Hits {human_ratio(curve.ratio(today.blocks))} of prompt tokens today, {human_ratio(best)} at most"
    )
    gain = next_gib(curve, today)
    return text if gain is None else f"{text}; the next GiB wins {100 * gain:.2f} points"


def _bar(curve: Curve, size: int, plus_minus: str) -> str:
    return "" if curve.errors is None else f"{plus_minus} {100 * curve.error(size):.1f} "


def _size(tokens: int, today: Today) -> str:
    return human_bytes(tokens * today.bytes_per_token) if today.bytes_per_token else human_count(tokens)

"""The life of one request: arrival, first scheduled, first token, preemptions, finish, blocks over time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvcatch.results import RequestView, Snapshot
from kvcatch.units import human_count, human_ratio, human_seconds
from kvcatch.views.palette import Line, Look, clip
from kvcatch.views.panels import clock, spark


@dataclass(frozen=True)
class Life:
    """Moments of one request in order, and how many blocks it held after each change."""

    moments: list[tuple[float, str, str]] = field(default_factory=list)
    blocks: list[tuple[float, int]] = field(default_factory=list)


def detail_lines(view: RequestView, life: Life, snapshot: Snapshot, look: Look) -> list[Line]:
    """The page of one request."""
    pool, glyph = snapshot.pool.num_blocks, look.glyphs
    share = None if view.num_blocks is None or not pool else view.num_blocks / pool
    tags = "  ".join(f"{key}={value}" for key, value in sorted(view.tags.items())) or "no tags"
    out: list[Line] = [
        [("request ", "dim"), (view.request_id, "title"), (f"  {view.status}", ""), (f"  {tags}", "info")],
        [(f"engine id {view.engine_request_id}  arrived {clock(view.arrival_unix_seconds)}", "dim")],
        [],
        [
            (f"blocks {human_count(view.num_blocks)}", "active"),
            (f" = {human_ratio(share)} of the pool, {human_count(view.shared_blocks)} shared", ""),
            (f"   tokens {human_count(view.num_tokens)}", ""),
        ],
        [
            (f"prompt {human_count(view.prompt_tokens)}  cached {human_count(view.cached_tokens)}", ""),
            (f"  output {human_count(view.output_tokens)} of at most {human_count(view.max_tokens)}", ""),
        ],
        [
            (f"queue {human_seconds(view.queue_seconds)}  TTFT {human_seconds(view.ttft_seconds)}", ""),
            (f"  age {human_seconds(view.age_seconds)}", ""),
            (f"  preempted {human_count(view.num_preemptions)}", "preempted" if view.num_preemptions else ""),
            (f"  recomputed {human_count(view.recomputed_tokens)} tokens", ""),
        ],
    ]
    if view.decision:
        out.append([("scheduler ", "dim"), (view.decision, "info")])
    out.append([])
    out += life_line(view, life, look, now=snapshot.unix_seconds)
    return [clip(line, look.width, glyph.cut) for line in out]


def life_line(view: RequestView, life: Life, look: Look, *, now: float | None) -> list[Line]:
    """A time axis with a mark per moment, blocks held below it, then the moments one by one."""
    moments = life.moments or _from_view(view)
    if not moments:
        return [[("life line n/a: this source has no times per request", "dim")]]
    start = moments[0][0]
    done = any(kind == "finish" for _, kind, _ in moments)
    stop = max(moments[-1][0], life.blocks[-1][0] if life.blocks else start)
    if not done and now is not None:
        stop = max(stop, now)
    width, span = max(10, look.width - 9), max(stop - start, 1e-9)
    axis = [("─" if not look.ascii else "-", "dim")] * width
    for when, kind, _ in moments:
        at = min(width - 1, int((when - start) / span * width))
        while at < width - 1 and axis[at][1] != "dim":
            at += 1  # two moments in one column: the later one moves on
        axis[at] = (look.glyphs.mark[kind], "preempted" if kind == "preempted" else "title")
    if not done:
        axis[-1] = (look.glyphs.mark["now"], "title")
    out: list[Line] = [[("life     ", "title"), *axis]]
    if life.blocks:
        curve = _steps(life, start, stop, width)
        out.append(
            [
                ("blocks   ", "title"),
                (spark(curve, width, max(1.0, *(value or 0.0 for value in curve)), look), "active"),
            ]
        )
        top = max(count for _, count in life.blocks)
        scale = f"0 s   most held {top:,} blocks"
        out.append([(f"         {scale}{f'{span:.2f} s'.rjust(max(0, width - len(scale)))}", "dim")])
    out.append([])
    for when, kind, text in moments[-12:]:
        role = "preempted" if kind == "preempted" else ""
        name = {"first": "first token", "scheduled": "scheduled"}.get(kind, kind)
        out.append([(f"  +{when - start:9.3f} s  {look.glyphs.mark[kind]} {name:<12} {text}", role)])
    return out


def _steps(life: Life, start: float, stop: float, width: int) -> list[float | None]:
    """Blocks held in each column: the most of the column, or what was held before it."""
    held, index, curve = 0, 0, []
    for column in range(width):
        end = start + (stop - start) * (column + 1) / width
        most = held
        while index < len(life.blocks) and (life.blocks[index][0] <= end or column == width - 1):
            held = life.blocks[index][1]
            most = max(most, held)
            index += 1
        curve.append(float(most))
    return list(curve)


def _from_view(view: RequestView) -> list[tuple[float, str, str]]:
    """The moments that a request's own numbers tell, without any event."""
    if view.arrival_unix_seconds is None:
        return []
    arrival = view.arrival_unix_seconds
    moments = [(arrival, "arrival", "")]
    if view.queue_seconds is not None:
        moments.append((arrival + view.queue_seconds, "scheduled", ""))
    if view.ttft_seconds is not None:
        moments.append((arrival + view.ttft_seconds, "first", ""))
    if view.finish_reason is not None and view.age_seconds is not None:
        moments.append((arrival + view.age_seconds, "finish", view.finish_reason))
    return moments


def life_of(view: RequestView, events: Iterable[dict[str, Any]]) -> Life:
    """Collect preemptions, returns, the finish and the blocks of one request from a capture's records.

    Reads until the request's finish. What its own numbers already tell (arrival, first scheduled, first
    token) is more exact there than in the records, which carry the time of the step before.
    """
    life, held, rid = Life(_from_view(view)), 0, None
    for event in events:
        kind = event["kind"]
        if kind in {"arrive", "refresh"} and event.get("engine_request_id") == view.engine_request_id:
            rid, held = event["rid"], 0  # a refresh repeats the blocks after it
            continue
        if rid is None or event.get("rid") != rid:
            continue
        when, before = event["unix_ns"] / 1e9, held
        if kind == "blocks":
            held += len(event["block_ids"])
        elif kind == "replace":
            held = len(event["block_ids"])
        elif kind == "drop":
            held -= event["count"]
        elif kind in {"preempt", "finish", "resume"}:
            held = 0
            life.moments.append(_moment(when, event))
        if held != before:
            life.blocks.append((when, held))
        if kind == "finish":
            break
    kept = [moment for moment in life.moments if moment[1] != "finish"]
    last = [moment for moment in life.moments if moment[1] == "finish"][-1:]
    return Life(sorted(kept) + last, life.blocks)


def grown(life: Life, view: RequestView, now: float) -> Life:
    """The life one look later: what the request holds now, and a preemption or finish since then."""
    moments = list(life.moments or _from_view(view))
    kinds = [kind for _, kind, _ in moments]
    for when, kind, text in _from_view(view):
        if kind not in kinds:
            moments.append((when, kind, text))
    if (view.num_preemptions or 0) > kinds.count("preempted"):
        moments.append((now, "preempted", "seen now"))
    blocks = list(life.blocks)
    held = view.num_blocks or 0
    if not blocks or blocks[-1][1] != held:
        blocks.append((now, held))
    return Life(moments, blocks)


def _moment(when: float, event: dict[str, Any]) -> tuple[float, str, str]:
    """What a record adds, in words."""
    if event["kind"] == "preempt":
        return (
            when,
            "preempted",
            f"cause: {event['cause']}, {human_count(event['freed_blocks'])} blocks freed",
        )
    if event["kind"] == "resume":
        return when, "scheduled", f"again, {human_count(event['hit_tokens'])} tokens still cached"
    return when, "finish", f"{event['reason']}, {human_count(event['output_tokens'])} output tokens"

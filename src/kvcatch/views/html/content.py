"""What a report says: verdict, three numbers, findings, chart titles, provenance; all from one recording."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvcatch.analysis import prefix_capture
from kvcatch.analysis.compare_drift import flatten
from kvcatch.analysis.doctor import Diagnosis, diagnose
from kvcatch.analysis.evidence import Case, from_recording
from kvcatch.analysis.prefix import PrefixReport, explain
from kvcatch.analysis.prefix_findings import findings as prefix_findings
from kvcatch.analysis.rules import RULES
from kvcatch.analysis.rules_load import safe_line
from kvcatch.analysis.thresholds import LIMITS
from kvcatch.errors import KVCatchError
from kvcatch.results import Result
from kvcatch.store.columns import read_recording
from kvcatch.units import human_bytes, human_count, human_ratio, human_seconds
from kvcatch.views.html.blocks import residency, reuse
from kvcatch.views.html.curves import curves
from kvcatch.views.html.holders import holders, lives


class Report(Result, frozen=True):
    """Everything a page shows. ``charts`` is what the page's script draws."""

    title: str
    verdict: str
    severity: str  # critical | warning | info | fine
    numbers: tuple[tuple[str, str, str], ...]  # name, value, detail
    findings: tuple[dict[str, Any], ...]
    saved: str
    causes: tuple[tuple[str, str, str], ...]
    ranks: tuple[dict[str, str], ...]
    provenance: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    losses: tuple[str, ...]
    charts: dict[str, Any]


def gather(path: str, start: int | None = None, stop: int | None = None) -> Report:
    """The report of a recording, or of its part in wall-clock nanoseconds [start, stop).

    Raises KVCatchError when the file is no recording or nothing was recorded in that span.
    """
    recording = read_recording(path)
    case = from_recording(recording, start, stop)
    unix = recording.samples["unix_ns"]
    first = 0 if start is None else int(np.searchsorted(unix, start))
    last = len(unix) if stop is None else int(np.searchsorted(unix, stop))
    samples = {name: column[first:last] for name, column in recording.samples.items()}
    if not len(samples["unix_ns"]) or case.rows is None:
        raise KVCatchError(
            f"{path}: no step was recorded{'' if start is None and stop is None else ' in that span'}.",
            "Record for longer, or ask for another span.",
        )
    look = prefix_capture.from_capture(path)
    prefix = explain(look, path, "capture")[0] if len(look.workload) else None
    busy = float(samples["step_ns"].sum()) / 1e9
    extra = list(prefix_findings(prefix, busy_seconds=busy)) if prefix is not None else []
    diagnosis = diagnose([case], extra=extra)
    x0, x1 = int(samples["unix_ns"][0]), int(samples["unix_ns"][-1])
    charts: dict[str, Any] = {
        "start_unix_ms": x0 // 1_000_000,
        "span_ms": max(1, (x1 - x0) // 1_000_000),
        "usable": recording.info.usable_blocks,
        "watermark": safe_line(case, LIMITS),
        "curves": curves(recording, samples, case.rows),
        "holders": holders(recording, samples),
        "lives": lives(recording, samples, case.rows, look.seconds_per_token),
        "residency": residency(path, recording.samples["unix_ns"]),
        "reuse": reuse(look),
    }
    charts["titles"] = _titles(charts)
    info = recording.info
    return Report(
        title=f"{info.model or 'an engine'} on {info.engine} {info.engine_version}",
        verdict=_verdict(diagnosis, samples, recording.info.usable_blocks),
        severity=diagnosis.worst() or "fine",
        numbers=_numbers(case, samples, prefix),
        findings=tuple(_finding(one) for one in diagnosis.findings),
        saved=_saved(prefix),
        causes=_causes(prefix),
        ranks=tuple(_rank(rank) for rank in case.ranks),
        provenance=_provenance(recording, samples, case),
        settings=tuple((name, str(value)) for name, value in flatten(info).items()),
        losses=_losses(case, charts, diagnosis),
        charts=charts,
    )


def moment(unix_ns: int) -> str:
    """UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix_ns / 1e9))


def _verdict(diagnosis: Diagnosis, samples: dict[str, Any], usable: int) -> str:
    peak = int(np.maximum(samples["active_blocks"], samples["active_max"]).max())
    share = human_ratio(peak / usable, 0) if usable else "n/a"
    preempted = int(samples["preemptions"].sum())
    said = f"the cache peaked at {share} active"
    load = f"{said}, {preempted:,} preemption{'' if preempted == 1 else 's'}"
    serious = [one for one in diagnosis.findings if one.severity != "info"]
    if serious:
        sentence = f"{serious[0].title}; {said if 'preempt' in serious[0].title else load}."
        # Pressure is a state; who causes it is what a reader can act on.
        hog = next((one for one in serious[1:] if one.code == "KVC003"), None)
        if hog is not None:
            sentence += f" {hog.title[:1].upper()}{hog.title[1:]}."
        more = len(serious) - 1 - (hog is not None)
        return f"{sentence} {more} more below." if more else sentence
    return f"Nothing is wrong: {load}."


def _numbers(
    case: Case, samples: dict[str, Any], prefix: PrefixReport | None
) -> tuple[tuple[str, str, str], ...]:
    usable = case.usable
    active = np.maximum(samples["active_blocks"], samples["active_max"])
    row = int(np.argmax(active))
    at = moment(int(samples["unix_ns"][row]))
    usage = human_ratio(float(active[row]) / usable, 0) if usable else "n/a"
    waits = np.zeros(0)
    if case.requests is not None and case.rows is not None:
        rows = case.rows[case.requests.first[case.rows] > 0]
        waits = (case.requests.first[rows] - case.requests.arrival[rows]) / 1e9
    slow = human_seconds(float(np.quantile(waits, 0.95))) if len(waits) else "n/a"
    half = human_seconds(float(np.median(waits))) if len(waits) else "n/a"
    queried, hit = int(samples["queried_tokens"].sum()), int(samples["hit_tokens"].sum())
    ratio = human_ratio(hit / queried) if queried else "n/a"
    return (
        ("Peak cache use", usage, f"{int(active[row]):,} of {human_count(usable)} blocks active at {at}"),
        ("TTFT p95", slow, f"median {half} of {len(waits):,} requests"),
        ("Prefix hits", ratio, f"{hit:,} of {queried:,} prompt tokens"),
    )


def _finding(one: Any) -> dict[str, Any]:
    return {
        "code": one.code, "name": RULES[one.code].name, "severity": one.severity, "title": one.title,
        "evidence": [row.text if row.value is None or any(c.isdigit() for c in row.text)
                     else f"{row.text}: {row.value:,.6g} {row.unit or ''}".rstrip() for row in one.evidence],
        "cause": one.cause, "remedy": one.remedy, "when": None if one.unix_seconds is None else moment(int(one.unix_seconds * 1e9)),
        "unix_ms": None if one.unix_seconds is None else int(one.unix_seconds * 1e3),
    }  # fmt: skip


def _saved(prefix: PrefixReport | None) -> str:
    if prefix is None or prefix.saved is None or not prefix.saved.prefill_tokens:
        return "Prefix caching saved nothing in this recording."
    saved = prefix.saved
    seconds = "" if saved.seconds is None else f", about {human_seconds(saved.seconds)} of prefill"
    return f"Prefix caching saved {saved.prefill_tokens:,} prefill tokens ({saved.blocks:,} blocks){seconds}."


def _causes(prefix: PrefixReport | None) -> tuple[tuple[str, str, str], ...]:
    if prefix is None:
        return ()
    return tuple(
        (row.cause.replace("_", " "), f"{row.tokens:,} ({human_ratio(row.share_ratio)})", row.meaning)
        for row in sorted(prefix.causes, key=lambda row: -row.tokens)
    )


def _rank(rank: Any) -> dict[str, str]:
    def known(value: int | None) -> str:
        return "n/a" if value is None else str(value)

    return {
        "rank": f"tp {known(rank.tp_rank)}, pp {known(rank.pp_rank)}, dp {known(rank.dp_rank)}",
        "device": rank.device or "n/a",
        "memory": human_bytes(rank.memory_total_bytes),
        "used": human_bytes(rank.memory_used_bytes),
        "KV cache": human_bytes(rank.kv_cache_bytes),
        "other processes": human_bytes(rank.other_processes_bytes),
    }


def _provenance(recording: Any, samples: dict[str, Any], case: Case) -> tuple[tuple[str, str], ...]:
    info, unix = recording.info, samples["unix_ns"]
    return (
        ("recording", recording.target),
        ("engine", f"{info.engine} {info.engine_version}, adapter {info.adapter}"),
        ("model", info.model or "n/a"),
        ("pool", f"{info.usable_blocks:,} usable blocks of {info.block_size:,} tokens, {human_bytes(info.block_bytes)} each"),
        ("span", f"{moment(int(unix[0]))} to {moment(int(unix[-1]))}, {human_seconds(float(unix[-1] - unix[0]) / 1e9)}"),
        ("steps", f"{len(unix):,} rows, one of every {info.sample_steps} steps"),
        ("requests", f"{0 if case.rows is None else len(case.rows):,}"),
        ("records", f"{recording.records:,}"),
        ("recorded by", f"kvcatch {info.kvcatch_version}"),
    )  # fmt: skip


def _losses(case: Case, charts: dict[str, Any], diagnosis: Diagnosis) -> tuple[str, ...]:
    loss = case.loss
    said = [
        f"{loss.dropped_records:,} records and {loss.dropped_bytes:,} bytes lost, {loss.hook_errors:,} hook errors."
    ]
    if loss.unknown:
        said.append(f"Not recorded: {', '.join(loss.unknown)}.")
    said += [f"{text}." for text in (*loss.warnings, *diagnosis.notes)]
    shown, of = len(charts["lives"]["rows"]), charts["lives"]["of"]
    if shown < of:
        said.append(
            f"{shown:,} of {of:,} requests are drawn one by one: preempted ones, the largest, the slowest."
        )
    said.append("Curves are thinned by minimum and maximum, never by mean: peaks stay.")
    return tuple(said)


def _titles(charts: dict[str, Any]) -> dict[str, str]:
    """The point of each chart, in a few words."""
    curve, usable = charts["curves"], charts["usable"]
    peak = max(curve["active"], default=0)
    waits = [wait for wait in curve["ttft"] if wait is not None]
    empty = [part for part in curve["empty"] if part is not None]
    lost = sum(curve["preemptions"])
    titles = {
        "use": f"Cache use peaked at {human_ratio(peak / usable, 0) if usable else 'n/a'}"
        + (f"; the slowest first token took {human_seconds(max(waits))}" if waits else ""),
        "queues": f"At most {max(curve['running'], default=0):,} ran and {max(curve['waiting'], default=0):,} waited",
        "preempt": f"{lost:,} preemption{'' if lost == 1 else 's'}, {sum(curve['recomputed']):,} tokens computed again",
        "hits": "Prefix hit ratio",
        "empty": f"Held blocks were at most {human_ratio(max(empty), 0)} empty"
        if empty
        else "Fragmentation n/a",
        "rate": "Output tokens per second",
        "lives": "Requests over time",
    }
    held = charts["holders"]
    if held:
        top = max(held["tenants"], key=lambda one: max(one["blocks"], default=0))
        share = human_ratio(max(top["blocks"], default=0) / usable, 0) if usable else "n/a"
        titles["holders"] = f"{top['name']} held most: up to {share} of the cache"
    if charts["residency"]:
        titles["residency"] = f"How long {charts['residency']['evicted']:,} evicted blocks had stayed"
    if charts["reuse"]:
        now, most = charts["reuse"]["today_ratio"], charts["reuse"]["most"]
        titles["reuse"] = (
            f"Today's size hits {human_ratio(now)} of prompt tokens; "
            f"{human_ratio(most)} is the most, from {charts['reuse']['saturated_at']:,} blocks on"
        )
    return titles

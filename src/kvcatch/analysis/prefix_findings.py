"""Findings of a prefix report: KVC201 to KVC204, KVC206 and KVC210."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcatch.analysis.prefix import PrefixReport, explain
from kvcatch.analysis.prefix_capture import lookups
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.thresholds import LIMITS, Limits
from kvcatch.results import Finding
from kvcatch.store.columns import Recording
from kvcatch.units import human_count, human_ratio, human_seconds


def from_recording(
    recording: Recording, start: int | None = None, stop: int | None = None, limits: Limits = LIMITS
) -> list[Finding]:
    """The findings of a recording's chains in wall-clock nanoseconds [start, stop).

    None where so little was looked up that nothing could be found.
    """
    if int(recording.samples["queried_tokens"].sum(dtype=np.int64)) < limits.queried_tokens:
        return []
    unix = recording.samples["unix_ns"]
    inside = (unix >= (start or 0)) & (unix < (stop if stop is not None else 1 << 62))
    busy = float(recording.samples["step_ns"][inside].sum(dtype=np.float64)) / 1e9
    report, _ = explain(lookups(recording, start=start, stop=stop), recording.target, "capture")
    return list(findings(report, busy_seconds=busy, limits=limits))


def findings(
    report: PrefixReport, *, busy_seconds: float | None = None, limits: Limits = LIMITS
) -> Iterator[Finding]:
    """Each loss that is a large share of all prompt tokens.

    Args:
        report: what ``prefix`` found.
        busy_seconds: time the engine worked; with it a loss that cost little of it is only a note.
        limits: thresholds.
    """
    queried = report.queried_tokens
    if queried < limits.queried_tokens or report.hit_ratio is None:
        return

    def lost(*causes: str) -> int:
        return sum(report.tokens(cause) for cause in causes)

    def severity(tokens: int, usual: str = "warning") -> str:
        if busy_seconds and report.seconds_per_token is not None:
            return usual if tokens * report.seconds_per_token >= 0.05 * busy_seconds else "info"
        return usual

    least = limits.lost_share * queried
    tokens, unit = lost("misaligned"), report.unit_tokens or report.block_size
    if tokens >= least and unit >= limits.large_block_tokens:
        yield _misaligned(report, tokens, severity(tokens))
    tokens = lost("diverged")
    if tokens >= least:
        yield _diverges(report, tokens, severity(tokens, "info" if report.source == "capture" else "warning"))
    tokens = lost("evicted")
    if tokens >= least:
        yield _evicted(report, tokens, severity(tokens))
    tokens = lost("other_engine")
    if tokens >= least:
        yield found(
            "KVC206", severity(tokens), f"{human_count(tokens)} tokens were cached on another engine",
            fact(f"{human_ratio(tokens / queried)} of all prompt tokens", tokens / queried, "ratio"),
        )  # fmt: skip
    tokens = lost("order", "in_flight")
    if tokens >= least:
        yield found(
            "KVC210", "info", f"{human_count(tokens)} tokens lost to the order of arrival",
            fact(f"{human_count(lost('order'))} would be kept if requests of {report.order_window_seconds or 0:g} s came grouped",
                 lost("order"), "tokens"),
            fact(f"{human_count(lost('in_flight'))} were still being computed for another request", lost("in_flight"), "tokens"),
        )  # fmt: skip
    fresh = lost("first_seen")
    if report.hit_ratio < limits.hit_ratio and report.missed_tokens and fresh >= 0.9 * report.missed_tokens:
        yield found(
            "KVC204", "info", f"{human_ratio(fresh / queried, 0)} of all prompt tokens were new: a hit ratio of "
            f"{human_ratio(report.hit_ratio)} is normal here",
            fact(f"{human_count(fresh)} of {human_count(queried)} tokens had never been seen", fresh, "tokens"),
        )  # fmt: skip


def _misaligned(report: PrefixReport, tokens: int, severity: str) -> Finding:
    queried, unit, back = (
        report.queried_tokens,
        report.unit_tokens or report.block_size,
        report.given_back_tokens,
    )
    evidence = [
        fact(f"{human_count(tokens)} tokens ({human_ratio(tokens / queried)} of all prompt tokens) are shared and end "
             f"between two borders of {human_count(unit)} tokens", tokens, "tokens"),
        fact(f"{human_count(report.hit_tokens)} tokens hit", report.hit_tokens, "tokens"),
    ]  # fmt: skip
    cause = remedy = ""
    if back:
        evidence.append(
            fact(f"a match of n tokens hits floor((n - {human_count(back)}) / {human_count(unit)}) x {human_count(unit)}",
                 unit, "tokens")
        )  # fmt: skip
        cause = ("EAGLE and MTP drafts compute the last matched block again, and what is left is cut down to a border "
                 "that all KV groups share.")  # fmt: skip
        remedy = (
            f"Lengthen the shared part by {human_count(back)} tokens or more, make the unit smaller (--block-size, "
            "--prefix-match-unit on hybrids), or drop the drafts where reuse matters more."
        )
    title = f"{human_ratio(tokens / queried, 0)} of all prompt tokens are shared but short of a unit of {human_count(unit)}"
    return found("KVC201", severity, title, *evidence, cause=cause, remedy=remedy)


def _evicted(report: PrefixReport, tokens: int, severity: str) -> Finding:
    queried = report.queried_tokens
    evidence = [
        fact(f"{human_count(tokens)} tokens ({human_ratio(tokens / queried)} of all prompt tokens) had been cached and "
             "evicted", tokens, "tokens"),
    ]  # fmt: skip
    if report.seconds_per_token is not None:
        seconds = tokens * report.seconds_per_token
        evidence.append(fact(f"computing them again took about {human_seconds(seconds)}", seconds, "seconds"))
    remedy = ""
    if report.gains:
        for gain in report.gains:
            evidence.append(
                fact(f"{human_count(gain.num_blocks)} blocks (+{human_count(gain.more_blocks)}) keep "
                     f"{human_count(gain.won_tokens)} of them", gain.num_blocks, "blocks")
            )  # fmt: skip
        half = next(gain for gain in report.gains if 2 * gain.won_tokens >= report.gains[-1].won_tokens)
        remedy = (
            f"{human_count(half.num_blocks)} blocks instead of {human_count(report.num_blocks)} win half of it back "
            "(kvcatch simulate --curve); more memory for the cache or --kv-cache-dtype fp8."
        )
    return found(
        "KVC203",
        severity,
        f"{human_ratio(tokens / queried, 0)} of all prompt tokens had been evicted",
        *evidence,
        remedy=remedy,
    )


def _diverges(report: PrefixReport, tokens: int, severity: str) -> Finding:
    queried = report.queried_tokens
    evidence = [
        fact(f"{human_count(tokens)} tokens ({human_ratio(tokens / queried)} of all prompt tokens) stand behind something "
             "that changes", tokens, "tokens"),
    ]  # fmt: skip
    if report.source == "capture":
        evidence.append(fact("inferred: a recording holds no content"))
    for place in report.divergences[:3]:
        changed = f": {place.what}, {place.before!r} became {place.after!r}" if place.what else ""
        evidence.append(
            fact(f"{human_count(place.requests)} requests part in block {place.block} (token {human_count(place.token)})"
                 f"{changed}", place.requests, "requests")
        )  # fmt: skip
    remedy = ""
    if report.rewrites:
        best = report.rewrites[0]
        remedy = f"{best.what[:1].upper()}{best.what[1:]}: wins {human_count(best.won_tokens)} tokens."
    return found("KVC202", severity, f"{human_ratio(tokens / queried, 0)} of all prompt tokens stand behind a changing piece",
                 *evidence, remedy=remedy)  # fmt: skip

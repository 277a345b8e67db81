"""From two arms to a verdict: what changed, by how much, how sure, and what that means."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np

from kvcatch.quality.measure import Arm, Floor, Work, divergences
from kvcatch.quality.patterns import Pattern, Signs, loops, recognise
from kvcatch.quality.stats import (
    Interval,
    binomial_tail,
    bootstrap,
    mcnemar,
    net_loss,
    questions_needed,
    trend,
)
from kvcatch.quality.tasks import DEPTHS, KINDS
from kvcatch.results import Result

#: p below which answers count as changed, and below which a baseline counts as above chance
SIGNIFICANT = 0.01
_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 1 << 40)


class Limits(Result, frozen=True):
    """What is still accepted. ``source`` = assumed | given | baseline file."""

    kl: float = 0.05  # nats, mean
    flips: float = 0.15  # share of positions
    loss: float = 0.10  # share of questions lost, net, at the interval's end
    source: str = "assumed"


class Check(Result, frozen=True):
    """One number with its interval and limit; verdict = pass | fail | inconclusive | information."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    unit: str = ""
    verdict: str = "information"
    note: str = ""


class TaskScore(Result, frozen=True):
    """Questions with one answer, under both caches.

    verdict = no power (the baseline does not beat guessing) | worse | better | not significant | same.
    """

    kind: str
    questions: int
    baseline_right: int
    candidate_right: int
    lost: int
    won: int
    p_value: float
    chance_ratio: float
    chance_p_value: float
    verdict: str
    questions_needed: int | None = None
    by_depth: tuple[
        tuple[float, int, int, int], ...
    ] = ()  # depth, questions, baseline right, candidate right


class Quality(Result, frozen=True):
    """The whole answer. KL in nats, a lower bound from ``logprobs_k`` tokens and the rest as one bin."""

    verdict: str  # pass | fail | inconclusive
    reasons: tuple[str, ...]
    logprobs_k: int
    documents: int
    positions: int
    floor_kl: float
    floor_changed_generations: int
    checks: tuple[Check, ...]
    tasks: tuple[TaskScore, ...]
    kl_by_position: tuple[tuple[int, int, float], ...]  # from, to, mean
    kl_by_document: tuple[tuple[str, float], ...]
    first_divergences: tuple[int | None, ...]
    decode_gap: tuple[tuple[int, float, float], ...]  # generated token, baseline, candidate
    patterns: tuple[Pattern, ...] = ()
    limits: Limits = Limits()

    def check(self, name: str) -> Check:
        """The check of that name."""
        return next(one for one in self.checks if one.name == name)


def judge(work: Work, baseline: Arm, candidate: Arm, floor: Floor, limits: Limits, signs: Signs) -> Quality:
    """Compare the arms. ``signs`` carries what is known from elsewhere (scales); the rest is filled in here."""
    seed = work.size.seed
    rows = [divergences(a, b) for a, b in zip(baseline.scored, candidate.scored, strict=True)]
    kl_rows, flip_rows = [kl for kl, _ in rows], [flips for _, flips in rows]
    noise = bootstrap(floor.kl, seed=seed)
    flips_noise = bootstrap(floor.flips, seed=seed)
    kl, flips = bootstrap(kl_rows, seed=seed), bootstrap(flip_rows, seed=seed)
    every = np.concatenate([np.asarray(row) for row in kl_rows])
    tasks = tuple(score for kind in KINDS if (score := _task(kind, work, baseline, candidate)) is not None)
    gap_base, gap_new = _by_token(baseline.decode_gap), _by_token(candidate.decode_gap)
    patterns = recognise(_filled(signs, work, baseline, candidate, tasks, gap_base, gap_new))
    checks = [
        _limited("kl_mean", kl, noise.high, limits.kl, "nats"),
        _limited("top1_flips", flips, flips_noise.high, limits.flips, "ratio"),
        _pooled(tasks, limits.loss),
        _decode(gap_base, gap_new, patterns, limits.kl),
        Check(name="kl_p99", value=float(np.quantile(every, 0.99)), unit="nats"),
        Check(name="kl_max", value=float(every.max()), unit="nats"),
        _perplexity(baseline, candidate),
    ]
    divergence = tuple(
        _first_difference(a.positions, b.positions)
        for a, b in zip(baseline.generated, candidate.generated, strict=True)
    )
    verdict, reasons = _overall(checks, tasks, kl, noise)
    return Quality(
        verdict=verdict,
        reasons=reasons,
        logprobs_k=min(baseline.k, candidate.k),
        documents=len(kl_rows),
        positions=len(every),
        floor_kl=noise.value,
        floor_changed_generations=floor.changed_generations,
        checks=tuple(checks),
        tasks=tasks,
        kl_by_position=_by_position(kl_rows),
        kl_by_document=tuple(
            (name, statistics.fmean(row)) for name, row in zip(work.names, kl_rows, strict=True)
        ),
        first_divergences=divergence,
        decode_gap=tuple((at, a, b) for at, (a, b) in enumerate(zip(gap_base, gap_new, strict=False))),
        patterns=patterns,
        limits=limits,
    )


def _limited(name: str, seen: Interval, noise: float, limit: float, unit: str) -> Check:
    """Above the reference's own noise: fail when surely above the limit, pass when surely below."""
    low, high = max(0.0, seen.low - noise), max(0.0, seen.high - noise)
    verdict = "fail" if low > limit else "pass" if high <= limit else "inconclusive"
    note = "" if seen.units > 1 or high == low else "one piece of text: no interval"
    return Check(
        name=name,
        value=max(0.0, seen.value - noise),
        low=low,
        high=high,
        limit=limit,
        unit=unit,
        verdict=verdict,
        note=note,
    )


def _task(kind: str, work: Work, baseline: Arm, candidate: Arm) -> TaskScore | None:
    rows = [
        (question, a, b)
        for question, a, b in zip(work.questions, baseline.right, candidate.right, strict=True)
        if question.kind == kind
    ]
    if not rows:
        return None
    right, right_new = sum(a for _, a, _ in rows), sum(b for _, _, b in rows)
    lost, won = sum(a and not b for _, a, b in rows), sum(b and not a for _, a, b in rows)
    chance = max(question.chance for question, _, _ in rows)
    chance_p = binomial_tail(right, len(rows), chance)
    p = mcnemar(lost, won)
    if chance_p >= SIGNIFICANT:
        verdict = "no power"
    elif p < SIGNIFICANT:
        verdict = "worse" if lost > won else "better"
    else:
        verdict = "not significant" if lost or won else "same"
    needed = None
    if verdict == "not significant" and lost > won:
        needed = questions_needed(right / len(rows), (lost - won) / len(rows), SIGNIFICANT)
    by_depth = []
    for depth in DEPTHS if kind == "needle" else ():
        here = [(a, b) for question, a, b in rows if question.depth == depth]
        by_depth.append((depth, len(here), sum(a for a, _ in here), sum(b for _, b in here)))
    return TaskScore(
        kind=kind,
        questions=len(rows),
        baseline_right=right,
        candidate_right=right_new,
        lost=lost,
        won=won,
        p_value=p,
        chance_ratio=chance,
        chance_p_value=chance_p,
        verdict=verdict,
        questions_needed=needed,
        by_depth=tuple(by_depth),
    )


def _pooled(tasks: Sequence[TaskScore], limit: float) -> Check:
    """Net loss over all tasks that can show one."""
    able = [one for one in tasks if one.verdict != "no power"]
    trials = sum(one.questions for one in able)
    if not trials:
        return Check(
            name="task_loss", value=None, limit=limit, unit="ratio", verdict="inconclusive",
            note="no power: the baseline does not beat guessing on any task",
        )  # fmt: skip
    lost, won = sum(one.lost for one in able), sum(one.won for one in able)
    low, high = net_loss(lost, won, trials)
    worse = [one.kind for one in able if one.verdict == "worse"]
    p = mcnemar(lost, won)
    failed = bool(worse) or (p < SIGNIFICANT and lost > won)
    verdict = "fail" if failed else "pass" if high <= limit else "inconclusive"
    note = f"{lost} lost, {won} won of {trials}; exact McNemar p = {p:.2g}"
    return Check(
        name="task_loss", value=(lost - won) / trials, low=low, high=high, limit=limit, unit="ratio",
        verdict=verdict, note=note,
    )  # fmt: skip


def _by_token(gaps: Sequence[Sequence[float]]) -> list[float]:
    """Mean over the generations that got so far, while at least half of them did."""
    longest = max((len(gap) for gap in gaps), default=0)
    means = []
    for at in range(longest):
        here = [gap[at] for gap in gaps if len(gap) > at]
        if 2 * len(here) < len(gaps):
            break
        means.append(statistics.fmean(here))
    return means


def _decode(base: Sequence[float], new: Sequence[float], patterns: Sequence[Pattern], limit: float) -> Check:
    """Whether decoding agrees with prefill as well as it does in the baseline."""
    if not new or not base:
        return Check(name="decode_gap", value=None, unit="nats", note="nothing was generated")
    value, before = statistics.fmean(new), statistics.fmean(base)
    grows = any(one.name == "decode-side" for one in patterns)
    failed = grows or value - before > limit
    rho, p = trend(range(len(new)), new)
    return Check(
        name="decode_gap", value=value - before, limit=limit, unit="nats", verdict="fail" if failed else "pass",
        note=f"KL between decoding and prefill of the same tokens, above the baseline's {before:.2g}; "
        f"correlation with length {rho:+.2f} (p = {p:.2g})",
    )  # fmt: skip


def _perplexity(baseline: Arm, candidate: Arm) -> Check:
    def nats(arm: Arm) -> float:
        return statistics.fmean(-one.logprob for row in arm.scored for one in row)

    return Check(
        name="perplexity_ratio", value=math.exp(nats(candidate) - nats(baseline)), unit="ratio",
        note="for information: it can improve while answers change",
    )  # fmt: skip


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    tokens = [[getattr(one, "token", None) for one in side] for side in (a, b)]
    for at, (x, y) in enumerate(zip(*tokens, strict=False)):
        if x != y:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def _by_position(rows: Sequence[Sequence[float]]) -> tuple[tuple[int, int, float], ...]:
    longest = max(len(row) for row in rows)
    found = []
    for low, high in itertools.pairwise(_EDGES):
        here = [value for row in rows for value in row[low:high]]
        if here:
            found.append((low + 1, min(high, longest), statistics.fmean(here)))
    return tuple(found)


def _filled(
    signs: Signs,
    work: Work,
    baseline: Arm,
    candidate: Arm,
    tasks: Sequence[TaskScore],
    gap_base: Sequence[float],
    gap_new: Sequence[float],
) -> Signs:
    """What the patterns are recognised by."""
    del work

    def looping(arm: Arm) -> int:
        return sum(loops([one.token for one in made.positions]) for made in arm.generated)

    able = [one for one in tasks if one.verdict != "no power"]
    return Signs(
        gap_baseline=tuple(gap_base),
        gap_candidate=tuple(gap_new),
        loops_baseline=looping(baseline),
        loops_candidate=looping(candidate),
        generations=len(candidate.generated),
        lost=sum(one.lost for one in able),
        won=sum(one.won for one in able),
        questions=sum(one.questions for one in able),
        baseline_right=sum(one.baseline_right for one in able),
        loss_by_length=signs.loss_by_length,
        scales=signs.scales,
        quantised=signs.quantised,
        needed_scales=signs.needed_scales,
    )


def _overall(
    checks: Sequence[Check], tasks: Sequence[TaskScore], kl: Interval, noise: Interval
) -> tuple[str, tuple[str, ...]]:
    failed = [one for one in checks if one.verdict == "fail"]
    unsure = [one for one in checks if one.verdict == "inconclusive"]
    powerless = [one.kind for one in tasks if one.verdict == "no power"]
    reasons = []
    for one in failed:
        shown = "n/a" if one.value is None else f"{one.value:.4g}"
        interval = "" if one.low is None else f" (95 %: {one.low:.4g} to {one.high:.4g})"
        reasons.append(f"{one.name} is {shown} {one.unit}{interval}, the limit is {one.limit:.4g}")
    if not failed:
        reasons += [
            f"{one.name} cannot be told: {one.note or f'its interval reaches across the limit of {one.limit:.4g}'}"
            for one in unsure
        ]
    if not any(kl[:3]) and not any(noise[:3]):
        reasons.append("the two arms gave the same numbers at every position")
    elif kl.low > noise.high:
        reasons.append(
            f"the cache changes what the model expects: KL {kl.value:.4g} nats, noise {noise.value:.2g}"
        )
    else:
        reasons.append("the difference is not above the reference's own noise")
    if powerless:
        reasons.append(f"no power on {', '.join(powerless)}: the baseline does not beat guessing there")
    return ("fail" if failed else "inconclusive" if unsure else "pass"), tuple(reasons)

"""Known ways for a quantised cache to go wrong, recognised by their shape."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from kvcatch.quality.stats import mcnemar, questions_needed, trend
from kvcatch.results import Result

SIGNIFICANT = 0.01
#: a decode path that disagrees with prefill by less than this, in nats, is rounding
_GAP_FLOOR = 0.01
#: one that disagrees by so much all along is another path, growing or not
_GAP_APART = 0.1
#: calibrated below this share of what the data needs, a scale clips
_CLIPPED = 0.5


class Pattern(Result, frozen=True):
    """One recognised shape: what it looks like, the usual cause, what to do."""

    name: str
    evidence: str
    cause: str
    remedy: str


class Signs(msgspec.Struct, frozen=True, kw_only=True):
    """What patterns are recognised by. Empty or None = not known."""

    gap_baseline: tuple[float, ...] = ()  # KL of decoding from prefill, per generated token
    gap_candidate: tuple[float, ...] = ()
    loops_baseline: int = 0  # generations that end in a short loop
    loops_candidate: int = 0
    generations: int = 0
    lost: int = 0
    won: int = 0
    questions: int = 0
    baseline_right: int = 0
    loss_by_length: tuple[
        tuple[float, float], ...
    ] = ()  # (generated tokens, 1 = lost) of answers the baseline had
    quantised: bool = False
    scales: tuple[float, ...] | None = (
        None  # k and v scales of the layers as loaded; () = none in the checkpoint
    )
    needed_scales: tuple[float, ...] | None = None  # what the data needs, same order


def recognise(signs: Signs) -> tuple[Pattern, ...]:
    """All shapes that are there, the most telling first."""
    found = [
        _decode_side(signs),
        _loss_with_length(signs),
        _poisoned(signs),
        _unity(signs),
        _too_few(signs),
    ]
    return tuple(one for one in found if one is not None)


def loops(tokens: Sequence[int], longest: int = 8, repeats: int = 4) -> bool:
    """Whether a text ends in at least four rounds of at most eight tokens."""
    for period in range(1, longest + 1):
        tail = tokens[-period * repeats :]
        if len(tail) == period * repeats and all(tail[at] == tail[at % period] for at in range(len(tail))):
            return True
    return False


def _decode_side(signs: Signs) -> Pattern | None:
    new, base = signs.gap_candidate, signs.gap_baseline
    if len(new) < 16:
        return None
    rho, p = trend(range(len(new)), new)
    quarter = len(new) // 4
    early, late = statistics.fmean(new[:quarter]), statistics.fmean(new[-quarter:])
    floor = max(_GAP_FLOOR, 10 * max(base, default=0.0))
    grows = p < SIGNIFICANT and late >= floor and late >= 2 * early
    if not grows and statistics.fmean(new) - max(base, default=0.0) < _GAP_APART:
        return None
    return Pattern(
        name="decode-side",
        evidence=f"decoding leaves prefill: {early:.2g} nats early, {late:.2g} late (correlation {rho:+.2f}, p = {p:.2g})",
        cause="Keys and values are written or read with another scale while decoding than in prefill.",
        remedy="Compare attention backends; check that k_scale and v_scale reach the decode kernel.",
    )


def _loss_with_length(signs: Signs) -> Pattern | None:
    if len(signs.loss_by_length) < 8:
        return None
    length = [row[0] for row in signs.loss_by_length]
    rho, p = trend(length, [row[1] for row in signs.loss_by_length])
    if p >= SIGNIFICANT:
        return None
    return Pattern(
        name="loss-grows-with-length",
        evidence=f"answers are lost where more was generated (correlation {rho:+.2f}, p = {p:.2g})",
        cause="An error that adds up while generating: the decode-side scale path, not the format.",
        remedy="Pass the scales to the decode kernel; try another attention backend.",
    )


def _poisoned(signs: Signs) -> Pattern | None:
    clipped = None
    if signs.scales and signs.needed_scales and len(signs.scales) == len(signs.needed_scales):
        ratios = [
            have / need for have, need in zip(signs.scales, signs.needed_scales, strict=True) if need > 0
        ]
        low = [ratio for ratio in ratios if ratio < _CLIPPED]
        if low and any(one != 1.0 for one in signs.scales):
            clipped = f"{len(low)} of {len(ratios)} scales are below half of what the text needs"
    looping = (
        signs.generations >= 3
        and signs.loops_baseline == 0
        and 2 * signs.loops_candidate >= signs.generations
    )
    if clipped is None and not looping:
        return None
    seen = [
        f"{signs.loops_candidate} of {signs.generations} generations end in a loop, none of the baseline's"
    ]
    return Pattern(
        name="poisoned-scale",
        evidence="; ".join(([clipped] if clipped else []) + (seen if looping else [])),
        cause="Scales were calibrated on text that is not like the real one, for example warm-up tokens: values clip.",
        remedy="Calibrate on real prompts and keep the maximum.",
    )


def _unity(signs: Signs) -> Pattern | None:
    if not signs.quantised or signs.scales is None or any(one != 1.0 for one in signs.scales):
        return None
    how = "all scales are 1.0" if signs.scales else "the checkpoint carries no scales, so 1.0 is used"
    return Pattern(
        name="unity-scales",
        evidence=how,
        cause="The cache was never calibrated: the format's range and the data's do not meet.",
        remedy="Calibrate (see the suggested scales under --locate), then run this again.",
    )


def _too_few(signs: Signs) -> Pattern | None:
    if signs.lost <= signs.won or not signs.questions:
        return None
    p = mcnemar(signs.lost, signs.won)
    if p < SIGNIFICANT:
        return None
    loss = (signs.lost - signs.won) / signs.questions
    needed = questions_needed(signs.baseline_right / signs.questions, loss, SIGNIFICANT)
    return Pattern(
        name="too-few-questions",
        evidence=f"{signs.lost} answers lost and {signs.won} won of {signs.questions}: p = {p:.2g}, not significant",
        cause="So few questions cannot tell such a loss from chance.",
        remedy=f"If the loss is real, about {needed:,} questions would show it (--tasks).",
    )

"""The whole regression: baseline, baseline again, candidate; one engine at a time."""

from __future__ import annotations

import time

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.quality import ledger
from kvcatch.quality.corpus import Document, digest
from kvcatch.quality.endpoint import Endpoint
from kvcatch.quality.measure import Arm, Floor, Progress, Size, Work, measure, prepare, repeat
from kvcatch.quality.patterns import Signs
from kvcatch.quality.savings import Savings, checkpoint_scales, is_quantised, model_digest, savings
from kvcatch.quality.serving import Side, serving
from kvcatch.quality.tasks import all_questions
from kvcatch.quality.verdict import Check, Limits, Quality, judge
from kvcatch.results import Evidence, Finding, Result


class Regression(Result, frozen=True):
    """What ``kvcatch quality`` answers."""

    baseline: str
    candidate: str
    model: str
    engine_version: str | None
    corpus: str
    seed: int
    quality: Quality
    savings: Savings
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    baseline_seconds: float = 0.0
    candidate_seconds: float = 0.0


class Outcome(msgspec.Struct, frozen=True):
    """The answer, and what only this process may see: the arms with their tokens."""

    regression: Regression
    accepted: ledger.Accepted
    work: Work
    baseline: Arm
    candidate: Arm


def regress(
    baseline: Side,
    candidate: Side,
    documents: list[Document],
    size: Size,
    limits: Limits,
    say: Progress,
    accepted: ledger.Accepted | None = None,
    accepted_path: str = "",
) -> Outcome:
    """Measure both sides and judge. Raises KVCatchError when a side cannot be measured."""
    start = time.monotonic()
    questions = all_questions([one.text for one in documents], size.tasks, size.seed) if size.tasks else []
    say(f"baseline: {baseline.words}")
    with serving(baseline) as url:
        endpoint = Endpoint(url)
        work = prepare(endpoint, documents, questions, size)
        before = measure(endpoint, work, lambda text: say(f"baseline: {text}"))
        floor = repeat(endpoint, work, before, say)
        endpoint.close()
    say(f"candidate: {candidate.words}")
    with serving(candidate) as url:
        endpoint = Endpoint(url)
        _same_tokens(endpoint, documents, work)
        after = measure(endpoint, work, lambda text: say(f"candidate: {text}"))
        endpoint.close()
    return conclude(
        baseline, candidate, documents, work, before, after, floor, limits, time.monotonic() - start, accepted, accepted_path
    )  # fmt: skip


def _same_tokens(endpoint: Endpoint, documents: list[Document], work: Work) -> None:
    first = next(one for one in documents if one.name == work.names[0])
    if tuple(endpoint.tokens(first.text)[: work.size.tokens]) != work.ids[0]:
        raise KVCatchError(
            "the two sides split the same text into different tokens.",
            "Quality compares one model with itself under another cache.",
        )


def conclude(
    baseline: Side,
    candidate: Side,
    documents: list[Document],
    work: Work,
    before: Arm,
    after: Arm,
    floor: Floor,
    limits: Limits,
    seconds: float,
    accepted: ledger.Accepted | None = None,
    accepted_path: str = "",
) -> Outcome:
    """Judge two measured arms."""
    signs = Signs(scales=checkpoint_scales(after.root), quantised=is_quantised(candidate))
    quality = judge(work, before, after, floor, limits, signs)
    key = {
        "model": model_digest(before.root, baseline),
        "engine_version": str(after.version),
        "candidate": _settings(candidate),
        "corpus": digest(documents),
        "size": msgspec.json.encode(work.size).decode(),
    }
    now = ledger.accepted(quality, key, after.right)
    if accepted is not None:
        quality = _relative(quality, ledger.against(accepted, now, accepted_path, work.size.seed))
    regression = Regression(
        baseline=baseline.words,
        candidate=candidate.words,
        model=before.model,
        engine_version=before.version,
        corpus=key["corpus"],
        seed=work.size.seed,
        quality=quality,
        savings=savings(baseline, candidate, (before.root, after.root)),
        findings=(_finding(quality),) if quality.verdict == "fail" else (),
        seconds=seconds,
        baseline_seconds=before.seconds,
        candidate_seconds=after.seconds,
    )
    return Outcome(regression, now, work, before, after)


def _settings(where: Side) -> str:
    """The flags that make a candidate what it is: everything but addresses and names."""
    skip = {"--port", "--host", "--served-model-name", "--model", "--api-key"}
    words, kept = list(where.command), []
    for at, word in enumerate(words):
        name = word.partition("=")[0]
        if name.startswith("--") and name not in skip:
            value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
            kept.append(word if "=" in word or not value else f"{word} {value}")
    return " ".join(sorted(kept)) or "url"


def _relative(quality: Quality, checks: list[Check]) -> Quality:
    """With an accepted run, worsening against it decides, not the assumed limits."""
    failed = [one for one in checks if one.verdict == "fail"]
    kept = tuple(
        msgspec.structs.replace(one, verdict="information")
        if one.name in ("kl_mean", "top1_flips", "task_loss") else one
        for one in quality.checks
    )  # fmt: skip
    decode = [one for one in kept if one.name == "decode_gap" and one.verdict == "fail"]
    powered = any(one.verdict != "no power" for one in quality.tasks)
    verdict = "fail" if failed or decode else "pass" if powered else "inconclusive"
    reasons = [f"{one.name} is {one.value:.4g}, the limit is {one.limit:.4g}" for one in [*failed, *decode]]
    if not reasons:
        reasons.append("not worse than the accepted run")
    if not powered:
        reasons.append("no power: the baseline does not beat guessing on any task")
    limits = msgspec.structs.replace(quality.limits, source="baseline file")
    return msgspec.structs.replace(
        quality, verdict=verdict, reasons=tuple(reasons), checks=(*checks, *kept), limits=limits
    )


def _finding(quality: Quality) -> Finding:
    """KVC601 with this run's numbers."""
    from kvcatch.analysis.rules import found

    failed = [one for one in quality.checks if one.verdict == "fail"]
    told = [pattern for pattern in quality.patterns if pattern.name != "too-few-questions"]
    return found(
        "KVC601",
        "critical",
        "The candidate's KV cache changes answers beyond what is accepted.",
        *(Evidence(text=f"{one.name} {one.value:.4g}", value=one.value, unit=one.unit) for one in failed if one.value is not None),
        *(Evidence(text=pattern.evidence) for pattern in told),
        cause=told[0].cause if told else "",
        remedy=told[0].remedy if told else "",
    )  # fmt: skip

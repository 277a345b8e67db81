"""The answer of ``quality`` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcatch.units import human_bytes, human_ratio

if TYPE_CHECKING:
    from kvcatch.quality.eviction import Eviction
    from kvcatch.quality.locate import Location
    from kvcatch.quality.run import Regression
    from kvcatch.quality.savings import Need
    from kvcatch.quality.scores import Scores
    from kvcatch.quality.shadow import Shadow
    from kvcatch.quality.verdict import Check

_COLORS = {"pass": "32", "fail": "1;31", "inconclusive": "33"}
_TASKS = {"no power": "33", "worse": "1;31", "not significant": "33"}


def shadow_lines(answer: Shadow) -> list[str]:
    """The verdict on a mirror, and what each number has shown so far."""
    decided = f"decided after {answer.decided_at}" if answer.decided_at else "not decided, let it run"
    lines = [
        f"{answer.verdict}: {answer.requests} mirrored requests, {decided}",
        (
            f"  a sequential test: however often you look, a wrong verdict has a chance of at most {answer.error:.0%}; "
            f"limits {answer.limits.source}"
        ),
        "",
        f"{'number':<12} {'mean':>10} {'limit':>8} {'for fail':>10} {'for pass':>10}  verdict",
    ]
    lines += [
        f"{one.name:<12} {one.value:>10.4g} {one.limit:>8.4g} {one.fail_evidence:>10.4g} {one.pass_evidence:>10.4g}  {one.verdict}"
        for one in answer.checks
    ]
    needed, enough = 2 / answer.error, 1 / answer.error
    return [
        *lines,
        f"evidence of {needed:.0f} decides a fail, of {enough:.0f} for both numbers a pass",
        f"greedy continuations that differ: {answer.continuations_changed} of {answer.continuations}",
    ]


def regression_lines(answer: Regression, *, color: bool = False) -> list[str]:
    """Verdict first, then the numbers behind it."""
    from kvcatch.views.palette import clean

    def paint(word: str, codes: dict[str, str] = _COLORS) -> str:
        code = codes.get(word) if color else None
        return f"\x1b[{code}m{word}\x1b[0m" if code else word

    quality = answer.quality
    lines = [f"{paint(quality.verdict)}: {clean(answer.candidate)}"]
    lines += [f"  {clean(reason)}" for reason in quality.reasons]
    lines += [
        f"against {clean(answer.baseline)}",
        (
            f"{quality.positions:,} positions of {quality.documents} documents; KL is a lower bound from "
            f"{quality.logprobs_k} log-probabilities and the rest as one bin"
        ),
        f"the reference against itself: KL {quality.floor_kl:.3g}, {quality.floor_changed_generations} generations changed",
        "",
        f"{'number':<24} {'value':>10} {'95 % interval':>22} {'limit':>8}  verdict",
    ]
    lines += [_row(one, paint(one.verdict)) for one in quality.checks]
    if quality.tasks:
        lines += ["", f"{'task':<12} {'questions':>9} {'baseline':>9} {'candidate':>10} {'lost':>5} {'won':>4} {'p':>8}  verdict"]  # fmt: skip
    for task in quality.tasks:
        more = f" ({task.questions_needed:,} questions would tell)" if task.questions_needed else ""
        lines.append(
            f"{task.kind:<12} {task.questions:>9} {task.baseline_right:>9} {task.candidate_right:>10} {task.lost:>5} "
            f"{task.won:>4} {task.p_value:>8.2g}  {paint(task.verdict, _TASKS)}{more}"
        )
        if task.by_depth:
            shown = ", ".join(f"{depth:.0%} {a}→{b} of {n}" for depth, n, a, b in task.by_depth)
            lines.append(f"{'':<12} by depth: {shown}")
    lines += ["", "KL by position: " + ", ".join(f"{low}–{high} {mean:.3g}" for low, high, mean in quality.kl_by_position)]  # fmt: skip
    if quality.first_divergences:
        shown = ", ".join("never" if one is None else str(one) for one in quality.first_divergences)
        lines.append(f"first different token of each greedy continuation: {shown}")
    for pattern in quality.patterns:
        lines += [
            "",
            f"{pattern.name}: {pattern.evidence}",
            f"  cause   {pattern.cause}",
            f"  do      {pattern.remedy}",
        ]
    lines.append("")
    saved = answer.savings
    if saved.saved_ratio is not None:
        lines.append(
            f"saves {human_ratio(saved.saved_ratio)} of the KV bytes per token and GPU: "
            f"{human_bytes(saved.baseline_bytes_per_token)} → {human_bytes(saved.candidate_bytes_per_token)}"
        )
    else:
        lines.append("bytes saved: n/a (the model's configuration or the KV dtype of a side is not known)")
    lines.append(f"took {answer.seconds:.0f} s, engine starts included; limits are {quality.limits.source}")
    return lines


def _row(one: Check, verdict: str) -> str:
    value = "n/a" if one.value is None else f"{one.value:.4g}"
    interval = "" if one.low is None or one.high is None else f"{one.low:.4g} .. {one.high:.4g}"
    limit = "" if one.limit is None else f"{one.limit:.4g}"
    note = f"  ({one.note})" if one.note else ""
    return f"{one.name:<24} {value:>10} {interval:>22} {limit:>8}  {verdict}{note}"


def scores_lines(judged: Scores) -> list[str]:
    """The verdict on paired scores."""
    lines = [
        f"{judged.verdict}: {judged.baseline_right:,} right before, {judged.candidate_right:,} after, of {judged.questions:,}",
        (
            f"  {judged.lost} lost, {judged.won} won; exact McNemar p = {judged.p_value:.2g}; net loss "
            f"{human_ratio(judged.net_loss_low)} to {human_ratio(judged.net_loss_high)}, the limit is {human_ratio(judged.limit)}"
        ),
    ]
    for pattern in judged.patterns:
        lines += [
            f"{pattern.name}: {pattern.evidence}",
            f"  cause   {pattern.cause}",
            f"  do      {pattern.remedy}",
        ]
    return lines


def need_lines(need: Need) -> list[str]:
    """Whether a smaller cache would help the recorded load."""
    return [
        f"would a smaller KV cache help this load? {need.helps}: {need.reason}",
        (
            f"  {need.steps:,} steps, {human_ratio(need.bound_by_blocks_ratio)} bound by blocks, peak "
            f"{human_ratio(need.peak_active_ratio)} active, {need.preemptions or 0:,} preemptions"
        ),
    ]


def location_lines(found: Location) -> list[str]:
    """Whether the emulator may be believed, then what it says."""
    lines = [
        f"emulated in transformers: baseline within {found.baseline_kl:.2g} nats, fp8 rounded to {found.rounding}"
        if found.rounding == "nearest"
        else f"emulated in transformers: baseline within {found.baseline_kl:.2g} nats, fp8 rounded towards zero, as this engine does"
    ]
    for one in found.reproductions:
        lines.append(
            f"  {one.form}: engine {one.engine_kl:.4g}, emulated {one.emulated_kl:.4g} "
            f"({'within' if one.accepted else 'NOT within'} 20 %)"
        )
    if not found.accepted:
        lines.append(f"not accepted: {found.note}")
        lines += [f"  {one.where:<12} explains {one.similarity:.3f}" for one in found.suspects]
        return lines
    lines.append(
        f"{'layer':>5} {'KL alone':>10} {'largest key':>12} {'value':>8} {'k_scale':>9} {'v_scale':>9}  KV heads"
    )
    for layer in found.layers[:8]:
        heads = ", ".join(f"{kl:.2g}" for kl in layer.heads)
        lines.append(
            f"{layer.layer:>5} {layer.kl:>10.3g} {layer.k_absmax:>12.4g} {layer.v_absmax:>8.3g} {layer.k_scale:>9.3g} "
            f"{layer.v_scale:>9.3g}  {heads}"
        )
    lines.append(f"{'format':>7} {'KL':>10} {'95 % interval':>22} {'flips':>7} {'bytes per value':>16}")
    for form in found.formats:
        lines.append(
            f"{form.form:>7} {form.kl:>10.3g} {f'{form.low:.3g} .. {form.high:.3g}':>22} {human_ratio(form.flips):>7} "
            f"{form.bytes_per_value:>16.4g}"
        )
    if found.scaled_kl is not None:
        lines.append(f"e4m3 with the suggested scales of all layers: KL {found.scaled_kl:.3g}")
    return lines


def eviction_lines(answer: Eviction) -> list[str]:
    """What holds for which workload, the front, and every trial."""
    low, high = answer.prompt_tokens
    lines = [
        f"token eviction on {answer.model}, prompts of {low:,} to {high:,} tokens (nothing is said about longer ones)"
    ]
    for one in answer.advice:
        what = (
            "none"
            if one.policy is None or one.budget is None
            else f"{one.policy} at {one.budget:.0%} ({one.grain}s)"
        )
        lines.append(f"  {one.workload:<11} {what}: {one.reason}")
    kinds = list(answer.questions)
    asked = ", ".join(f"{kind} {answer.full_right[kind]} of {answer.questions[kind]}" for kind in kinds)
    lines += [
        f"the full cache answers: {asked}",
        "",
        f"{'policy':<10} {'grain':<6} {'budget':>6} {'KL':>9} {'flips':>7} {'KV bytes':>12} {'blocks freed':>13}  "
        + "  ".join(f"{kind:>10}" for kind in kinds),
    ]
    front = {tuple(one) for one in answer.front}
    for trial in answer.trials:
        star = "*" if (trial.policy, trial.grain, trial.budget) in front else " "
        right = "  ".join(f"{trial.right.get(kind, 0):>10}" for kind in kinds)
        lines.append(
            f"{trial.policy:<10} {trial.grain:<6} {trial.budget:>6.0%} {trial.kl:>9.3g} {human_ratio(trial.flips):>7} "
            f"{human_bytes(trial.kv_bytes):>12} {f'{trial.blocks_freed:.0f} of {trial.blocks:.0f}':>13}  {right} {star}"
        )
    lines.append(f"* no other is better in bytes and KL; took {answer.seconds:.0f} s")
    return lines

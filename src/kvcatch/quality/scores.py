"""Paired scores of an evaluation that was run elsewhere: is the loss real, and does it grow with what was generated?"""

from __future__ import annotations

import json

from kvcatch.errors import KVCatchError
from kvcatch.quality.patterns import Pattern, Signs, recognise
from kvcatch.quality.stats import mcnemar, net_loss
from kvcatch.quality.verdict import SIGNIFICANT, Limits
from kvcatch.results import Result


class Scores(Result, frozen=True):
    """Two runs over the same questions. verdict = pass | fail | inconclusive."""

    verdict: str
    questions: int
    baseline_right: int
    candidate_right: int
    lost: int
    won: int
    p_value: float
    net_loss_low: float
    net_loss_high: float
    limit: float
    patterns: tuple[Pattern, ...]


def read_scores(path: str) -> list[tuple[float | None, bool, bool]]:
    """(generated tokens or None, baseline right, candidate right) per question, from JSON lines. Raises KVCatchError."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KVCatchError(f"cannot read {path}: {error}.", "Give JSON lines.") from None
    return [_row(path, at, line) for at, line in enumerate(lines, 1) if line.strip()]


def _row(path: str, at: int, line: str) -> tuple[float | None, bool, bool]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    row = row if isinstance(row, dict) else {}
    pair = [row.get(side) for side in ("baseline", "candidate")]
    length = row.get("tokens")
    whole = all(isinstance(one, (bool, int)) and one in (0, 1) for one in pair)
    if not whole or not (length is None or (isinstance(length, (int, float)) and length >= 0)):
        raise KVCatchError(
            f"{path}: line {at} has no baseline and candidate that are true or false.",
            'Write {"baseline": true, "candidate": false, "tokens": 812} for each question.',
        )
    return (None if length is None else float(length)), bool(pair[0]), bool(pair[1])


def judge_scores(rows: list[tuple[float | None, bool, bool]], limits: Limits) -> Scores:
    """Exact McNemar, the interval of the net loss, and the known shapes. Raises KVCatchError without rows."""
    if not rows:
        raise KVCatchError("no question in the scores.", "Give one JSON object a line.")
    lost, won = sum(a and not b for _, a, b in rows), sum(b and not a for _, a, b in rows)
    right = sum(a for _, a, _ in rows)
    p = mcnemar(lost, won)
    low, high = net_loss(lost, won, len(rows))
    verdict = "fail" if p < SIGNIFICANT and lost > won else "pass" if high <= limits.loss else "inconclusive"
    signs = Signs(
        lost=lost,
        won=won,
        questions=len(rows),
        baseline_right=right,
        loss_by_length=tuple((length, float(not b)) for length, a, b in rows if a and length is not None),
    )
    return Scores(
        verdict=verdict,
        questions=len(rows),
        baseline_right=right,
        candidate_right=sum(b for _, _, b in rows),
        lost=lost,
        won=won,
        p_value=p,
        net_loss_low=low,
        net_loss_high=high,
        limit=limits.loss,
        patterns=recognise(signs),
    )

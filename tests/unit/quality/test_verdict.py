"""Verdicts on constructed arms."""

from __future__ import annotations

import math

import pytest

from kvcatch.quality import ledger
from kvcatch.quality.endpoint import Continuation, Position
from kvcatch.quality.measure import Arm, Floor, Size, Work
from kvcatch.quality.patterns import Signs
from kvcatch.quality.run import _relative
from kvcatch.quality.tasks import Question
from kvcatch.quality.verdict import Limits, Quality, judge

DOCUMENTS, LENGTH = 6, 64


def position(right: float, token: int = 1) -> Position:
    """Token 1 has probability ``right``, token 2 the rest."""
    top = {1: math.log(right), 2: math.log(1 - right)}
    return Position(token, top[token], max(top, key=lambda one: top[one]), top)


def arm(
    right: float, answers: tuple[bool, ...], gap: float = 0.0, tokens: tuple[int, ...] = (1,) * 32
) -> Arm:
    row = (position(right),) * LENGTH
    made = Continuation("", tuple(position(right, token) for token in tokens))
    return Arm(
        model="m", root="m", version="0.32.0", k=20, scored=(row,) * DOCUMENTS, generated=(made,) * 2,
        decode_gap=((gap,) * 32,) * 2, right=answers,
    )  # fmt: skip


def work(questions: int, chance: float = 0.1) -> Work:
    asked = tuple(
        Question(kind="recall", prompt="", answer="1", chance=chance, group=0) for _ in range(questions)
    )
    names = tuple(f"d{at}" for at in range(DOCUMENTS))
    return Work(names, ((1,) * (LENGTH + 1),) * DOCUMENTS, asked, Size())


QUIET = Floor(((0.0,) * LENGTH,) * 2, ((0.0,) * LENGTH,) * 2, 1, 0)


def verdict(a: Arm, b: Arm, questions: int, chance: float = 0.1, floor: Floor = QUIET) -> Quality:
    return judge(work(questions, chance), a, b, floor, Limits(), Signs())


def test_the_same_numbers_pass_with_exactly_zero():
    answers = (True,) * 60
    found = verdict(arm(0.7, answers), arm(0.7, answers), 60)
    assert found.verdict == "pass"
    assert found.check("kl_mean").value == found.check("top1_flips").value == 0.0
    assert found.first_divergences == (None, None)
    assert "the same numbers at every position" in found.reasons[0]


def test_no_power_cannot_pass():
    # 6 of 60 at a chance of one in ten: no better than guessing
    answers = (True,) * 6 + (False,) * 54
    found = verdict(arm(0.7, answers), arm(0.7, answers), 60)
    assert [one.verdict for one in found.tasks] == ["no power"]
    assert found.verdict == "inconclusive"
    assert "no power" in " ".join(found.reasons)


def test_without_questions_there_is_no_pass_either():
    assert verdict(arm(0.7, ()), arm(0.7, ()), 0).verdict == "inconclusive"


def test_a_significant_loss_of_answers_fails_even_when_the_divergence_is_small():
    before, after = (True,) * 60, (True,) * 50 + (False,) * 10
    found = verdict(arm(0.7, before), arm(0.701, after), 60)
    assert found.verdict == "fail"
    task = found.tasks[0]
    assert (task.lost, task.won, task.verdict) == (10, 0, "worse")
    assert task.p_value == pytest.approx(2 / 1024)


def test_a_loss_that_chance_explains_is_not_significant_and_says_how_many_questions_would_do():
    before, after = (True,) * 60, (True,) * 57 + (False,) * 3
    found = verdict(arm(0.7, before), arm(0.7, after), 60)
    assert found.verdict == "inconclusive"
    task = found.tasks[0]
    assert (task.verdict, task.p_value) == ("not significant", 0.25)
    assert task.questions_needed is not None
    assert task.questions_needed > 100
    assert [one.name for one in found.patterns] == ["too-few-questions"]


def test_divergence_above_the_limit_fails_and_perplexity_has_no_say():
    answers = (True,) * 60
    found = verdict(arm(0.5, answers), arm(0.9, answers), 60)
    # 0.5 ln(0.5/0.9) + 0.5 ln(0.5/0.1)
    assert found.check("kl_mean").value == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5))
    perplexity = found.check("perplexity_ratio")
    assert perplexity.value == pytest.approx(0.5 / 0.9)
    assert (found.verdict, perplexity.verdict) == ("fail", "information")


def test_the_references_own_noise_is_taken_off():
    noisy = Floor(((0.03,) * LENGTH,) * 2, ((0.0,) * LENGTH,) * 2, 1, 1)
    answers = (True,) * 60
    kl = 0.7 * math.log(0.7 / 0.8) + 0.3 * math.log(0.3 / 0.2)
    found = verdict(arm(0.7, answers), arm(0.8, answers), 60, floor=noisy)
    assert kl < 0.03
    assert found.check("kl_mean").value == 0.0
    assert "not above the reference's own noise" in " ".join(found.reasons)


def test_decoding_that_disagrees_with_prefill_fails_where_every_other_number_is_fine():
    answers = (True,) * 60
    found = verdict(arm(0.7, answers), arm(0.7, answers, gap=0.6), 60)
    assert found.verdict == "fail"
    assert found.check("decode_gap").verdict == "fail"
    assert "decode-side" in [one.name for one in found.patterns]


KEY = {"model": "a", "engine_version": "0.32.0"}


def test_a_run_is_judged_against_the_accepted_one_by_worsening():
    before, after = (True,) * 60, (True,) * 59 + (False,)
    base = verdict(arm(0.7, before), arm(0.75, after), 60)
    run = ledger.accepted(base, KEY, after)
    again = _relative(base, ledger.against(run, run, "f"))
    assert again.verdict == "pass"
    assert again.limits.source == "baseline file"
    worse = verdict(arm(0.7, before), arm(0.8, after), 60)
    found = _relative(worse, ledger.against(run, ledger.accepted(worse, KEY, after), "f"))
    assert found.verdict == "fail"
    assert "kl_against_accepted" in found.reasons[0]


def test_an_accepted_run_of_something_else_is_refused(tmp_path):
    base = verdict(arm(0.7, ()), arm(0.75, ()), 0)
    path = str(tmp_path / "accepted.json")
    ledger.write(path, ledger.accepted(base, KEY, ()))
    run = ledger.read(path)
    other = ledger.accepted(base, {**KEY, "engine_version": "0.33.0"}, ())
    with pytest.raises(Exception, match="another engine_version"):
        ledger.against(run, other, path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(Exception, match="no baseline file"):
        ledger.read(str(tmp_path / "broken.json"))

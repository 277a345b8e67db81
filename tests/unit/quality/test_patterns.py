"""Constructed inputs in the shape of real cases, told apart."""

from __future__ import annotations

import random

from kvcatch.quality.patterns import Signs, loops, recognise


def names(signs: Signs) -> set[str]:
    return {one.name for one in recognise(signs)}


def scores(by_length: dict[int, tuple[int, int]]) -> tuple[tuple[float, float], ...]:
    """(length, lost) rows from length -> (answers the baseline had, of these lost)."""
    return tuple(
        (float(length), float(at < lost)) for length, (had, lost) in by_length.items() for at in range(had)
    )


def test_a_loss_that_grows_from_92_to_74_percent_with_length_is_the_decode_path():
    grows = scores({50: (96, 4), 100: (96, 8), 200: (96, 15), 400: (96, 22)})
    assert names(Signs(loss_by_length=grows)) == {"loss-grows-with-length"}


def test_the_same_loss_at_every_length_is_not():
    level = scores({50: (96, 12), 100: (96, 12), 200: (96, 12), 400: (96, 12)})
    assert names(Signs(loss_by_length=level)) == set()


def test_decoding_that_leaves_prefill_is_the_decode_path_and_noise_is_not():
    rng = random.Random(1)
    grows = tuple(0.002 * at * rng.uniform(0.5, 1.5) for at in range(64))
    level = tuple(0.05 * rng.uniform(0.2, 1.8) for _ in range(64))
    rounding = tuple(1e-6 * at for at in range(64))
    quiet = (1e-7,) * 64
    assert names(Signs(gap_baseline=quiet, gap_candidate=grows)) == {"decode-side"}
    assert names(Signs(gap_baseline=quiet, gap_candidate=level)) == set()
    assert names(Signs(gap_baseline=quiet, gap_candidate=rounding)) == set()
    # As measured on a real engine whose decode writes had a lost scale: far off from the first token on.
    assert names(Signs(gap_baseline=quiet, gap_candidate=(0.6, 0.8) * 16)) == {"decode-side"}


def test_a_decode_gap_that_the_baseline_has_too_is_no_fault():
    grows = tuple(0.002 * at for at in range(64))
    assert names(Signs(gap_baseline=grows, gap_candidate=grows)) == set()


def test_loops_within_thirty_tokens_are_a_poisoned_scale():
    assert loops([9, 8, 7, *[1, 2, 3, 4] * 6])
    assert not loops(list(range(40)))
    assert not loops([1, 2, 3, 1, 2, 3])
    seen = Signs(generations=4, loops_candidate=3)
    assert names(seen) == {"poisoned-scale"}
    # A model that loops anyway says nothing about the cache.
    assert names(Signs(generations=4, loops_candidate=3, loops_baseline=2)) == set()


def test_scales_from_unlike_text_clip_and_unity_scales_are_something_else():
    poisoned = Signs(quantised=True, scales=(0.001, 0.002), needed_scales=(0.05, 0.04))
    assert names(poisoned) == {"poisoned-scale"}
    assert names(Signs(quantised=True, scales=(0.05, 0.05), needed_scales=(0.05, 0.04))) == set()
    assert names(Signs(quantised=True, scales=(1.0, 1.0))) == {"unity-scales"}
    assert names(Signs(quantised=True, scales=())) == {"unity-scales"}
    assert names(Signs(quantised=False, scales=())) == set()
    assert names(Signs(quantised=True, scales=None)) == set()


def test_a_loss_in_too_few_questions_is_called_not_significant_with_the_number_that_would_do():
    few = recognise(Signs(lost=4, won=1, questions=30, baseline_right=28))
    assert [one.name for one in few] == ["too-few-questions"]
    assert "not significant" in few[0].evidence
    assert "101" in few[0].remedy
    assert names(Signs(lost=12, won=0, questions=30, baseline_right=28)) == set()
    assert names(Signs(lost=1, won=4, questions=30, baseline_right=28)) == set()

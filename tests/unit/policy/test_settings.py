"""Environment variables to settings; a wrong value names itself."""

from __future__ import annotations

import pytest

from kvcatch.errors import KVCatchError
from kvcatch.policy.settings import can_fire, settings_from


def test_defaults_are_strict_peak_and_the_assumed_watermark() -> None:
    settings = settings_from({})
    assert (settings.mode, settings.quantile, settings.max_bypass, settings.max_wait, settings.aging) == (
        "backfill+peak", None, 64, 30.0, 5.0,
    )  # fmt: skip
    assert (settings.safe_utilization, settings.safe_source) == (0.85, "assumed")
    assert settings.peak


def test_stored_watermark_and_its_override() -> None:
    assert settings_from({}, (0.7, "file")).safe_utilization == 0.7
    overridden = settings_from({"KVCATCH_SAFE_UTILIZATION": "0.5"}, (0.7, "file"))
    assert (overridden.safe_utilization, overridden.safe_source) == (0.5, "KVCATCH_SAFE_UTILIZATION")


def test_quantile_bound() -> None:
    assert settings_from({"KVCATCH_SCHEDULER_BOUND": "0.9"}).quantile == 0.9
    assert settings_from({"KVCATCH_SCHEDULER_BOUND": "max"}).quantile is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVCATCH_SCHEDULER_MODE", "fast"),
        ("KVCATCH_SCHEDULER_BOUND", "nan"),
        ("KVCATCH_SCHEDULER_BOUND", "2"),
        ("KVCATCH_SCHEDULER_MAX_BYPASS", "many"),
        ("KVCATCH_SCHEDULER_VICTIM", "oldest"),
        ("KVCATCH_SAFE_UTILIZATION", "85"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(KVCatchError) as caught:
        settings_from({name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)


def test_a_threshold_that_no_load_can_reach() -> None:
    # 8 sequences of at most 10 blocks never use more than 80 of 1,000.
    assert not can_fire(0.85, usable_blocks=1000, max_request_blocks=10, max_num_seqs=8)
    assert can_fire(0.85, usable_blocks=90, max_request_blocks=10, max_num_seqs=8)

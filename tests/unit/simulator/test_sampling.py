"""The sampled hit curve against the exact one on published traces, and by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvcatch.errors import KVCatchError
from kvcatch.simulator.curve import Curve, hit_curve
from kvcatch.simulator.sampling import sampled_curve
from kvcatch.sources.traces import read_workload
from kvcatch.workload import Workload, build

DATA = Path(__file__).parents[2] / "data/mooncake_fast25"
SEEDS = range(8)


@pytest.mark.parametrize(
    ("name", "block_size", "rate", "mean_error"),
    [
        ("conversation", 16, 0.01, 0.004),
        ("conversation", 512, 0.1, 0.008),
        ("synthetic", 16, 0.01, 0.010),
        ("synthetic", 512, 0.1, 0.016),
    ],
)
def test_published_traces(name, block_size, rate, mean_error):
    workload = read_workload(DATA / f"{name}_trace.jsonl.gz")
    exact = hit_curve(workload, block_size)
    rooms = exact.capacities(48)
    truth = np.array([exact.ratio(room) for room in rooms])
    curves = [sampled_curve(workload, block_size, rate=rate, seed=seed) for seed in SEEDS]
    found = np.array([[curve.ratio(room) for room in rooms] for curve in curves])
    bars = np.array([[curve.error(room) for room in rooms] for curve in curves])
    off = np.abs(found - truth)
    assert off.mean() <= mean_error
    # The bar is of a 95 % interval, itself estimated from eight parts; points of a curve move together.
    assert (off <= bars).mean() >= 0.85
    # It says how far off the curve is, not just something large.
    assert bars.mean() <= 6 * off.mean()
    # The mean over the hash seeds is nearer than one curve is: the errors are no bias.
    assert np.abs(found.mean(axis=0) - truth).mean() <= 0.6 * off.mean()
    for curve in curves:
        # One block of 512 that all 12,031 requests begin with is a twelfth of what a tenth looks at.
        assert curve.sampled == pytest.approx(rate * exact.queried_blocks, rel=0.5)
        # All that can be hit is counted, not estimated.
        assert curve.hit_blocks[-1] == exact.hit_blocks[-1]
        assert curve.first == exact.first


def groups(count: int) -> Workload:
    """``count`` prompts of 10 whole blocks and a token, none like another, one after the other, twice."""
    rows = [
        {"arrival": 0.0, "prompt": 41, "output": 1, "segments": [((turn, "blocks"), 40), ((turn, "rest"), 1)]}
        for turn in [*range(count), *range(count)]
    ]
    return build("twice", rows, grain=1)


def test_by_hand():
    # A scan of 20,000 blocks, repeated: a block comes again when 20,000 others were used, so nothing hits in less
    # than that and everything in a little more, half of all references.
    curve = sampled_curve(groups(2000), 4, rate=0.1)
    assert curve.step == 10
    assert curve.ratio(15_000) == pytest.approx(0.0, abs=0.04)
    assert curve.ratio(25_000) == 20_000 * 4 / (2 * 2000 * 41)
    assert 18_000 < curve.reaching(0.25) < 22_000
    assert curve.saturated_at == pytest.approx(20_000, rel=0.1)


def test_no_more_than_the_largest_request_needs_is_told():
    curve = sampled_curve(groups(2000), 4, rate=0.1)
    assert curve.first == 11
    assert curve.at(10) == (0, 0)


def test_an_entry_holds_for_its_capacities():
    curve = Curve(
        hit_blocks=np.array([0, 1, 5]), hit_tokens=np.array([0, 4, 20]), queried_blocks=10, queried_tokens=40,
        block_size=4, first=1, exact=False, step=10, errors=np.array([0.0, 0.1, 0.2]), sampled=1,
    )  # fmt: skip
    assert [curve.at(room)[0] for room in (0, 1, 10, 11, 20, 99)] == [0, 1, 1, 5, 5, 5]
    assert [curve.error(room) for room in (1, 10, 11)] == [0.1, 0.1, 0.2]
    assert curve.reaching(0.5) == 11
    assert curve.saturated_at == 11


def test_nothing_to_sample():
    empty = build("none", [{"arrival": 0.0, "prompt": 3, "output": 1, "segments": [("a", 3)]}], grain=1)
    curve = sampled_curve(empty, 16, rate=0.1)
    assert (curve.at(1000), curve.sampled, curve.error(1000)) == ((0, 0), 0, 0.0)


@pytest.mark.parametrize("rate", [0.0, -0.1, 0.6, float("nan")])
def test_bad_rates(rate):
    with pytest.raises(KVCatchError, match="sampling rate"):
        sampled_curve(groups(2), 4, rate=rate)

"""Four gateways, three engines, one Redis: cancels, kills and a restart, and nothing in excess or left over."""

from __future__ import annotations

import asyncio

import pytest

from .fleet_run import run


def test_a_small_fleet_never_overshoots_and_leaves_nothing(tmp_path):
    outcome = asyncio.run(run(tmp_path, requests=300, at_once=60, mode="strict", kills=0, restart=False))
    assert outcome.overshoot == 0
    assert outcome.residual == []
    assert outcome.statuses["200"] >= 240  # a tenth is cancelled
    assert max(outcome.worst) > 30  # of 60: they were filled


@pytest.mark.soak
def test_ten_thousand_requests_with_cancels_kills_and_a_restart_of_redis(tmp_path, capsys):
    outcome = asyncio.run(
        run(tmp_path, requests=10_000, at_once=120, mode="strict", kills=4, restart=True, seed=8)
    )
    with capsys.disabled():
        print(f"\n{outcome}")
    assert outcome.overshoot == 0
    assert outcome.residual == []
    assert outcome.redis_recovery <= 10
    assert outcome.statuses["200"] >= 8_000

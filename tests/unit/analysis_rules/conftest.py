"""Recordings that several files ask."""

from __future__ import annotations

import pytest
from recordings import record, steady


@pytest.fixture(scope="session")
def burst(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 requests of about 200 + 300 tokens at once: 6,400 token slots take 12 of them at full length."""
    return record(tmp_path_factory.mktemp("burst"), steady(200, 0.001, output=300))


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """60 requests that all fit."""
    return record(tmp_path_factory.mktemp("calm"), steady(60, 0.1))


@pytest.fixture(scope="session")
def long_one(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Steady load that fits, and one request of 1,900 of the pool's 6,400 tokens: 119 of 400 blocks, 30 %."""
    rows = [*steady(400, 0.035), (5.0, "contracts", 1900, 400)]
    return record(tmp_path_factory.mktemp("long"), rows)

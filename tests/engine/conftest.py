"""Fixtures of the engine tests: models, other releases, and one shared run per expensive question."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.support import env
from engine.support.loaded import Loaded, load_a_server

sys.path.insert(0, str(env.ROOT / "tools"))

from tiny_models import tiny_model as write_tiny_model


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A four-layer random Llama with full attention; one token is one character."""
    return write_tiny_model("full")


@pytest.fixture(scope="session")
def sliding_model() -> Path:
    """The same with a sliding window of 128 tokens in every layer."""
    return write_tiny_model("sliding")


@pytest.fixture(scope="session")
def alternating_model() -> Path:
    """The same with sliding and full layers in turn."""
    return write_tiny_model("alternating")


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """SmolLM2-135M-Instruct, a real chat model."""
    from smollm2 import smollm2

    return smollm2()


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Callable[[str], Loaded]:
    """One big load on a recorded and observed server, ``sync`` or ``async``, run once each."""
    done: dict[str, Loaded] = {}

    def of(mode: str) -> Loaded:
        if mode not in done:
            done[mode] = load_a_server(tmp_path_factory.mktemp(f"server-{mode}"), tiny_model, mode)
        return done[mode]

    return of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for a shared run waits for it; on a busy machine that is many minutes."""
    for item in items:
        if "engine" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(2400))

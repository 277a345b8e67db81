"""One Redis for each file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services import redis_server


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (url, _):
        yield url

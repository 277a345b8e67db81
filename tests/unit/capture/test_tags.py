"""Tags: documented request ids, vllm_xargs, and no raw user value anywhere."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from kvcatch.capture import tags


@pytest.fixture(autouse=True)
def _key(tmp_path) -> None:
    tags.load_key(str(tmp_path))


def test_request_id_carries_tenant_and_hashed_user() -> None:
    name, found = tags.request_tags("cmpl-kvc~acme~alice@example.com~42-0-0a1b2c3d", None)
    assert found["tenant"] == "acme"
    assert re.fullmatch(r"u:[0-9a-f]{16}", found["user"])
    assert "alice" not in name
    assert name == f"cmpl-kvc~acme~{found['user']}~42-0-0a1b2c3d"


def test_xargs_win_over_the_request_id() -> None:
    _, found = tags.request_tags(
        "kvc~a~b~1", {"kvcatch_tenant": "billing", "kvcatch_user": "bob", "other": 1}
    )
    assert found["tenant"] == "billing"
    assert found["user"] == tags.hash_user("bob")


def test_a_hashed_user_is_not_hashed_again() -> None:
    hashed = tags.hash_user("carol")
    assert tags.hash_user(hashed) == hashed


def test_the_key_outlives_the_process(tmp_path) -> None:
    first = tags.hash_user("dave")
    tags.load_key(str(tmp_path))
    assert tags.hash_user("dave") == first
    assert (tmp_path / "user.key").stat().st_mode & 0o777 == 0o600


def test_salt_and_adapter_are_hashed() -> None:
    request = SimpleNamespace(
        request_id="r", sampling_params=None, pooling_params=None, cache_salt="secret-salt",
        lora_request=SimpleNamespace(lora_name="sql"),
    )  # fmt: skip
    text, salt, lora = tags.describe(request)
    assert b"secret" not in text
    assert salt
    assert lora
    assert salt != lora

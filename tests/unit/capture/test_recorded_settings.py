"""Which settings of a configuration object reach the header of a recording: plain ones, and no word of the user's."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcatch.capture.info import settings

CANARY = "canary-7f3a"


class Kind(enum.Enum):
    FAST = "fast"


@dataclasses.dataclass
class Inner:
    window: int = 3
    api_key: str = CANARY


@dataclasses.dataclass
class Config:
    """Fields as vLLM's configuration classes have them, each text a secret."""

    block_size: int = 16
    ratio: float = 0.9
    cached: bool | None = None
    kind: Kind = Kind.FAST
    backend: str = "triton"
    capture_sizes: tuple[int, ...] = (1, 2, 4)
    inner: Inner = dataclasses.field(default_factory=Inner)
    model: str = CANARY
    served_model_name: str = CANARY
    tokenizer: str = CANARY
    hf_token: str = CANARY
    download_dir: str = CANARY
    otlp_traces_endpoint: str = CANARY
    master_addr: str = CANARY
    chat_template: str = CANARY
    note: str = f"some words with {CANARY}"
    route: str = f"/home/me/{CANARY}"
    plugins: tuple[str, ...] = (CANARY,)
    extra: dict[str, str] = dataclasses.field(default_factory=lambda: {"a": CANARY})
    master_port: int = 29500
    rank: int = 3
    _hidden: str = CANARY


def test_plain_settings_stay_and_nothing_of_the_user_does() -> None:
    found = settings(Config())
    assert found == {
        "block_size": 16, "ratio": 0.9, "cached": None, "kind": "fast", "backend": "triton",
        "capture_sizes": "1 2 4", "inner": {"window": 3},
    }  # fmt: skip
    assert CANARY not in json.dumps(found)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda one: st.lists(one) | st.tuples(one)
    )
)
def test_any_value_is_left_out_or_plain(value: Any) -> None:
    made = dataclasses.make_dataclass(
        "Made", [("thing", Any, value if not isinstance(value, list) else None)]
    )
    owner = made()
    owner.thing = value
    for one in settings(owner).values():
        assert one is None or isinstance(one, (bool, int, float, str))
        assert not isinstance(one, str) or (" " not in one.strip() or isinstance(value, (list, tuple)))


def test_circles_end() -> None:
    @dataclasses.dataclass
    class Node:
        size: int = 1
        next: Any = None

    node = Node()
    node.next = node
    assert json.dumps(settings(node)).count("size") == 3

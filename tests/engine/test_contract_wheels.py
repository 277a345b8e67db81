"""The committed table of engine names is what the releases' wheels say."""

from __future__ import annotations

import json

import pytest

from contract.signatures import table
from engine.support import env
from old_engines import RELEASES, release

COMMITTED = json.loads((env.ROOT / "tests" / "contract" / "signatures.json").read_text())


@pytest.mark.parametrize("version", RELEASES)
def test_the_wheel_says_what_is_committed(version: str) -> None:
    # Compared as JSON: tuples and lists are the same there.
    assert json.loads(json.dumps(table(release(version)))) == COMMITTED[version]

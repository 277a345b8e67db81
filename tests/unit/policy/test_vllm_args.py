"""Which flags fit which vLLM."""

from __future__ import annotations

import pytest

from kvcatch.cli import main as cli
from kvcatch.cli.vllm_args import ASYNC, SYNC, Engine, fitting

ALL = frozenset({"--scheduler-cls", "--kv-cache-metrics", "--watermark"})


@pytest.mark.parametrize(
    ("engine", "asynchronous", "expected"),
    [
        (Engine("0.32.0", False, ALL), None, ["--scheduler-cls", ASYNC, "--kv-cache-metrics"]),
        (Engine("0.32.0+cpu", True, ALL), None, ["--scheduler-cls", SYNC, "--kv-cache-metrics"]),
        (Engine("0.32.0+cpu", True, ALL), True, ["--scheduler-cls", ASYNC, "--kv-cache-metrics"]),
        (Engine("0.33.1", False, ALL), False, ["--scheduler-cls", SYNC, "--kv-cache-metrics"]),
        (Engine("0.24.0", False, frozenset({"--scheduler-cls"})), None, ["--scheduler-cls", ASYNC]),
        (Engine("0.12.0", False, frozenset({"--scheduler-cls"})), None, []),
        (Engine("0.40.0", False, frozenset()), None, []),
    ],
)
def test_flags(engine: Engine, asynchronous: bool | None, expected: list[str]) -> None:
    assert fitting(engine, asynchronous)[0] == expected


def test_an_untested_release_says_so_and_keeps_stock_scheduling() -> None:
    flags, notes = fitting(Engine("0.50.0", False, ALL), None)
    assert flags == ["--kv-cache-metrics"]
    assert notes[0] == "vLLM 0.50.0 is untested (0.24 to 0.33 are tested): scheduling stays stock"


def test_without_vllm_it_says_where_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["vllm-args"]) == 2
    said = capsys.readouterr().err
    assert "vLLM is not installed in this environment." in said
    assert "the Python that runs the engine" in said

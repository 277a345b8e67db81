"""Which data-parallel engine a core is, and whether it is one of its own, as the releases tell it."""

from __future__ import annotations

from types import SimpleNamespace

from kvcatch.capture.info import dp_rank_of
from kvcatch.capture.plugin import _in_an_engine_core


def test_the_index_counts_where_there_is_one() -> None:
    # vLLM 0.32 for a dense model with --data-parallel-size 2: the second core is told rank 0 and index 1.
    assert dp_rank_of(SimpleNamespace(data_parallel_rank=0, data_parallel_index=1)) == 1
    assert dp_rank_of(SimpleNamespace(data_parallel_rank=1, data_parallel_index=1)) == 1
    assert dp_rank_of(SimpleNamespace(data_parallel_rank=1)) == 1  # vLLM 0.12
    assert dp_rank_of(SimpleNamespace()) == 0


def test_an_engine_core_of_its_own_is_known_by_its_loop() -> None:
    def run_engine_core() -> bool:  # EngineCoreProc.run_engine_core, vLLM 0.12 to 0.33
        return _in_an_engine_core()

    assert run_engine_core()
    assert not _in_an_engine_core()

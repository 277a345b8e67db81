"""``kvcatch.simulate`` as a library."""

from __future__ import annotations

import doctest

import pytest

import kvcatch
import kvcatch.simulator
from kvcatch.data import CONVERSATION
from kvcatch.errors import KVCatchError
from kvcatch.simulator import load


def test_its_example_is_true():
    result = doctest.testmod(kvcatch.simulator)
    assert (result.failed, result.attempted) == (0, 2)


def test_pool_and_engine_from_a_file_or_a_workload():
    workload = load(CONVERSATION).head(200)
    pool = kvcatch.simulate(workload, num_blocks=640)
    engine = kvcatch.simulate(workload, num_blocks=640, engine=True, max_num_seqs=1)
    # One request at a time is the same question, asked of two simulators.
    assert engine.hit_tokens == pool.hit_tokens
    assert engine.evicted_blocks == pool.evicted_blocks
    assert pool.to_dict()["block_size"] == 512


def test_what_an_engine_needs():
    with pytest.raises(KVCatchError, match="size of its pool"):
        kvcatch.simulate(CONVERSATION, engine=True)
    with pytest.raises(KVCatchError, match="not by 'lfu'"):
        kvcatch.simulate(CONVERSATION, engine=True, num_blocks=100, policy="lfu")

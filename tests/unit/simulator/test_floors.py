"""Floors of tenants: exact where nothing is proven, by hand where something is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.simulator.whatif import simulate
from kvcatch.workload import Workload, build

from .small import workloads


def asked(*rows: tuple[str, str, int]) -> Workload:
    """(tenant, name of the prompt's content, whole blocks of 4 tokens and one token more)."""
    return build(
        "hand",
        [
            {
                "arrival": 0.0, "prompt": 4 * blocks + 1, "output": 1, "tenant": tenant,
                "segments": [*(((name, at), 4) for at in range(blocks)), ((name, "tail"), 1)],
            }
            for tenant, name, blocks in rows
        ],
        grain=4,
    )  # fmt: skip


@given(workloads(), st.integers(9, 40))
@settings(max_examples=40, deadline=None)
def test_where_no_tenant_has_a_floor_it_is_vllms_own_order(workload: Workload, num_blocks: int) -> None:
    # A floor of a thousandth of fewer than forty blocks is none.
    ours = simulate(workload, num_blocks=num_blocks, block_size=4, policy="floors", floors={"*": 0.001})
    vllm = simulate(workload, num_blocks=num_blocks, block_size=4)
    for name in ("hit_blocks", "hit_tokens", "stored_blocks", "evicted_blocks", "rejected_requests"):
        assert getattr(ours, name) == getattr(vllm, name)


def test_a_proven_prefix_outlives_a_flood_and_an_unproven_one_does_not() -> None:
    # 10 usable blocks. "a" takes 4 of them and is proven by the second request; each x takes 4, so five of them
    # turn the pool over twice.
    flood = [("b", f"x{number}", 3) for number in range(5)]
    proven = asked(("a", "head", 3), ("a", "head", 3), *flood, ("a", "head", 3))
    once = asked(("a", "head", 3), *flood, ("a", "head", 3))
    sizes = {"num_blocks": 11, "block_size": 4}
    assert simulate(proven, **sizes).hit_blocks == 3
    assert simulate(proven, **sizes, policy="floors", floors={"a": 0.4}).hit_blocks == 6
    # Of a floor of two blocks the head stays, which is what a prefix needs.
    assert simulate(proven, **sizes, policy="floors", floors={"a": 0.2}).hit_blocks == 5
    assert simulate(proven, **sizes, policy="floors", floors={"b": 0.4}).hit_blocks == 3
    assert simulate(once, **sizes, policy="floors", floors={"a": 0.4}).hit_blocks == 0


def test_protected_blocks_are_evicted_before_an_allocation_fails() -> None:
    # The last request needs all ten blocks: it gets them, and the prefix is gone.
    workload = asked(("a", "head", 3), ("a", "head", 3), ("b", "large", 9), ("a", "head", 3))
    run = simulate(workload, num_blocks=11, block_size=4, policy="floors", floors={"a": 0.5})
    assert run.rejected_requests == 0
    assert run.hit_blocks == 3


@given(workloads(), st.integers(9, 40), st.sampled_from([0.1, 0.25, 0.5]))
@settings(max_examples=40, deadline=None)
def test_every_request_that_fits_is_served_whatever_is_protected(
    workload: Workload, num_blocks: int, share: float
) -> None:
    run = simulate(workload, num_blocks=num_blocks, block_size=4, policy="floors", floors={"*": share})
    fits = -(-(workload.prompt_tokens + np.maximum(workload.output_tokens, 1) - 1) // 4) <= num_blocks - 1
    assert run.rejected_requests == int((~fits).sum())


def test_floors_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    workload = asked(("a", "head", 3), ("b", "other", 3))
    with pytest.raises(KVCatchError, match="needs floors"):
        simulate(workload, policy="floors")
    with pytest.raises(KVCatchError, match="no tenant 'c'"):
        simulate(workload, policy="floors", floors={"c": 0.1})
    assert main(["simulate", "x", "--policy", "help"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed["floors"].endswith("[KVCatchScheduler with KVCATCH_PROTECT]")
    assert listed["lru"].endswith("[vLLM]")
    assert all(
        listed[name].endswith("[bound only]") for name in ("fifo", "lfu", "length", "priority", "belady")
    )

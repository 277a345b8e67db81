"""Other cache layouts on the real engine: sliding windows, sliding and full layers in turn, an fp8 cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcatch
from engine.support import observed
from engine.support.hardware import needs_fp8_cache
from engine.support.offline import Job, offline
from kvcatch.store.replay import Replay

BLOCKS, SIZE, KV_HEADS, HEAD = 96, 32, 2, 32
POOL = {"num_gpu_blocks_override": BLOCKS, "block_size": SIZE, "max_model_len": 1024, "max_num_seqs": 12}
#: bytes of one block of one layer: K and V of 32 tokens
BF16_PAGE = 2 * SIZE * KV_HEADS * HEAD * 2
FP8_PAGE = BF16_PAGE // 2
assert (BF16_PAGE, FP8_PAGE) == (8192, 4096)

#: name -> model fixture, engine arguments, (kind, layers, window) of every group, page bytes
LAYOUTS: dict[str, tuple[str, dict[str, Any], list[tuple[str, int, int | None]], int]] = {
    "sliding": ("sliding_model", {}, [("sliding", 4, 128)], BF16_PAGE),
    "alternating": ("alternating_model", {}, [("full", 2, None), ("sliding", 2, 128)], BF16_PAGE),
    "fp8": ("tiny_model", {"kv_cache_dtype": "fp8"}, [("full", 4, None)], FP8_PAGE),
}
POSSIBLE = [pytest.param(name, marks=needs_fp8_cache if name == "fp8" else ()) for name in LAYOUTS]


@pytest.fixture(scope="session")
def runs(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """One run per layout: its folder and what the engine said."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in done:
            model, arguments, _, _ = LAYOUTS[name]
            folder = tmp_path_factory.mktemp(f"layout-{name}")
            job = Job(str(request.getfixturevalue(model)), {**POOL, **arguments})
            done[name] = (folder, offline(folder, job))
        return done[name]

    return of


@pytest.mark.parametrize("name", POSSIBLE)
def test_groups_and_bytes(runs: Callable[[str], tuple[Path, dict[str, Any]]], name: str) -> None:
    folder, said = runs(name)
    _, _, groups, page = LAYOUTS[name]
    (ring,) = (folder / "rings").glob("*.core0.kvring")
    capture = kvcatch.open(str(ring))
    recorded = sorted((group.kind, group.layers, group.window) for group in capture.info.groups)
    assert recorded == sorted(groups)
    assert {group.page_bytes for group in capture.info.groups} == {page}
    assert {group.block_size for group in capture.info.groups} == {SIZE}
    assert capture.info.num_blocks == BLOCKS
    # One block of the pool has a page in every layer that a tensor serves.
    assert capture.info.block_bytes == sum(said["tensors"]) // BLOCKS
    (rank,) = capture.snapshot().ranks
    assert rank.kv_cache_bytes == sum(said["tensors"])
    if name == "fp8":
        assert capture.info.kv_cache_dtype == "fp8"
    capture.close()


@pytest.mark.parametrize("name", POSSIBLE)
def test_every_step_equals_the_observer(
    runs: Callable[[str], tuple[Path, dict[str, Any]]], name: str
) -> None:
    folder, said = runs(name)
    (ring,) = (folder / "rings").glob("*.core0.kvring")
    (seen,) = observed.read_all(folder)
    comparison = observed.compare(seen, Replay(str(ring)))
    assert comparison.steps > 100
    assert not comparison.wrong, str(comparison)
    capture = kvcatch.open(str(ring))
    views = capture.requests()
    capture.close()
    assert [view.output_tokens for view in views] == said["outputs"]
    assert [view.cached_tokens for view in views] == said["cached"]
    # A window gives its oldest blocks back at once: in so small a pool they are taken before anyone can hit them.
    assert name == "sliding" or sum(said["cached"]) > 0

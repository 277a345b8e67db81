"""The names that the recorder hooks and reads exist, in the same shape, in every supported vLLM release.

``signatures.json`` holds what the releases' sources say (tests/engine/test_contract_wheels.py compares it with the
wheels); here the recorder's own list is held against it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from contract.signatures import CLASSES, Table, first_moved
from kvcatch.capture.contract import HOOKED, READ

RELEASES: dict[str, Table] = json.loads((Path(__file__).parent / "signatures.json").read_text())

#: what the hooks read on the objects that the engine hands them
FIELDS = {
    "SchedulerOutput": (
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens",
        "finished_req_ids", "preempted_req_ids",
    ),
    "CachedRequestData": ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    "NewRequestData": ("req_id", "block_ids", "num_computed_tokens"),
    "Request": (
        "request_id", "arrival_time", "num_prompt_tokens", "num_computed_tokens", "num_tokens", "num_output_tokens",
        "num_preemptions", "max_tokens", "block_hashes", "sampling_params", "cache_salt", "lora_request",
    ),
    "KVCacheBlock": ("block_id", "ref_cnt", "block_hash", "is_null", "next_free_block"),
}  # fmt: skip


def test_the_supported_range_is_covered() -> None:
    assert list(RELEASES) == ["0.12.0.post2", "0.24.0", "0.31.0", "0.32.0", "0.33.0"]
    assert all(set(release) == set(CLASSES) for release in RELEASES.values())


@pytest.mark.parametrize("version", RELEASES)
def test_nothing_that_is_hooked_has_moved(version: str) -> None:
    assert first_moved(RELEASES[version], HOOKED, READ) is None


@pytest.mark.parametrize("version", RELEASES)
def test_every_field_that_hooks_read_is_there(version: str) -> None:
    for owner, names in FIELDS.items():
        assert set(names) <= set(RELEASES[version][owner]["attributes"]), owner


@pytest.mark.parametrize("version", RELEASES)
def test_the_worker_wrapper_has_the_two_methods(version: str) -> None:
    methods = RELEASES[version]["WorkerWrapperBase"]["methods"]
    assert methods["initialize_from_config"][:1] == ["kv_cache_configs"]
    assert "execute_model" in methods


class TestTheFirstThingThatMovedIsNamed:
    """Break a release on purpose."""

    @pytest.fixture
    def release(self) -> Table:
        return copy.deepcopy(RELEASES["0.33.0"])

    def test_a_method_that_is_gone(self, release: Table) -> None:
        del release["BlockPool"]["methods"]["touch"]
        del release["BlockPool"]["methods"]["free_blocks"]
        assert first_moved(release, HOOKED, READ) == "BlockPool.touch is gone"

    def test_another_first_argument(self, release: Table) -> None:
        release["Scheduler"]["methods"]["update_from_output"] = ["model_output", "scheduler_output"]
        assert (
            first_moved(release, HOOKED, READ)
            == "Scheduler.update_from_output takes model_output where scheduler_output was"
        )

    def test_an_attribute_that_is_gone(self, release: Table) -> None:
        release["FreeKVCacheBlockQueue"]["attributes"].remove("num_free_blocks")
        assert first_moved(release, HOOKED, READ) == (
            "FreeKVCacheBlockQueue.num_free_blocks"
            " (of Scheduler.kv_cache_manager.block_pool.free_block_queue.num_free_blocks) is gone"
        )

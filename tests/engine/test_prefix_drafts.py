"""Where a prefix can hit, with and without drafts, against the lookup of the real scheduler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator_oracle import Settings, real_answer, real_request, real_scheduler

from kvcatch.analysis.layout_facts import given_back, reuse_unit
from kvcatch.analysis.prefix import Lookups
from kvcatch.events import EngineInfo, KVGroup
from kvcatch.workload import build

# The engine's libraries warn about each other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 16
#: on, before and behind borders of blocks of 16, 48 and 64 tokens
LENGTHS = (15, 17, 31, 33, 65, 80, 81, 95, 97, 127, 129, 145, 193, 200, 256, 257, 289, 321)


def draft(scheduler: Any) -> None:
    """Give every group the draft layers of EAGLE, as a release does whose groups do not say which have them."""
    coordinator = scheduler.kv_cache_manager.coordinator
    coordinator.eagle_group_ids = set(range(len(coordinator.single_type_managers)))
    for manager in coordinator.single_type_managers:
        manager.use_eagle = True
    if hasattr(coordinator, "attention_groups"):
        coordinator.attention_groups = [
            group._replace(use_eagle=True) for group in coordinator.attention_groups
        ]


def serve(scheduler: Any, name: str, tokens: list[int]) -> int:
    """Run one request to its end; the tokens that it hit."""
    scheduler.add_request(real_request(name, tokens, 1, BLOCK))
    hit = 0
    while scheduler.requests:
        output = scheduler.schedule()
        hit += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
        scheduler.update_from_output(output, real_answer(scheduler, output, 0))
    return hit


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("windows", [(), (64,), (48, 32)], ids=str)
def test_a_repeated_prompt_hits_what_is_expected(
    tmp_path: Path, windows: tuple[int, ...], drafts: bool
) -> None:
    chosen = Settings(
        num_blocks=2000, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=4096, watermark=0.0, requests=0,
        max_model_len=2048,
    )  # fmt: skip
    groups = [KVGroup(kind="full", layers=1, block_size=BLOCK)]
    groups += [KVGroup(kind="sliding", layers=1, block_size=size, window=size) for size in windows]
    info = EngineInfo(num_blocks=2000, block_size=BLOCK, hash_block_size=BLOCK, groups=tuple(groups))
    scheduler = real_scheduler(chosen, tmp_path, windows)
    if drafts:
        draft(scheduler)
    rng = random.Random(1)
    rows, hits = [], []
    for number, length in enumerate(LENGTHS):
        tokens = [rng.randrange(1000) for _ in range(length)]
        assert serve(scheduler, str(2 * number), tokens) == 0
        hits.append(serve(scheduler, str(2 * number + 1), tokens))
        rows.append(
            {"arrival": 0.0, "prompt": length, "output": 1, "segments": [(number, length)], "tenant": ""}
        )
    look = Lookups(
        workload=build("lookups", rows, grain=1), names=[""] * len(rows), block_size=BLOCK,
        unit=reuse_unit(info) if windows else None, given_back=given_back(info, "mtp" if drafts else None),
    )  # fmt: skip
    assert look.reach(np.array(LENGTHS), np.array(LENGTHS)).tolist() == hits

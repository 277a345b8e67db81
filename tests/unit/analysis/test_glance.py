"""Rules that one snapshot proves: each fires on its case and is silent beside it."""

from __future__ import annotations

import msgspec
import pytest

from fakes.capture import request, snapshot
from kvcatch.analysis.glance import glance
from kvcatch.results import LossView, Pool, Queues, RankView, Snapshot, TenantView

FULL = Pool(num_blocks=100, active_blocks=90, cached_blocks=5, free_blocks=5, block_size=16)
EMPTY = Pool(num_blocks=100, active_blocks=0, cached_blocks=40, free_blocks=60, block_size=16)
QUIET = {"requests": (), "tenants": (), "ranks": ()}


def codes(**changes) -> list[tuple[str, str]]:
    return [(found.code, found.severity) for found in glance(snapshot(**{**QUIET, **changes}))]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pool": FULL, "queues": Queues(running=9, waiting_for_blocks=4)}, [("KVC001", "warning")]),
        ({"pool": FULL, "queues": Queues(running=9, waiting_for_blocks=0)}, []),
        ({"queues": Queues(running=9, waiting_for_blocks=4)}, []),  # 60 % active: below the watermark
        ({"pool": EMPTY, "queues": Queues(running=0, waiting_for_blocks=1)}, [("KVC005", "critical")]),
        ({"pool": EMPTY, "queues": Queues(running=None, waiting_for_blocks=1)}, []),
        ({"requests": (request("a", "t", 29),)}, []),
        ({"requests": (request("a", "t", 30),)}, [("KVC003", "info")]),
        ({"bound_by": "max_num_seqs", "queues": Queues(running=8, waiting_other=3)}, [("KVC010", "info")]),
        ({"bound_by": "max_num_seqs", "pool": FULL, "queues": Queues(running=8, waiting_other=3)}, []),
        ({"loss": LossView(dropped_records=1)}, [("KVC503", "warning")]),
    ],
)
def test_rules(changes, expected):
    assert codes(**changes) == expected


def test_the_hog_matters_more_when_others_wait_and_comes_with_its_name():
    state = snapshot(queues=Queues(running=3, waiting_for_blocks=2))
    found = glance(state)
    assert (found[0].code, found[0].severity, found[0].request_id) == ("KVC003", "warning", "long-doc")


def test_a_tenant_and_a_neighbour_process_are_named():
    tenants = (
        TenantView(tenant="big", share_ratio=0.7, num_blocks=70),
        TenantView(tenant="b", share_ratio=0.1),
    )
    found = glance(snapshot(**{**QUIET, "tenants": tenants, "queues": Queues(waiting_for_blocks=1)}))
    assert [(item.code, item.tenant) for item in found] == [("KVC003", "big")]
    ranks = tuple(
        RankView(tp_rank=rank, device=f"cuda:{rank}", memory_total_bytes=100, other_processes_bytes=others)
        for rank, others in enumerate((0, 20))
    )
    (named,) = glance(snapshot(**{**QUIET, "ranks": ranks}))
    assert named.code == "KVC107"
    assert "20% of cuda:1, rank 1" in named.title


def test_a_state_of_unknowns_proves_nothing():
    assert glance(Snapshot()) == ()
    assert glance(msgspec.structs.replace(snapshot(), pool=Pool(), requests=(), tenants=())) == ()

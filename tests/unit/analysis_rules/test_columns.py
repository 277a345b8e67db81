"""A recording read as columns says what the state machine says when it replays the same records."""

from __future__ import annotations

import argparse
import shutil

import numpy as np
import pytest
from recordings import record, steady

from kvcatch.store.capture import ReplayCapture
from kvcatch.store.columns import _running_total, read_recording
from kvcatch.store.drain import Drainer
from kvcatch.store.feeds import open_feed

FIELDS = (
    "arrival", "added", "first", "finish", "prompt_tokens", "max_tokens", "cached_tokens", "queried_tokens",
    "preemptions", "recomputed_tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return record(tmp_path_factory.mktemp("storm"), steady(120, 0.001, output=200), shared=48)


def peaks(path: str) -> dict[int, int]:
    """Most blocks each request held after any step, by replay."""
    replay = ReplayCapture(path, open_feed(path))
    most: dict[int, int] = {}
    for state in replay.steps():
        for request in state.requests.values():
            held = sum(1 for group in request.blocks for block in group if block)
            most[request.rid] = max(most.get(request.rid, 0), held)
    return most


def test_samples_and_requests_are_those_of_the_replay(storm):
    recording, replay = read_recording(storm), ReplayCapture.open(storm)
    expected = replay.samples()
    for name, column in recording.samples.items():
        assert (column == expected[name]).all(), name
    requests = sorted([*replay.state.finished, *replay.state.requests.values()], key=lambda one: one.rid)
    assert recording.requests.rid.tolist() == [one.rid for one in requests]
    for name in FIELDS:
        assert getattr(recording.requests, name).tolist() == [getattr(one, name) for one in requests], name
    assert recording.requests.preemptions.sum() > 10
    assert recording.requests.tenants() == [one.tags["tenant"] for one in requests]


def test_blocks_held_are_those_of_the_replay(storm):
    holds = read_recording(storm).holds
    most: dict[int, int] = {}
    for rid, blocks in zip(holds.rid.tolist(), holds.blocks.tolist(), strict=True):
        most[rid] = max(most.get(rid, 0), blocks)
    replayed = peaks(storm)
    # A request that gained blocks and was preempted within one step held them between two rows.
    assert {rid: n for rid, n in most.items() if n != replayed.get(rid, 0)} == {}


def test_a_drained_file_says_the_same(storm, tmp_path):
    shutil.copy(storm, tmp_path / "run.core0.kvring")
    options = argparse.Namespace(output=str(tmp_path / "run.kvcap"), rotate_bytes=0, rotate_seconds=0.0)
    drainer = Drainer(str(tmp_path), "run", options)
    drainer.pump()
    drainer.finish()
    ring, file = read_recording(storm, chains=True), read_recording(options.output, chains=True)
    assert (ring.samples["active_blocks"] == file.samples["active_blocks"]).all()
    assert ring.requests.finish.tolist() == file.requests.finish.tolist()
    assert ring.holds.blocks.tolist() == file.holds.blocks.tolist()
    # Hashes are salted in the file, and name the same prefixes.
    assert ring.chains.names.tolist() == file.chains.names.tolist()
    assert {rid: path.tolist() for rid, path in ring.chains.paths().items()} == {
        rid: path.tolist() for rid, path in file.chains.paths().items()
    }


def test_chains_are_those_of_the_replay(storm):
    chains = read_recording(storm, chains=True).chains
    replay = ReplayCapture(storm, open_feed(storm))
    seen: dict[int, int] = {}
    for state in replay.steps():
        for request in state.requests.values():
            depth, node = 0, request.node
            while node:
                node = state.nodes[node][0]
                depth += 1
            seen[request.rid] = max(seen.get(request.rid, 0), depth)
    paths = chains.paths()
    # At the end of a request its generated blocks follow, when the replay has let go of it.
    assert seen
    assert all(len(paths[rid]) >= depth for rid, depth in seen.items() if depth)
    assert len(chains.admitted) == 120


def test_a_running_total_that_is_set_now_and_then():
    key = np.array([1, 1, 1, 1, 2, 2, 2])
    number = np.array([3, 4, 0, 5, 2, -1, 7])
    is_set = np.array([False, False, True, False, False, False, True])
    # By hand: 3, 3+4, set to 0, 0+5; then 2, 2-1, set to 7.
    assert _running_total(key, number, is_set).tolist() == [3, 7, 0, 5, 2, 1, 7]

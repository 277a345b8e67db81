"""Tensor, pipeline and data parallel engines on the CPU: every rank and every engine core on its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcatch
from engine.support import observed
from engine.support.loads import tenants_load
from engine.support.offline import Job, offline
from engine.support.server import ask_all, server
from kvcatch.store.replay import Replay

#: several engines in turn, many minutes on two cores
pytestmark = pytest.mark.soak

POOL = {"num_gpu_blocks_override": 64, "block_size": 32, "max_model_len": 1024, "max_num_seqs": 12}
#: (arguments, bytes of the KV cache of one rank): 64 blocks x 32 tokens x K and V x heads x 32 x 2 bytes x layers
#: A pipeline on CPU needs a compilation mode: eager mode skips the warm-up that makes the tensors between stages,
#: and the second stage fails with "assert self.intermediate_tensors is not None" (vLLM 0.32).
TRACED = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
PARALLEL = {
    "tensor": ({"tensor_parallel_size": 2}, 64 * 32 * 2 * 1 * 32 * 2 * 4),
    "pipeline": ({"pipeline_parallel_size": 2, **TRACED}, 64 * 32 * 2 * 2 * 32 * 2 * 2),
}
EATEN_MIB = 1500


@pytest.fixture(scope="session")
def runs(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """One run per kind of parallelism: its folder and what the engine said."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(kind: str) -> tuple[Path, dict[str, Any]]:
        if kind not in done:
            folder = tmp_path_factory.mktemp(f"parallel-{kind}")
            arguments, _ = PARALLEL[kind]
            eat = EATEN_MIB if kind == "tensor" else 0
            job = Job(str(tiny_model), {**POOL, **arguments}, eat_mib=eat)
            said = offline(
                folder,
                job,
                VLLM_ENABLE_V1_MULTIPROCESSING="1",
                VLLM_CPU_OMP_THREADS_BIND="0|1",
                KVCATCH_MEMORY_INTERVAL="0.05",
            )
            done[kind] = (folder, said)
        return done[kind]

    return of


@pytest.mark.parametrize("kind", PARALLEL)
def test_two_ranks_of_one_engine(runs: Callable[[str], tuple[Path, dict[str, Any]]], kind: str) -> None:
    folder, said = runs(kind)
    (ring,) = (folder / "rings").glob("*.core0.kvring")
    (seen,) = observed.read_all(folder)
    comparison = observed.compare(seen, Replay(str(ring)))
    assert comparison.steps > 100
    assert not comparison.wrong, str(comparison)

    capture = kvcatch.open(str(ring))
    ranks = capture.snapshot().ranks
    places = [(rank.tp_rank, rank.pp_rank, rank.dp_rank) for rank in ranks]
    assert sorted(places) == ([(0, 0, 0), (1, 0, 0)] if kind == "tensor" else [(0, 0, 0), (0, 1, 0)])
    assert len({rank.pid for rank in ranks}) == 2
    assert {rank.kv_cache_bytes for rank in ranks} == {PARALLEL[kind][1]}
    assert all(rank.step_seconds and rank.memory_used_bytes for rank in ranks)
    info = capture.info
    assert (info.tp_size, info.pp_size, info.dp_size) == ((2, 1, 1) if kind == "tensor" else (1, 2, 1))
    assert [view.output_tokens for view in capture.requests()] == said["outputs"]
    capture.close()


def test_a_process_that_eats_memory_beside_the_ranks_is_seen(
    runs: Callable[[str], tuple[Path, dict[str, Any]]],
) -> None:
    """Memory of neither rank grows while another process takes it: only ``other`` does."""
    folder, _ = runs("tensor")
    (ring,) = (folder / "rings").glob("*.core0.kvring")
    capture = kvcatch.open(str(ring))
    rows = [event for event in capture.events() if event["kind"] == "rank"]
    ranks = capture.snapshot().ranks
    capture.close()
    eaten = EATEN_MIB << 20
    for source in (1, 2):
        own = [row for row in rows if row["source"] == source]
        middle, last = own[len(own) // 2], own[-1]
        assert last["used_kib"] - middle["used_kib"] < eaten / 1024 / 5
    assert max(row["free_kib"] for row in rows) - rows[-1]["free_kib"] > 0.7 * eaten / 1024
    for rank in ranks:
        assert rank.other_processes_bytes is not None
        assert rank.other_processes_bytes > 0.9 * eaten
        assert rank.memory_used_bytes is not None
        assert rank.memory_used_bytes + rank.other_processes_bytes < (rank.memory_total_bytes or 0)


def test_two_data_parallel_engines(tmp_path: Path, tiny_model: Path) -> None:
    rings = tmp_path / "rings"
    with server(
        tmp_path,
        tiny_model,
        *["--num-gpu-blocks-override", "64", "--block-size", "32", "--max-model-len", "1024"],
        *["--max-num-seqs", "12", "--data-parallel-size", "2", "--enable-prompt-tokens-details"],
        KVCATCH="1",
        KVCATCH_DIR=str(rings),
        KVCATCH_TEST_OBSERVER=str(tmp_path),
    ) as running:
        answers = ask_all(running.url, tenants_load(80), 32)
        metrics = running.get("/metrics")
    assert {answer.status for answer in answers} == {200}
    cores = sorted(rings.glob("*.core*.kvring"))
    assert [core.name.split(".")[1] for core in cores] == ["core0", "core1"]
    assert len({core.name.split(".")[0] for core in cores}) == 1
    views = []
    for seen, core in zip(observed.read_all(tmp_path), cores, strict=True):
        comparison = observed.compare(seen, Replay(str(core)))
        assert comparison.steps > 50
        assert not comparison.wrong, str(comparison)
        capture = kvcatch.open(str(core))
        assert capture.info.dp_size == 1  # vLLM makes the engines of a dense model independent
        (rank,) = capture.snapshot().ranks
        assert rank.dp_rank == capture.info.dp_rank == seen.info["dp_rank"]
        views += capture.requests()
        capture.close()
    named = {view.request_id: view for view in views}
    for answer in answers:
        assert named[str(answer.ask.request_id)].cached_tokens == answer.cached_tokens
    assert json.dumps(metrics).count("vllm:num_preemptions_total") >= 2

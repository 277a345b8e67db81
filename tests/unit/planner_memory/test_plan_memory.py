"""The memory model against real start-ups, and its identity, evidence and warnings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcatch.planner.activations import activation_peak
from kvcatch.planner.catalogue import GPU, find_gpu, find_model
from kvcatch.planner.engine import resolve_limits
from kvcatch.planner.memory import memory_plan, prompt_logprobs_bytes, sampler_warmup_bytes
from kvcatch.planner.shape import model_shape
from kvcatch.planner.specs import EngineFlags, MemoryPlan, ModelShape
from kvcatch.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script behind `make bench`."""
    spec = importlib.util.spec_from_file_location("plan_memory_bench", ROOT / "bench/plan_memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape(name: str) -> ModelShape:
    config = find_model(name)
    assert config is not None
    return model_shape(name, config)


def h100() -> GPU:
    gpu = find_gpu("H100")
    assert gpu is not None
    return gpu


def plan(name: str, **flags: object) -> MemoryPlan:
    given = {"engine_version": "0.19.0", "max_model_len": 8192, "gpu": "H100", **flags}
    return memory_plan(shape(name), EngineFlags(**given), h100())  # type: ignore[arg-type]


def test_errors_against_the_boot_logs_leave_one_model_out(bench: ModuleType) -> None:
    # Goals: weights 0.5 %, available KV 3 %; the best published planner reaches 0.75-0.89 % and 6.7 %. Pinned
    # well below the goals: this model is exact to the printed digit on most rows.
    rows = bench.errors(bench.boots())
    assert len(rows) == 32
    assert bench.mean_absolute(rows, "weights") < 0.1
    assert bench.mean_absolute(rows, "available_kv") < 0.25
    assert bench.mean_absolute(rows, "activation_peak") < 0.6
    assert max(abs(row["available_kv"][2]) for row in rows) < 2


def test_bands_hold_on_every_boot_log(bench: ModuleType) -> None:
    for boot in bench.boots():
        found = bench.predict(boot, bench.Constants())
        for part, printed in (
            (found.weights, boot.log["weights_gib"]),
            (found.activation_peak, boot.log["activation_gib"]),
            (found.available_kv, boot.log["available_kv_gib"]),
        ):
            assert part.evidence != "exact"
            assert abs(part.bytes / GIB - printed) <= part.band / GIB + 0.005, (boot.id, part)


def test_graph_estimate_is_a_band_that_most_logs_keep(bench: ModuleType) -> None:
    outside = []
    for boot in bench.boots():
        graphs = bench.predict(boot, bench.Constants()).cuda_graphs
        if abs(graphs.bytes / GIB - boot.log["cudagraph_est_gib"]) > graphs.band / GIB:
            outside.append(boot.id)
    assert outside == ["A129"]  # the engine estimated 1.60 GiB there and captured 1.03


def test_identity_before_and_after_graphs_count() -> None:
    for version, counted in (("0.19.0", False), ("0.24.0", True)):
        found = plan("Qwen/Qwen3-8B", engine_version=version, gpu_memory_utilization=0.9)
        taken = [found.weights, found.activation_peak, found.non_torch]
        taken += [found.cuda_graphs] if counted else []
        assert found.budget.bytes == int((found.total.bytes or 0) * 0.9)
        assert found.available_kv.bytes == found.budget.bytes - sum(part.bytes or 0 for part in taken)
    assert plan("Qwen/Qwen3-8B", enforce_eager=True).cuda_graphs.bytes == 0


def test_total_is_what_the_driver_reports() -> None:
    found = plan("Qwen/Qwen3-8B", gpu_memory_utilization=0.95)
    assert (found.total.bytes or 0) / GIB == pytest.approx(79.19, abs=1e-6)
    assert round((found.budget.bytes or 0) / GIB, 2) == 75.23  # the "requested" figure of every A77-A129 log


def test_given_parts_win_and_need_no_band() -> None:
    found = plan("Qwen/Qwen3-8B", weights_bytes=15 * GIB, activation_bytes=2 * GIB, non_torch_bytes=GIB // 4)
    assert [part.evidence for part in (found.weights, found.activation_peak, found.non_torch)] == [
        "given"
    ] * 3
    assert found.available_kv.evidence == "given"
    for flag in ("available_kv_bytes", "kv_cache_memory_bytes"):
        fixed = plan("Qwen/Qwen3-8B", **{flag: 4 * GIB})
        assert (fixed.available_kv.bytes, fixed.available_kv.evidence) == (4 * GIB, "given")


def test_offloaded_weights_leave_the_card() -> None:
    whole, rest = plan("Qwen/Qwen3-8B"), plan("Qwen/Qwen3-8B", cpu_offload_gb=4.0)
    assert (whole.weights.bytes or 0) - (rest.weights.bytes or 0) == 4 * GIB
    assert plan("Qwen/Qwen3-8B", cpu_offload_gb=400.0).weights.bytes == 0


def test_unknown_card_leaves_unknown_not_zero() -> None:
    found = memory_plan(shape("Qwen/Qwen3-8B"), EngineFlags(), None)
    assert found.total.bytes is None
    assert found.available_kv.bytes is None
    assert (found.weights.bytes or 0) > 0


def test_the_last_stage_binds_when_it_samples() -> None:
    # Logits and sampling happen on the last stage only, so it has less room for the same number of layers.
    found = plan("meta-llama/Meta-Llama-3.1-8B", pipeline_parallel_size=2)
    first, last = found.available_kv_per_stage
    assert last < first
    assert found.available_kv.bytes == last
    assert found.binding_rank == "pipeline stage 1 of 2"


def test_card_memory_filled_in_from_its_name_keeps_its_evidence() -> None:
    card = h100()
    named = EngineFlags(
        engine_version="0.19.0", max_model_len=8192, gpu="H100", gpu_memory_bytes=card.memory_bytes
    )
    assert memory_plan(shape("Qwen/Qwen3-8B"), named, card).total.evidence == "exact"
    other = EngineFlags(engine_version="0.19.0", max_model_len=8192, gpu="H100", gpu_memory_bytes=70 * GIB)
    assert memory_plan(shape("Qwen/Qwen3-8B"), other, card).total.evidence == "given"


def test_sampler_warm_up_of_gpt_oss_is_the_size_in_the_log() -> None:
    # "Tried to allocate 786.00 MiB" at 1024 requests; starts at 0.90, dies at 0.95 (case B54).
    model = shape("openai/gpt-oss-20b")
    flags = EngineFlags(engine_version="0.19.0", gpu="H100", max_model_len=8192)
    limits = resolve_limits(model, flags, h100().memory_bytes)
    assert limits.max_num_seqs == 1024
    assert round(sampler_warmup_bytes(model, limits) / MIB, 1) == 785.5
    assert any(
        "sampler warm-up" in text for text in plan("openai/gpt-oss-20b", gpu_memory_utilization=0.95).warnings
    )
    for better in ({"gpu_memory_utilization": 0.93}, {"gpu_memory_utilization": 0.95, "max_num_seqs": 512}):
        assert not plan("openai/gpt-oss-20b", **better).warnings


def test_no_alarm_for_start_ups_that_worked(bench: ModuleType) -> None:
    # All 32 ran at 0.95 of an H100 with 1,024 requests.
    assert not [boot.id for boot in bench.boots() if bench.predict(boot, bench.Constants()).warnings]


def test_graphs_grow_with_the_batch_they_capture() -> None:
    usual = plan("Qwen/Qwen3-8B").cuda_graphs.bytes or 0
    small = plan("Qwen/Qwen3-8B", cudagraph_capture_sizes=(1, 2, 4, 256)).cuda_graphs.bytes or 0
    assert small == pytest.approx(usual / 2, abs=2)
    assert plan("Qwen/Qwen3-8B", max_num_seqs=8).cuda_graphs.bytes == usual // 4


def test_prompt_logprobs_headroom() -> None:
    # vllm issue 5907: 8,192 tokens x 152,064 x (2 + 4) bytes = 7.47e9 bytes; the thread's "7.5 GiB" is GB.
    assert prompt_logprobs_bytes(shape("Qwen/Qwen2.5-7B-Instruct"), 8192) == 8192 * 152064 * 6
    assert any("prompt_logprobs" in text for text in plan("Qwen/Qwen3-8B", max_logprobs=20).warnings)


def test_fewer_batched_tokens_give_memory_back() -> None:
    # Case A72: 8224 -> 2048 batched tokens freed 3.9 GiB of a profiled peak; the direction is the claim here.
    wide = plan("deepseek-ai/DeepSeek-V3", max_num_batched_tokens=32768, tensor_parallel_size=8)
    narrow = plan("deepseek-ai/DeepSeek-V3", max_num_batched_tokens=2048, tensor_parallel_size=8)
    assert (narrow.activation_peak.bytes or 0) < (wide.activation_peak.bytes or 0)
    assert narrow.activation_peak.note == "set by the sampler"
    assert wide.activation_peak.note == "set by the layers"


def test_sampler_peak_by_hand() -> None:
    # Qwen2.5-7B, 1024 requests, 152,064 tokens: 14 bytes a logit, 132 fp32 rows, hidden states of 8,192 tokens
    # and of the sampled ones, 42 MiB of workspace.
    model = shape("Qwen/Qwen2.5-7B-Instruct")
    flags = EngineFlags(engine_version="0.19.0", gpu="H100", max_model_len=8192)
    limits = resolve_limits(model, flags, h100().memory_bytes)
    peak = activation_peak(model, flags, limits, indices=range(28), first=True, last=True, sms=132)
    assert peak.limit == "sampler"
    logits = 1024 * 152064 * 14 + 132 * 152064 * 4
    assert peak.bytes == logits + 8192 * 3584 * 2 + 1024 * 3584 * 2 + 42 * MIB
    assert round(peak.bytes / GIB, 2) == 2.21  # as printed


@given(
    st.sampled_from(
        ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "google/gemma-3-12b-it"]
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.sampled_from(["0.6.4", "0.11.0", "0.19.0", "0.32.0"]),
)
def test_parts_are_never_negative_and_more_ranks_never_cost_weights(
    name: str, tp: int, pp: int, version: str
) -> None:
    found = plan(name, engine_version=version, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    for part in (found.weights, found.activation_peak, found.cuda_graphs, found.non_torch):
        assert (part.bytes or 0) >= 0
        assert (part.band or 0) >= 0
    more = plan(name, engine_version=version, tensor_parallel_size=2 * tp, pipeline_parallel_size=pp)
    assert (more.weights.bytes or 0) <= (found.weights.bytes or 0)

"""Every start-up case of the corpus: reproduced, or flagged where the text is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_data import PLAN, config, latent, llama

from kvcatch.planner import plan
from kvcatch.planner.specs import Plan
from kvcatch.units import GIB

ROWS: dict[str, dict[str, Any]] = {
    row["id"]: row for row in map(json.loads, (PLAN / "capacity.jsonl").read_text().splitlines())
}
#: Models whose file ships with the tests; the shape in the row is only a part of it.
CHECKPOINTS = {
    "A36": "nvidia--Gemma-4-31B-IT-NVFP4",
    "A45": "Qwen--Qwen3.5-27B",
    "A46": "nvidia--Qwen3.6-35B-A3B-NVFP4",
    "A47": "Qwen--Qwen3.5-27B",
    "A51": "Qwen--Qwen3.5-27B",
    "A58": "nvidia--MiniMax-M3-NVFP4",
    "A59": "deepseek-ai--DeepSeek-V4-Flash",
    "A60": "deepseek-ai--DeepSeek-V4-Flash",
    "A76": "openai--gpt-oss-120b",
}
#: Rows that state a shape.
SHAPED = sorted(
    row["id"]
    for row in ROWS.values()
    if {"num_layers", "num_kv_heads", "head_dim"} <= set(row["arch"]) or "kv_lora_rank" in row["arch"]
)
#: Rows that name no shape we have: token, length and concurrency must still be one statement.
IDENTITIES = ("A4", "A41", "A42", "A43", "A44", "A49", "A50", "A54", "A55", "A63")


def model_of(row: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the row's shape."""
    arch = row["arch"]
    if row["id"] in CHECKPOINTS:
        return config(CHECKPOINTS[row["id"]])
    if "kv_lora_rank" in arch:
        return latent(arch["num_layers"], arch["kv_lora_rank"], arch["qk_rope_head_dim"])
    heads = arch["num_kv_heads"] * (1 if arch["attn"] == "MHA" else 4)
    more: dict[str, Any] = {}
    if "sliding_layers" in arch:
        kinds = ["full_attention"] * arch["full_layers"] + ["sliding_attention"] * arch["sliding_layers"]
        more = {"layer_types": kinds, "sliding_window": arch["window"]}
    return llama(arch["num_layers"], heads, arch["num_kv_heads"], arch["head_dim"], **more)


def answer(row: dict[str, Any], **more: Any) -> Plan:
    """The plan for a row's flags."""
    options: dict[str, Any] = {
        "tensor_parallel_size": row["tp"],
        "pipeline_parallel_size": row["pp"],
        "kv_cache_dtype": row["kv_dtype"],
        "block_size": row["block_size"],
        "max_model_len": row["max_model_len"] or 8192,
        "engine_version": row["vllm_version"],
        "max_num_batched_tokens": row["log_other"].get("max_num_batched_tokens"),
        "pp_layer_partition": tuple(row["log_other"]["pp_layers"])
        if "pp_layers" in row["log_other"]
        else None,
    } | more
    return plan(
        model_of(row), advise=False, **{key: value for key, value in options.items() if value is not None}
    )


def bounds(row: dict[str, Any], **more: Any) -> tuple[Plan, Plan]:
    """The plans for the two ends of a printed, rounded GiB figure."""
    printed = row["log_available_kv_gib"]
    low, high = (
        answer(row, available_kv_bytes=int((printed + off) * GIB), **more) for off in (-0.005, 0.005)
    )
    return low, high


def exact(row: dict[str, Any], **more: Any) -> Plan:
    """The plan for exactly the blocks the log names."""
    return answer(row, num_gpu_blocks_override=row["log_num_blocks"], **more)


@pytest.mark.parametrize("name", SHAPED)
def test_a_stated_shape_gives_the_logged_numbers(name: str) -> None:
    row = ROWS[name]
    expected, other = row["expected"], row["log_other"]
    if row["log_available_kv_gib"] and name != "A27":
        low, high = bounds(row)
        if row["log_num_blocks"]:
            assert low.num_blocks <= row["log_num_blocks"] <= high.num_blocks
        if "num_blocks_range" in expected:
            assert [low.num_blocks, high.num_blocks] == expected["num_blocks_range"]
    if row["log_num_blocks"]:
        found = exact(row)
        assert row["log_kv_tokens"] in (None, found.kv_cache_tokens)
        if row["log_max_concurrency"]:
            assert f"{found.max_concurrency:.2f}" == f"{row['log_max_concurrency']:.2f}"
        if other.get("starts") is False:
            assert found.starts is False
            assert found.max_model_len_that_fits < row["max_model_len"]
        if "cpu_blocks" in other:
            swap = (other.get("swap_gib") or 4) * GIB
            assert (
                exact(row, swap_space_bytes=swap)
                .log_lines[0]
                .endswith(f"# CPU blocks: {other['cpu_blocks']}")
            )
        for field in ("bytes_per_token_per_gpu", "block_bytes", "blocks_per_max_len_request"):
            if field in expected:
                assert getattr(found, field) == expected[field]
        if "groups" in expected:
            assert len(found.groups) == expected["groups"]
        if expected:
            assert found.kv_cache_tokens == expected["kv_tokens"]
            assert round(found.max_concurrency, 2) == expected["max_concurrency"]


def test_all_rows_are_answered_by_a_test_below_or_above() -> None:
    named = set(SHAPED) | set(IDENTITIES) | set(CHECKPOINTS) | {
        "A18", "A30", "A34", "A40", "A52", "A57", "A67", "A68", "A71", "A72", "A73", "A74",
    }  # fmt: skip
    assert sorted(ROWS) == sorted(named)
    assert len(ROWS) == 86


@pytest.mark.parametrize("name", ["A8", "A9", "A15"])
def test_the_estimated_maximum_is_the_logged_one(name: str) -> None:
    """The refusal of single-stage engines is right: need and estimate inside the printed rounding."""
    row = ROWS[name]
    # A8: TPU pages of 256 tokens; the row leaves the block size open.
    low, high = bounds(row, **({"block_size": 256} if name == "A8" else {}))
    assert low.starts is False
    assert low.max_model_len_that_fits <= row["log_other"]["est_max_len"] <= high.max_model_len_that_fits
    # 16.00 until 0.13, 22.5 since.
    need = row["log_other"]["needed_gib"]
    printed = str(need) if name == "A9" else f"{need:.2f}"
    assert f"({printed} GiB KV cache is needed" in low.log_lines[-1]


def test_a16_the_engine_compares_the_whole_model_with_one_stage() -> None:
    """24.0 GiB is the need of 48 layers, worker 0 has 16: the text says 34,736 tokens where 104,000 fit there."""
    row = ROWS["A16"]
    found = answer(row, available_kv_stages=(int(3.18 * GIB), 12 * GIB))
    assert "(24.0 GiB KV cache is needed" in found.log_lines[-1]
    low, high = (
        answer(row, available_kv_stages=(int((3.18 + off) * GIB), 12 * GIB))
        .log_lines[-1]
        .split()[-1]
        .rstrip(".")
        for off in (-0.005, 0.005)
    )
    assert int(low) <= row["log_other"]["est_max_len"] <= int(high)
    assert 104032 <= found.max_model_len_that_fits <= 104352
    assert any("whole model's need" in warning for warning in found.warnings)


def test_a17_the_true_length_is_eight_times_the_printed_one() -> None:
    row = ROWS["A17"]
    low, high = bounds(row)
    assert (
        "estimated maximum model length is 81392"
        in answer(row, available_kv_bytes=int(28.57 * GIB)).log_lines[-1]
    )
    # 28.57 GiB / (12 layers x 4096 B) = 624,000 tokens, so 202,752 fit and the refusal is the bug.
    assert 623_900 <= min(high.stage_blocks) * 16 <= 624_300
    assert low.starts
    assert any("whole model's need" in warning for warning in low.warnings)


def test_a18_the_smaller_stage_locks_the_pool() -> None:
    """64 layers of 2048 B/token split 56/8 on equal budgets of 5 GiB."""
    found = plan(
        llama(64, 16, 4, 128), pipeline_parallel_size=2, pp_layer_partition=(56, 8), available_kv_bytes=5 * GIB,
        engine_version="0.11", max_model_len=4096, advise=False,
    )  # fmt: skip
    assert [blocks * 16 for blocks in found.stage_blocks] == ROWS["A18"]["log_other"]["stage_tokens"]
    assert found.kv_cache_tokens == 46800
    assert found.binding_stage == 0


def test_a27_one_rank_prints_while_another_binds() -> None:
    """8.69 GiB would hold 94,900 tokens; the engine has 81,536, so that figure is another rank's."""
    row = ROWS["A27"]
    low, _ = bounds(row)
    assert low.num_blocks > row["log_num_blocks"]
    assert 94_800 <= low.kv_cache_tokens <= 95_000
    assert exact(row).kv_cache_tokens == 81536
    assert exact(row).starts is False


def test_a30_before_latent_kernels_the_cache_was_stored_expanded() -> None:
    """DeepSeek-Coder-V2: 60 layers, 128 heads of 192 padded to 256; TP8 = 983,040 B a token against 69,120."""
    model = latent(60, 512, 64, heads=128)
    old = plan(
        model,
        tensor_parallel_size=8,
        engine_version="0.5.4",
        num_gpu_blocks_override=148,
        max_model_len=16000,
    )
    assert old.bytes_per_token_per_gpu == 60 * 16 * 2 * 256 * 2 == 983_040
    assert old.kv_cache_tokens == 2368
    assert old.starts is False
    assert plan(model, tensor_parallel_size=8, max_model_len=16000).bytes_per_token_per_gpu == 69_120


def test_a36_the_same_memory_is_reported_ten_times_larger() -> None:
    """Gemma 4 31B: 10 full and 50 sliding layers in 6 groups of 10; 50 GiB = 20,480 blocks of 2.5 MiB."""
    for version, tokens in (("0.20.0", 54_608), ("0.21.0", None)):
        found = answer(
            ROWS["A36"], engine_version=version, available_kv_bytes=50 * GIB, max_model_len=131072,
            kv_cache_dtype="bfloat16",
        )  # fmt: skip
        assert {(group.kind, group.block_size) for group in found.groups} == {("full", 32), ("sliding", 16)}
        assert (found.block_bytes, found.num_blocks, len(found.groups)) == (2_621_440, 20_480, 6)
        if tokens:
            assert found.kv_cache_tokens == tokens
        else:
            assert 400_000 < found.kv_cache_tokens < 600_000
            assert any("derived" in warning for warning in found.warnings)


def test_a45_hybrid_with_states_held_at_block_ends() -> None:
    row = ROWS["A45"]
    found = answer(row, block_size=None, available_kv_bytes=int(4.99 * GIB))
    assert (found.block_size, found.kv_cache_tokens) == (1568, 302_921)
    assert f"{found.max_concurrency:.2f}" == "2.31"
    # 262,144 tokens need ceil(262144 / 1568) = 168 blocks and 6 of state: they fit.
    assert answer(row, block_size=None, available_kv_bytes=int(4.99 * GIB), max_model_len=262_144).starts


def test_a46_and_a47_and_a51_hybrids_with_and_without_a_draft_module() -> None:
    found = answer(ROWS["A46"], available_kv_bytes=int(5.98 * GIB), enable_prefix_caching=True)
    assert (found.kv_cache_tokens, f"{found.max_concurrency:.2f}") == (567_978, "4.33")
    draft = {"enable_prefix_caching": True, "speculative_method": "mtp"}
    found = answer(ROWS["A47"], available_kv_bytes=int(5.33 * GIB), num_speculative_tokens=3, **draft)
    assert (found.kv_cache_tokens, f"{found.max_concurrency:.2f}") == (300_220, "1.15")
    assert sum(group.padding_layers for group in found.groups) == ROWS["A47"]["log_other"]["padding_layers"]
    # 666 blocks: the pool whose tokens / length is the printed 1.7389.
    found = answer(ROWS["A51"], num_gpu_blocks_override=666, num_speculative_tokens=2, **draft)
    assert (found.kv_cache_tokens, f"{found.max_concurrency:.2f}") == (1_823_372, "1.74")
    assert sum(group.padding_layers for group in found.groups) == 3


def test_a52_groups_take_the_size_of_the_smallest_class() -> None:
    """8 drafter layers, 30 states, 10 full: 30 -> 32 and 10 -> 16."""
    from kvcatch.planner.engine import era_of
    from kvcatch.planner.layout import form_groups
    from kvcatch.planner.pages import LayerSpec

    specs = [
        LayerSpec(kind=kind, index=index, block_size=16, page_bytes=64, identity=(kind,), window=128)
        for kind, count in (("sliding", 8), ("mamba", 30), ("full", 10))
        for index in range(count)
    ]
    groups = form_groups(specs, era_of("0.20.2"), packed=False)
    padding = {
        kind: sum(8 - len(g.specs) for g in groups if g.first.kind == kind) for kind in ("mamba", "full")
    }
    assert padding == {"mamba": 2, "full": 6}


def test_a57_the_need_steps_with_the_large_block() -> None:
    """Lengths inside one block need the same blocks, so nearby budgets print the same figure."""
    model = config("Qwen--Qwen3.5-27B")
    options: dict[str, Any] = {"max_model_len": 262_144, "tensor_parallel_size": 2, "advise": False}
    size = plan(model, **options).block_bytes
    base = plan(model, available_kv_bytes=400 * size, **options)
    more = plan(model, available_kv_bytes=401 * size - 1, **options)
    assert base.kv_cache_tokens == more.kv_cache_tokens


def test_a58_a_sparse_model_counts_its_index_keys_in_the_same_block() -> None:
    row = ROWS["A58"]
    found = exact(row)
    assert found.kv_cache_tokens == 2_558_976
    assert f"{found.max_concurrency:.2f}" == "2.44"


@pytest.mark.parametrize("name", ["A59", "A60"])
def test_one_kv_head_is_replicated_by_tensor_parallelism(name: str) -> None:
    row = ROWS[name]
    eight = answer(row, tensor_parallel_size=8, kv_cache_dtype="auto", block_size=None)
    one = answer(row, tensor_parallel_size=1, kv_cache_dtype="auto", block_size=None)
    assert eight.block_bytes == one.block_bytes
    assert eight.bytes_per_token_per_gpu == one.bytes_per_token_per_gpu


@pytest.mark.parametrize("name", IDENTITIES)
def test_tokens_length_and_concurrency_are_one_statement(name: str) -> None:
    """Rows without a shape: the figures of the line determine each other, on any model of one group."""
    row = ROWS[name]
    tokens, length, printed = row["log_kv_tokens"], row["max_model_len"], row["log_max_concurrency"]
    assert abs(tokens / length - printed) < 0.0055 * max(1, printed / 100)
    found = plan(llama(2, 2, 2, 64), num_gpu_blocks_override=tokens // 16, max_model_len=length, advise=False)
    assert abs(found.kv_cache_tokens - tokens) <= length // 16 + 16
    assert f"{found.max_concurrency:.1f}" == f"{tokens // 16 / -(-length // 16):.1f}"


def test_a40_a_fixed_share_per_request_caps_the_requests() -> None:
    """32.9 % of the pool for any prompt is three requests, whatever their length."""
    row = ROWS["A40"]
    fixed = 0.329 * row["log_kv_tokens"]
    assert row["log_kv_tokens"] // fixed == 3
    found = plan(
        config("hfdefault--glm5_next"),
        tensor_parallel_size=2,
        num_gpu_blocks_override=100,
        max_model_len=8192,
    )
    states = sum(group.blocks_per_request for group in found.groups if group.kind == "mamba")
    assert states >= 3 * sum(1 for group in found.groups if group.kind == "mamba")


@pytest.mark.parametrize("name", ["A34", "A72"])
def test_fewer_batched_tokens_free_activation_memory(name: str) -> None:
    """Both threads end at the same lever: the activation peak grows with max_num_batched_tokens."""
    options = {"gpu": "H100", "max_model_len": 8192, "advise": False}
    wide = plan(llama(), max_num_batched_tokens=64_000, **options)
    slim = plan(llama(), max_num_batched_tokens=2_048, **options)
    assert slim.memory.available_kv.bytes > wide.memory.available_kv.bytes


def test_a67_and_a68_and_a71_and_a76_memory_that_does_not_add_up_is_not_echoed() -> None:
    """Given parts decide: 79.18 x 0.9 - 64.38 - 7.38 - 0.13 is below zero, so the table's 3.33 GiB was at 0.95."""
    row = ROWS["A76"]
    parts = {
        "gpu_memory_bytes": int(79.18 * GIB), "weights_bytes": int(64.38 * GIB), "activation_bytes": int(7.38 * GIB),
        "non_torch_bytes": int(0.13 * GIB), "cuda_graphs_bytes": 0, "enforce_eager": True, "engine_version": "0.11.0",
        "block_size": 128, "max_model_len": 16000, "advise": False,
    }  # fmt: skip
    printed = plan(model_of(row), gpu_memory_utilization=0.9, **parts)
    assert printed.memory.available_kv.bytes < 0
    assert printed.starts is False
    true = plan(model_of(row), gpu_memory_utilization=row["log_other"]["true_util"], **parts)
    assert true.memory.available_kv.bytes / GIB == pytest.approx(row["log_available_kv_gib"], abs=0.01)
    # The three other rows are the same identity: free or used memory against utilisation x total.
    a67, a68, a71 = (ROWS[name]["log_other"] for name in ("A67", "A68", "A71"))
    assert a67["free_gib"] < 0.9 * a67["total_gib"]
    assert 0.20 * a68["total_gib"] < a68["initial_gib"]
    fits = 164.08 - (58.44 + 4.88 + 63.99) - 150 / 1024
    assert fits == pytest.approx(a71["right_fit_gib"], abs=0.01)


def test_a73_half_the_length_is_twice_the_concurrency() -> None:
    """Latent attention only: 29 requests of 32,768 tokens are 58 of 16,384."""
    model = config("deepseek-ai--DeepSeek-R1")
    blocks = 29 * 32_768 // 16
    long, short = (
        plan(model, num_gpu_blocks_override=blocks, max_model_len=length) for length in (32_768, 16_384)
    )
    assert (long.max_concurrency, short.max_concurrency) == (29.0, 58.0)


def test_a74_encoder_output_is_held_once_per_request() -> None:
    """Whisper: 1,500 encoder positions in their own group, no prefix caching; since 0.24 a whole step is reserved."""
    for version, held in (("0.12.0", 1500), ("0.32.0", 2048)):
        found = plan(
            config("hfdefault--whisper"), num_gpu_blocks_override=1000, max_model_len=448, engine_version=version,
            max_num_batched_tokens=2048,
        )  # fmt: skip
        cross = [group for group in found.groups if group.kind == "cross"]
        assert [group.blocks_per_request for group in cross] == [-(-held // 16)]
        assert found.min_reusable_prefix_tokens is None
        # 4 decoder layers of 6 x 64, keys and values in 16 bits, for 1,500 positions.
        assert found.fixed_bytes_per_request == 4 * 1500 * 2 * 6 * 64 * 2


def test_a64_a_draft_layer_is_one_more_latent_layer() -> None:
    """62 x 576 x 2 B = 71,424 B a token: 2,728,672,256 bytes hold 38,144 tokens exactly."""
    row = ROWS["A64"]
    found = answer(
        row | {"arch": row["arch"] | {"num_layers": 61}}, available_kv_bytes=row["log_other"]["available_bytes"],
        speculative_method="mtp", num_speculative_tokens=1, engine_version="0.11.0",
    )  # fmt: skip
    assert found.bytes_per_token_per_gpu == 71_424
    assert found.kv_cache_tokens == 38_144

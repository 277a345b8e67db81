"""The verb: exit codes, JSON keys, pasted commands, tables."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_data import config, llama

from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.planner.command import is_command, parse_command, whole
from kvcatch.units import GIB

#: Keys that others script against.
STABLE = {
    "schema_version", "bytes_per_token_per_gpu", "block_bytes", "num_blocks", "kv_cache_tokens", "max_concurrency",
    "blocks_per_max_len_request", "groups", "memory", "max_model_len_that_fits", "starts", "peak_fits",
    "peak_kv_bytes", "shortfall_bytes", "log_lines", "advice",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama()))
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["plan", *words])
    return code, capsys.readouterr().out


def test_json_has_the_stable_keys(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(
        capsys, model, "--available-kv", "16GiB", "--max-model-len", "8K", "--max-num-seqs", "15", "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert set(found) >= STABLE
    assert {"kind", "layers", "block_size", "page_bytes", "padding_layers"} <= set(found["groups"][0])
    parts = {"total", "budget", "weights", "activation_peak", "cuda_graphs", "non_torch", "available_kv"}
    assert parts <= set(found["memory"])
    assert found["memory"]["available_kv"] == {
        "bytes": 16 * GIB,
        "evidence": "given",
        "band": None,
        "note": "",
    }
    assert found["memory"]["weights"]["bytes"] is None
    assert (found["model"], found["num_blocks"], found["peak_fits"]) == ("my-model", 8192, True)


def test_exit_one_when_the_peak_does_not_fit(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (model, "--available-kv", "10GiB", "--max-model-len", "8192", "--concurrency", "16")
    code, out = run(capsys, *words)
    assert code == 1
    assert "NO: 16 requests of 8,192 tokens need 16.00 GiB" in out
    assert "It holds 9 requests of 8,192 tokens, or 16 requests of 5,104 tokens." in out
    assert "--kv-cache-dtype fp8" in out
    code, out = run(capsys, *words[:-1], "9")
    assert code == 0
    assert "YES: 9 requests" in out


def test_unknown_memory_is_not_available(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, model, "--max-model-len", "8192", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["num_blocks"] is found["starts"] is found["peak_fits"] is found["kv_cache_tokens"] is None
    code, out = run(capsys, model, "--max-model-len", "8192")
    assert "n/a" in out


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        (
            "vllm serve my-model --tensor-parallel-size 2 --max-model-len 32k --kv-cache-dtype=fp8 --enforce-eager",
            {
                "tensor_parallel_size": 2,
                "max_model_len": 32_000,
                "kv_cache_dtype": "fp8",
                "enforce_eager": True,
            },
        ),
        (
            "python3 -m vllm.entrypoints.openai.api_server --model my-model -tp 4 -pp 2 --gpu_memory_utilization 0.95",
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "gpu_memory_utilization": 0.95},
        ),
        (
            "docker run --gpus all -e A=x --ipc=host vllm/vllm-openai:v0.10.1.1 --model my-model --max-num-seqs 64",
            {"engine_version": "0.10.1.1", "max_num_seqs": 64},
        ),
        (
            "VLLM_PP_LAYER_PARTITION=56,8 vllm serve my-model --pipeline-parallel-size 2 --trust-remote-code",
            {"pp_layer_partition": (56, 8), "pipeline_parallel_size": 2},
        ),
        (
            """vllm serve my-model \\\n --speculative-config '{"method":"mtp","num_speculative_tokens":3}' --max-model-len auto""",
            {"speculative_method": "mtp", "num_speculative_tokens": 3, "max_model_len": -1},
        ),
        (
            "/opt/venv/bin/vllm serve my-model --max_num_batched_tokens=8192 --kv-cache-memory-bytes 25GiB --host 0.0.0.0",
            {"max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 25 * GIB},
        ),
    ],
)
def test_a_pasted_command_is_understood(command: str, fields: dict[str, Any]) -> None:
    import shlex

    split = shlex.split(command.replace("\\\n", " "))
    for words in ([command], split):
        assert is_command(words)
        model, found, _ = parse_command(list(words))
        assert (model, found) == ("my-model", fields)


def test_a_command_after_two_dashes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(
        capsys, "--available-kv", "10GiB", "--json", "--", "vllm", "serve", model, "--max-model-len", "8192",
        "--max-num-seqs", "9", "--port", "8000",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert (found["max_model_len"], found["max_num_seqs"], found["peak_fits"]) == (8192, 9, True)


def test_the_start_command_of_the_description(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """32 requests of 8,192 tokens are 32 GiB. 0.90 x 24 - 14 = 7.6 GiB: 3,891 blocks of 2 MiB, 7 requests of 512."""
    pasted = (
        f"python -m vllm.entrypoints.openai.api_server --model {model} --max-model-len 8192 "
        "--gpu-memory-utilization 0.90 --max-num-seqs 32 --enable-prefix-caching --block-size 16"
    )
    card = (
        "--gpu-memory",
        "24GiB",
        "--weights",
        "14GiB",
        "--activations",
        "0",
        "--cuda-graphs",
        "0",
        "--non-torch",
        "0",
    )
    code, out = run(capsys, *card, "--json", "--", *pasted.split())
    found = json.loads(out)
    assert code == 1
    assert (found["peak_kv_bytes"], found["peak_fits"], found["starts"]) == (32 * GIB, False, True)
    assert found["num_blocks"] == int(7.6 * 512)
    assert found["max_concurrency_that_fits"] == 7
    assert found["max_context_that_fits"] == (int(7.6 * 512) - 1) // 32 * 16
    code, out = run(capsys, *card, "--", *pasted.split(), "--kv-cache-dtype", "fp8")
    assert "It holds 15 requests of 8,192 tokens" in out


def test_a_command_without_a_model() -> None:
    with pytest.raises(KVCatchError, match="names no model"):
        parse_command(["vllm", "serve", "--port", "8000"])


@pytest.mark.parametrize(
    ("text", "value"), [("8192", 8192), ("32k", 32_000), ("32K", 32_768), ("1m", 10**6), ("1.5k", 1500)]
)
def test_numbers_as_vllm_reads_them(text: str, value: int) -> None:
    assert whole(text) == value


def test_underscores_parse_and_stay_out_of_the_help(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, model, "--max_model_len", "4096", "--tensor_parallel_size=2", "--json")
    assert (json.loads(out)["max_model_len"], json.loads(out)["bytes_per_token_per_gpu"]) == (4096, 65_536)
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--max_model_len" not in capsys.readouterr().out


def test_csv_has_a_row_per_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("Qwen--Qwen3-8B", "openai--gpt-oss-20b", "deepseek-ai--DeepSeek-V3"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config(name)))
        paths.append(str(path))
    code, out = run(
        capsys, *paths, "--csv", "--available-kv", "20GiB", "--max-model-len", "4096", "--max-num-seqs", "1"
    )
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["model"] for row in rows] == [
        "Qwen--Qwen3-8B",
        "openai--gpt-oss-20b",
        "deepseek-ai--DeepSeek-V3",
    ]
    assert rows[0]["bytes_per_token_per_gpu"] == str(36 * 8 * 2 * 128 * 2)


def test_a_known_name_and_card_work_offline(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(
        capsys, "Qwen3-8B", "--gpu", "H100", "--max-model-len", "8192", "--max-num-seqs", "8", "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert found["bytes_per_token_per_gpu"] == 147_456
    # 8.2 billion parameters in 16 bits.
    assert found["memory"]["weights"]["bytes"] == pytest.approx(16.4e9, rel=0.02)


def test_a_cached_repository_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(llama(2, 4, 2, 64)))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out = run(capsys, "acme/tiny", "--max-model-len", "4096", "--json")
    assert (code, json.loads(out)["bytes_per_token_per_gpu"]) == (0, 2 * 2 * 2 * 64 * 2)


def test_the_list_names_models_and_cards(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "--list")
    assert code == 0
    assert "Qwen/Qwen3-8B" in out
    assert "H100" in out


def test_the_picture_names_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(
        capsys, "Qwen3-8B", "--gpu", "H100", "--max-model-len", "8192", "--max-num-seqs", "8", "--ascii"
    )
    assert code == 0
    for word in ("weights", "activations", "CUDA graphs", "outside torch", "KV cache"):
        assert word in out
    assert "[WWW" in out


def test_a_trace_of_lengths(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "output_length": 100, "hash_ids": [1, 2]}
    trace.write_text(
        "".join(json.dumps(row | {"input_length": n, "timestamp": n}) + "\n" for n in (600, 900, 1000))
    )
    code, out = run(
        capsys, model, "--available-kv", "10GiB", "--max-model-len", "8192", "--concurrency", "9",
        "--expected-lengths", str(trace),
    )  # fmt: skip
    assert code == 0
    assert "3 expected requests" in out
    assert "mean" in out


def test_planning_imports_nothing_heavy() -> None:
    script = (
        "import sys; from kvcatch.cli.main import main; "
        "main(['plan', 'Qwen3-8B', '--available-kv', '10GiB', '--max-model-len', '8192', '--json', '--max-num-seqs', '2']); "
        "heavy = {'torch', 'numpy', 'rich', 'textual', 'plotly', 'numba', 'transformers', 'vllm'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"

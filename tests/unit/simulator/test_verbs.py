"""``simulate`` and ``demo`` as a user runs them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kvcatch.cli import simulate, simulate_engine
from kvcatch.cli.main import main
from kvcatch.events import EngineInfo

SLICE = Path(__file__).parents[3] / "src/kvcatch/data/mooncake_conversation_2000.jsonl.gz"


def answer(capsys, *argv):
    code = main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_simulate_json_has_the_promised_keys(capsys):
    code, out, _ = answer(
        capsys, "simulate", SLICE, "--num-blocks", "5000,unlimited", "--policy", "lru,lfu", "--curve",
        "--bounds", "--kv-bytes-per-token", "128KiB", "--json",
    )  # fmt: skip
    document = json.loads(out)
    assert code == 0
    assert document["schema_version"] == 1
    promised = {
        "num_blocks", "block_size", "policy", "queried_tokens", "hit_tokens", "token_hit_ratio",
        "queried_blocks", "hit_blocks", "block_hit_ratio", "evicted_blocks", "preemptions",
        "recomputed_tokens", "peak_active_blocks", "internal_fragmentation_ratio", "tenants",
    }  # fmt: skip
    assert len(document["results"]) == 4
    for result in document["results"]:
        assert promised <= set(result)
        assert result["preemptions"] is None
    curve = document["traces"][0]["curves"][0]
    at_5000 = document["results"][0]["token_hit_ratio"]
    around = [p["token_hit_ratio"] for p in curve["points"] if p["usable_blocks"] >= 4999][:1]
    assert around[0] >= at_5000
    assert curve["next_gib_token_hit_ratio"] > 0
    assert [rung["name"] for rung in document["traces"][0]["bounds"][0]["ladder"]] == [
        "lru", "strict_prefix", "any_order", "content",
    ]  # fmt: skip


def test_simulate_text_marks_today(capsys):
    code, out, _ = answer(
        capsys, "simulate", SLICE, "--num-blocks", "640", "--curve", "--kv-bytes-per-token", "131072",
        "--limit", "500", "--color", "never", "--ascii",
    )  # fmt: skip
    assert code == 0
    marked = [line for line in out.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert "639" in marked[0]
    assert "today" in marked[0]
    assert out.isascii()


def test_plain_rules_show_a_range(capsys):
    _, out, _ = answer(capsys, "simulate", SLICE, "--engine-rules", "off", "--limit", "100")
    assert "A range:" in out


def test_policies_are_listed(capsys):
    code, out, _ = answer(capsys, "simulate", SLICE, "--policy", "help")
    assert code == 0
    assert "belady" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num-blocks", "many"], "'many' is not a number"),
        (["--num-blocks", "0"], "--num-blocks: 0 is out of range"),
        (["--policy", "random"], "unknown policy 'random'"),
        (["--limit", "-3"], "--limit: -3 is out of range"),
    ],
)
def test_simulate_says_what_is_wrong(capsys, argv, said):
    code, out, err = answer(capsys, "simulate", SLICE, *argv)
    assert (code, out) == (2, "")
    assert said in err


def test_demo_shows_holders_curve_and_the_next_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, err = answer(capsys, "demo", "--requests", "50", "--color", "never")
    assert code == 0
    for part in (
        "assistant",
        "contracts",
        "today",
        "the next GiB wins",
        "KVC003",
        "kvcatch run -- vllm serve MODEL",
    ):
        assert part in out
    # The report is written without being asked for, where it litters no working folder, and the place is said.
    report = tmp_path / "cache" / "kvcatch" / "demo.html"
    assert "<html" in report.read_text()
    assert f"Wrote {report}" in out
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert "real trace" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--engine"], "needs the size of the pool"),
        (["--engine", "--num-blocks", "50", "--step-cost", "fixed=1ms,magic=2ms"], "no part 'magic'"),
        (["--engine", "--num-blocks", "50", "--watermark", "much"], "'much' is not a number"),
        (["--engine", "--num-blocks", "50", "--watermark", "1.5"], "not in [0, 1)"),
        (["--engine", "--num-blocks", "50", "--speed", "0"], "--speed 0.0 is not positive"),
        (["--engine", "--num-blocks", "50", "--policy", "lfu"], "evicts as vLLM does"),
        (["--engine", "--num-blocks", "50", "--async-scheduling", "yes"], "'yes' is neither on nor off"),
        (
            ["--engine", "--num-blocks", "50", "--async-scheduling", "on", "--priority", "a=1"],
            "first come first served",
        ),
        (["--fit", "--engine", "--num-blocks", "50"], "holds no measured times"),
        (["--validate"], "holds no measured times"),
    ],
)
def test_engine_options_are_checked(capsys, argv, said):
    code, _, err = answer(capsys, "simulate", SLICE, *argv)
    assert code == 2
    assert said in err


def test_engine_table(capsys):
    code, out, _ = answer(
        capsys, "simulate", SLICE, "--engine", "--num-blocks", "640", "--limit", "100",
        "--step-cost", "fixed=7ms,prefill=25us",
    )  # fmt: skip
    assert code == 0
    assert "TTFT mean" in out
    assert len(out.splitlines()) == 3


def test_async_scheduling_is_a_column_and_a_field(capsys):
    argv = [
        "simulate",
        SLICE,
        "--engine",
        "--num-blocks",
        "640",
        "--limit",
        "50",
        "--async-scheduling",
        "off,on",
    ]
    code, out, _ = answer(capsys, *argv)
    assert code == 0
    assert [line.split("  ")[-1] for line in out.splitlines()[2:]] == ["stock", "stock, async"]
    code, out, _ = answer(capsys, *argv, "--json")
    assert [one["async_scheduling"] for one in json.loads(out)["results"]] == [False, True]


def test_sampled_curve(capsys):
    argv = ["simulate", SLICE, "--curve", "--sample", "0.1"]
    code, out, _ = answer(capsys, *argv)
    assert code == 0
    assert "(1 block in 10); ± is the 95 % interval" in out
    assert "requests, one after the other" not in out
    code, out, _ = answer(capsys, *argv, "--json")
    document = json.loads(out)
    assert (document["results"], code) == ([], 0)
    (curve,) = document["traces"][0]["curves"]
    assert 0 < curve["sampled_references"] < 0.2 * 51_000
    assert 0 < curve["points"][0]["token_hit_ratio_error"] < 0.1
    assert json.loads(answer(capsys, "simulate", SLICE, "--curve", "--json")[1])["traces"][0]["curves"][0][
        "sampled_references"
    ] is None  # fmt: skip
    for options in (["--sample", "0.1"], [*argv[2:], "--engine-rules", "off"], [*argv[2:], "--engine"]):
        code, _, err = answer(capsys, "simulate", SLICE, *options)
        assert (code, "--sample estimates the curve" in err) == (2, True)


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        ("0.32.0", [], [True]),
        ("0.32.0", ["--async-scheduling", "off"], [False]),
        ("0.32.0", ["--async-scheduling", "off,on"], [False, True]),
        ("0.32.0", ["--priority", "a=1"], [False]),  # known without async scheduling only
        ("0.12.0", [], [False]),
    ],
)
def test_a_recordings_async_scheduling_is_the_default(version, options, expected):
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    args = parser.parse_args(["engine.kvcap", *options])
    info = EngineInfo(engine_version=version, async_scheduling=True)
    grid = simulate_engine.settings_grid(args, [100], [16], info, lambda _option, _text: [], False)
    assert [one.async_scheduling for one in grid] == expected


def test_host_memory(capsys):
    argv = [
        "simulate",
        SLICE,
        "--num-blocks",
        "640",
        "--curve",
        "--host-memory",
        "200GiB",
        "--host-bandwidth",
        "25GB",
    ]
    assert answer(capsys, *argv)[0] == 2
    code, out, _ = answer(capsys, *argv, "--kv-bytes-per-token", "128KiB", "--json")
    tier = json.loads(out)["traces"][0]["curves"][0]["host_tier"]
    assert code == 0
    assert tier["host_blocks"] == 3200  # 200 GiB / (512 x 128 KiB)
    assert tier["transfer_seconds"] == tier["host_hit_tokens"] * 131072 / 25e9

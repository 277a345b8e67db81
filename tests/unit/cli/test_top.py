"""``kvcatch top`` as a command: exit codes, stdout, stderr, and what it must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fakes import api
from fakes.capture import FakeCapture, snapshot
from kvcatch.cli.main import main
from kvcatch.errors import KVCatchError
from kvcatch.results import Snapshot


def top(monkeypatch, *words: str, **targets) -> int:
    captures = {None: FakeCapture(), "a": FakeCapture(), **targets}
    api.install(monkeypatch, captures)
    return main(["top", *words])


def test_once_json_is_one_document_with_the_keys_of_the_contract(monkeypatch, capsys):
    assert top(monkeypatch, "a", "--once", "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["schema_version"] == 1
    expected = {
        "pool": "num_blocks active_blocks cached_blocks free_blocks block_size active_tokens",
        "queues": "running waiting_for_blocks waiting_other held",
        "prefix": "queried_tokens hit_tokens hit_ratio",
        "preemption": "preemptions recomputes recomputed_tokens",
        "efficiency": "block_utilization_ratio internal_fragmentation_ratio",
        "latency": "ttft_seconds tpot_seconds output_tokens_per_second",
        "headroom": "requests prompt_tokens output_tokens limit",
    }
    for part, keys in expected.items():
        assert set(keys.split()) <= set(document[part])
    request = document["requests"][1]
    keys = (
        "request_id engine_request_id tags status num_blocks shared_blocks num_tokens prompt_tokens output_tokens "
        "cached_tokens num_preemptions age_seconds"
    )
    assert set(keys.split()) <= set(request)
    rank = (
        "tp_rank pp_rank dp_rank device memory_total_bytes memory_used_bytes memory_peak_bytes kv_cache_bytes "
        "other_processes_bytes"
    )
    assert set(rank.split()) <= set(document["ranks"][0])
    assert document["queues"]["held"] is None  # unknown is null
    assert document["headroom"] == {
        "requests": 8,
        "prompt_tokens": 64,
        "output_tokens": 16,
        "limit": "blocks",
    }
    assert "loss" in document


def test_several_targets_are_one_document(monkeypatch, capsys):
    other = FakeCapture(snapshot(target="live:77"))
    assert top(monkeypatch, "a", "b", "--once", "--json", b=other) == 0
    document = json.loads(capsys.readouterr().out)
    assert [state["target"] for state in document["targets"]] == ["live:4242", "live:77"]


def test_a_stream_ends_with_the_engine(monkeypatch, capsys):
    capture = FakeCapture()
    states = iter(["live", "live", "ended"])
    monkeypatch.setattr(
        capture, "snapshot", lambda window_seconds=60.0: snapshot(state=next(states)), raising=True
    )
    assert top(monkeypatch, "e", "--json", "--interval", "50ms", e=capture) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["live", "live", "ended"]
    assert "the record has ended" in err


def test_text_names_the_chosen_recorder_and_honours_width_view_and_ascii(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert top(monkeypatch, "--once", "--view", "fragmentation", "--ascii") == 0
    out, err = capsys.readouterr()
    assert "watching live:4242, the newest recorder" in err
    assert out.isascii()
    assert "930 tokens in 960 slots" in out
    assert max(map(len, out.splitlines())) <= 80


def test_without_a_terminal_it_prints_once_and_says_so(monkeypatch, capsys):
    assert top(monkeypatch, "a") == 0
    out, err = capsys.readouterr()
    assert "no terminal" in err
    assert "long-doc" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("env", "words", "colored"),
    [
        ({}, ["--color", "always"], True),
        ({"NO_COLOR": "1"}, ["--color", "always"], True),
        ({"FORCE_COLOR": "1"}, [], True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, [], False),
        ({"FORCE_COLOR": "1"}, ["--color", "never"], False),
        ({}, [], False),
    ],
)
def test_colour_rules(monkeypatch, capsys, env, words, colored):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert top(monkeypatch, "a", "--once", *words) == 0
    assert ("\x1b[" in capsys.readouterr().out) == colored


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--once"], "no such target: nowhere"),
        (["a", "--once", "--interval", "0"], "too short"),
        (["a", "--once", "--headroom", "many"], "not a request size: 'many'"),
        (["a", "--view", "everything"], "invalid choice"),
        (["--all", "--once"], "no live recorder"),
    ],
)
def test_mistakes_exit_2_with_what_to_do(monkeypatch, capsys, words, message):
    assert top(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_target_that_cannot_be_read_exits_2(monkeypatch, capsys):
    broken = FakeCapture()
    broken.broken = KVCatchError("the engine went away")
    assert top(monkeypatch, "x", "--once", x=broken) == 2
    assert "the engine went away" in capsys.readouterr().err


def test_all_takes_every_live_recorder(monkeypatch, capsys):
    found = [
        SimpleNamespace(path=name, state=state)
        for name, state in (("p", "live"), ("q", "ended"), ("r", "idle"))
    ]
    captures = {name: FakeCapture(snapshot(target=name)) for name in "pqr"}
    api.install(monkeypatch, captures, found)
    assert main(["top", "--all", "--once", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [state["target"] for state in document["targets"]] == ["p", "r"]


def test_headroom_size_is_the_users(monkeypatch, capsys):
    assert top(monkeypatch, "a", "--once", "--json", "--headroom", "160+1") == 0
    assert json.loads(capsys.readouterr().out)["headroom"]["requests"] == 4  # 40 blocks free, 10 each


def test_captures_are_closed(monkeypatch):
    capture = FakeCapture()
    assert top(monkeypatch, "c", "--once", c=capture) == 0
    assert capture.closed


def test_the_text_print_loads_no_screen_library():
    code = (
        "import sys; import kvcatch.cli.top, kvcatch.views.text, kvcatch.views.live;"
        "print([name for name in ('textual', 'rich', 'plotly', 'numba', 'torch', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_empty_state_prints_na(monkeypatch, capsys):
    empty = FakeCapture(Snapshot(target="http://x", source="scrape"))
    assert top(monkeypatch, "x", "--once", x=empty) == 0
    assert "n/a" in capsys.readouterr().out

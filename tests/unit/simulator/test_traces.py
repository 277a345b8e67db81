"""Trace readers: every format, what they repair, what they refuse."""

from __future__ import annotations

import gzip
import json

import pytest

from kvcatch.errors import KVCatchError
from kvcatch.simulator.whatif import simulate
from kvcatch.sources.traces import read_workload
from kvcatch.workload import build


def write(tmp_path, lines, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def mooncake(ids, length, t=0, **more):
    return {"timestamp": t, "input_length": length, "output_length": 2, "hash_ids": ids, **more}


def test_mooncake_milliseconds_and_partial_last_block(tmp_path):
    path = write(tmp_path, [mooncake([0, 1], 600), mooncake([0, 2], 1024, 3000)])
    workload = read_workload(path)
    assert workload.arrival_seconds.tolist() == [0, 3]
    assert workload.segment_tokens.tolist() == [512, 88, 512, 512]
    assert workload.grain == 512
    assert workload.notes == ()


def test_gzip_is_recognised_by_content(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(json.dumps(mooncake([0], 5)).encode()))
    assert len(read_workload(path)) == 1


def test_bailian_seconds_sixteen_token_ids_and_tenant_from_type(tmp_path):
    rows = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 33, "output_length": 4,
         "type": "text", "turn": 1, "hash_ids": [10, 11, 12]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 4.0, "input_length": 40, "output_length": 4,
         "type": "file", "turn": 2, "hash_ids": [10, 11, 13]},
    ]  # fmt: skip
    workload = read_workload(write(tmp_path, rows))
    assert workload.grain == 16
    assert workload.arrival_seconds.tolist() == [0, 2.5]
    assert workload.tenants == ("text", "file")
    assert simulate(workload).hit_tokens == 32


def test_unsorted_string_nanoseconds_and_sparse_ids(tmp_path):
    # LMBench style: timestamps are strings of nanoseconds, in no order, and ids need not cover the prompt.
    rows = [
        mooncake([7, 8], 100, "1750000003000000000"),
        mooncake([7], 100, "1750000001000000000"),
    ]
    workload = read_workload(write(tmp_path, rows), trace_block_size=32)
    assert workload.arrival_seconds.tolist() == [0, 2]
    assert any("sorted" in note for note in workload.notes)
    assert any("strings" in note for note in workload.notes)
    assert simulate(workload, block_size=32).hit_tokens == 32


def test_local_ids_are_chained_and_scoped_to_their_session(tmp_path):
    # By content: B after A and B after C are different prefixes, the same content.
    rows = [mooncake(["A", "B"], 1024), mooncake(["C", "B"], 1024), mooncake(["A", "B"], 1024)]
    workload = read_workload(write(tmp_path, rows))
    assert any("content" in note for note in workload.notes)
    assert simulate(workload, engine_rules=False).hit_blocks == 2
    scoped = [mooncake([1, 2], 1024, session_id=name, hash_id_scope="local") for name in ("x", "y", "x")]
    assert simulate(read_workload(write(tmp_path, scoped)), engine_rules=False).hit_blocks == 2


def test_azure_csv_shares_nothing(tmp_path):
    path = write(
        tmp_path,
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44",
         "2023-11-16 18:15:50.9951690,396,109"],
        "azure.csv",
    )  # fmt: skip
    workload = read_workload(path)
    assert workload.arrival_seconds[1] == pytest.approx(4.314579)
    assert workload.output_tokens.tolist() == [44, 109]
    assert simulate(workload).hit_tokens == 0


def test_sharegpt_turns_share_their_history(tmp_path):
    turns = [{"from": "human", "value": "a" * 400}, {"from": "gpt", "value": "b" * 200}] * 3
    path = write(tmp_path, [json.dumps([{"id": "1", "conversations": turns}])], "sharegpt.json")
    workload = read_workload(path)
    assert len(workload) == 3
    # Each prompt holds all of the one before: two of three find it, but for the unfinished block.
    before = workload.prompt_tokens[:2] // 16 * 16
    assert simulate(workload).hit_tokens == int(before.sum())
    assert "estimated" in workload.notes[0]


def test_request_logs_with_token_ids_or_messages(tmp_path):
    ids = [{"prompt_token_ids": [1, 2, 3, 4, 9], "max_tokens": 3}] * 2
    workload = read_workload(write(tmp_path, ids))
    assert workload.prompt_tokens.tolist() == [5, 5]
    assert simulate(workload, block_size=2).hit_tokens == 4
    chat = [{"messages": [{"role": "user", "content": "hello " * 50}], "user": name} for name in "ab"]
    assert read_workload(write(tmp_path, chat)).tenants == ("a", "b")


def test_reblocking_to_smaller_and_larger_blocks():
    rows = [
        {"arrival": 0, "prompt": 20, "output": 1, "segments": [(k, 8), (k + 1, 8), (k + 2, 4)]}
        for k in (0, 0, 100)
    ]
    workload = build("grain of eight", rows, grain=8)
    for size, listed, exact in ((8, 3, True), (4, 5, False), (16, 2, True), (6, 4, False), (24, 1, True)):
        view = workload.blocks(size)
        assert (view.offsets[1], view.exact) == (listed, exact)
        first, second, third = (
            set(view.ids[a:b].tolist()) for a, b in zip(view.offsets, view.offsets[1:], strict=False)
        )
        assert first == second
        assert len(first) == listed
        assert not first & third


def test_head_keeps_the_first_requests():
    rows = [{"arrival": i, "prompt": 4, "output": 1, "segments": [(i, 4)], "tenant": i} for i in range(5)]
    head = build("five", rows, grain=4).head(2)
    assert (len(head), len(head.segment_ids), len(head.arrival_seconds)) == (2, 2, 2)
    assert simulate(head).requests == 2


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["not json at all {"], "columns"),
        ([mooncake([0], 5), "{broken"], "line 2: not JSON"),
        ([mooncake([0], 5), {"timestamp": 0, "input_length": 3}], "line 2: KeyError 'hash_ids'"),
        ([mooncake([0], 0, 0, prompt=1)], None),
        ([{"something": 1}], "fit no known trace format"),
        ([mooncake([0], -4)], "-4 prompt"),
        ([mooncake([0], 10**12)], "a request of 1000000000002 tokens"),
        (
            ['{"timestamp": NaN, "input_length": 5, "output_length": 1, "hash_ids": [1]}'],
            "not a finite number",
        ),
        ([mooncake([[1], 2], 1024)], "an id that is a list"),
        ([{"arrival_ns": 0, "output_tokens": 1, "prefix_segments": [[0, -3], [1, 9]]}], "piece of no tokens"),
        ([{"messages": ["hello"]}], "line 1: AttributeError"),
        (["[]"], "not a list of JSON objects"),
        (["[1, 2]"], "not a list of JSON objects"),
        (["   "], "empty file"),
    ],
)
def test_refusals_name_the_place(tmp_path, lines, said):
    path = write(tmp_path, lines)
    if said is None:
        assert int(read_workload(path).prompt_tokens[0]) == 512
        return
    with pytest.raises(KVCatchError, match=said):
        read_workload(path)


def test_missing_file_and_damaged_gzip(tmp_path):
    with pytest.raises(KVCatchError, match="no such file"):
        read_workload(tmp_path / "absent")
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(b"x" * 10_000)[:40])
    with pytest.raises(KVCatchError, match="cannot be read"):
        read_workload(torn)


def test_ids_that_do_not_cover_the_prompt_are_refused():
    with pytest.raises(KVCatchError, match="9 prompt tokens but its ids cover 4"):
        build("short", [{"arrival": 0, "prompt": 9, "output": 1, "segments": [(0, 4)]}], grain=4)
    with pytest.raises(KVCatchError, match="no requests"):
        build("empty", [], grain=4)

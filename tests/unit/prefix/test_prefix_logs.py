"""Request logs of texts and token ids: what breaks a prefix, what moving it wins, and small cases by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.analysis.prefix_text import Index, differences, render, widen
from kvcatch.cli.main import main

RULES = " ".join(
    f"Rule {n}: be {w} and stay {w}." for n, w in enumerate(["kind", "brief", "exact", "calm"] * 12)
)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def explain(capsys, *argv: str) -> dict:
    code = main(["prefix", "--json", *argv])
    assert code in (0, 1)
    return json.loads(capsys.readouterr().out)["targets"][0]


def causes(report: dict) -> dict[str, int]:
    assert sum(row["tokens"] for row in report["causes"]) == report["missed_tokens"]
    return {row["cause"]: row["tokens"] for row in report["causes"]}


def ids(path, rows, capsys, *more):
    written = write(
        path / "log.jsonl", [{"prompt_token_ids": row} if isinstance(row, list) else row for row in rows]
    )
    return explain(capsys, written, "--block-size", "4", *more)


def test_a_repeated_prompt_loses_its_last_block(tmp_path, capsys):
    # Eight tokens in blocks of four, twice: the last token is always computed, so one block hits and four
    # tokens are lost to the border.
    report = ids(tmp_path, [list(range(8)), list(range(8))], capsys)
    assert report["hit_tokens"] == 4
    assert causes(report) == {"first_seen": 8, "misaligned": 4}


def test_a_parting_within_a_block_is_misaligned_up_to_it(tmp_path, capsys):
    # The second prompt shares six tokens: one block of four hits, two tokens lie below the border.
    report = ids(tmp_path, [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 90, 91, 92]], capsys)
    assert report["hit_tokens"] == 4
    assert causes(report) == {"first_seen": 8 + 3, "misaligned": 2}


def test_another_engine_and_another_salt(tmp_path, capsys):
    prompt = list(range(12))
    rows = [
        {"prompt_token_ids": prompt, "engine": "a", "cache_salt": "x"},
        {"prompt_token_ids": prompt, "engine": "b", "cache_salt": "x"},
        {"prompt_token_ids": prompt, "engine": "a", "cache_salt": "y"},
    ]
    # 12 tokens are three blocks of which two are reusable: each of the later requests could have had 8.
    assert causes(ids(tmp_path, rows, capsys)) == {
        "first_seen": 12, "other_engine": 8, "salt": 8, "misaligned": 8,
    }  # fmt: skip


def test_evicted_with_the_room_that_keeps_it(tmp_path, capsys):
    # Prompts of two blocks a, b, a with output 1 in three usable blocks: b takes a's tail.
    a, b = list(range(9)), list(range(50, 59))
    report = ids(tmp_path, [a, b, a], capsys, "--num-blocks", "4", "--window", "0")
    # After b three blocks remain: b's two and nothing of a's but what b did not need. b needs three slots.
    assert report["hit_tokens"] == 0
    assert causes(report) == {"first_seen": 18, "evicted": 8, "misaligned": 1}
    # a's two blocks, b's two and one slot for the ninth token of the third request.
    (gain,) = report["gains"][-1:]
    assert (gain["num_blocks"], gain["won_tokens"]) == (6, 8)


def test_order_is_what_grouping_would_keep(tmp_path, capsys):
    a, b = list(range(9)), list(range(50, 59))
    rows = [{"prompt_token_ids": p, "arrival_s": float(n)} for n, p in enumerate([a, b, a, b])]
    written = write(tmp_path / "log.jsonl", rows)
    report = explain(capsys, written, "--block-size", "4", "--num-blocks", "4")
    # Grouped as a a b b each second request hits two blocks.
    assert causes(report)["order"] == 16
    apart = explain(capsys, written, "--block-size", "4", "--num-blocks", "4", "--window", "1s")
    assert causes(apart)["evicted"] == 16


def test_multi_turn_follows_n_over_n_plus_one(tmp_path, capsys):
    # Each turn adds 64 tokens to the prompt; turn n hits its n - 1 earlier parts: (n - 1) / n of its blocks.
    rows = [list(range(64 * turn)) for turn in range(1, 9)]
    written = write(tmp_path / "log.jsonl", [{"prompt_token_ids": row} for row in rows])
    report = explain(capsys, written, "--block-size", "16")
    assert report["hit_tokens"] == sum(64 * (turn - 1) for turn in range(1, 9))


def chats(count: int, piece) -> list[dict]:
    return [
        {
            "request_id": f"r{number}",
            "arrival_s": 7.0 * number,
            "messages": [
                {"role": "system", "content": piece(number) + RULES},
                {"role": "user", "content": f"Question {number} about {'xyzabc'[number % 6] * 30}?"},
            ],
        }
        for number in range(count)
    ]


PIECES = {
    "a date or time": lambda n: f"Current time: 2026-11-29 18:{n:02d}:07. ",
    "a UUID": lambda n: (
        f"Session {random.Random(n).getrandbits(128):032x}. "[:16] + f"-{n:04x}-4a00-8000-{n:012x}. "
    ),
    "a counter": lambda n: f"This is call {n * 37}. ",
    "a name or word": lambda n: f"You talk to {['Ann', 'Bob', 'Cy'][n % 3]}. ",
    "an address or user name": lambda n: f"User {['ann', 'bob', 'cy'][n % 3]}@example.org asks. ",
}


@pytest.mark.parametrize("what", PIECES)
def test_the_changing_piece_is_named_and_moved(tmp_path, capsys, what):
    report = explain(capsys, write(tmp_path / "log.jsonl", chats(12, PIECES[what])))
    place = report["divergences"][0]
    if what != "a UUID":
        assert place["what"] == what
    assert place["before"] != place["after"]
    (best, *_) = report["rewrites"]
    # Requests with one and the same piece share the rules already; all others but the first win them.
    different = len({PIECES[what](number) for number in range(12)})
    shared = len(RULES) // 4 // 16 * 16
    assert 0.9 * (different - 1) * shared <= best["won_tokens"] <= (different - 1) * (shared + 32)
    assert best["hit_tokens_after"] - best["hit_tokens_before"] == best["won_tokens"]


def test_fail_on_is_for_ci(tmp_path, capsys):
    log = write(tmp_path / "log.jsonl", chats(12, PIECES["a date or time"]))
    assert main(["prefix", log, "--fail-on", "diverged=5%"]) == 1
    assert "diverged loses" in capsys.readouterr().err
    good = write(tmp_path / "good.jsonl", chats(12, lambda n: ""))
    assert main(["prefix", good, "--fail-on", "diverged=5%,avoidable=10%"]) == 0
    assert main(["prefix", good, "--fail-on", "luck=5%"]) == 2
    assert "no such cause" in capsys.readouterr().err


def test_two_bodies(tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(chats(1, PIECES["a date or time"])[0]))
    second.write_text(json.dumps(chats(2, PIECES["a date or time"])[1]))
    report = explain(capsys, str(first), str(second))
    (place,) = report["divergences"]
    assert (place["before"], place["after"]) == ("2026-11-29 18:00:07", "2026-11-29 18:01:07")


def test_reordered_tools_and_white_space_are_named():
    tools = [{"name": "search", "about": "finds things"}, {"name": "mail", "about": "sends a mail"}]
    one = render({"tools": tools, "messages": []})
    other = render({"tools": tools[::-1], "messages": []})
    shared = len('[{"name": "')
    assert differences(other, one, shared)[0].what == "another order of the same parts"
    text, earlier = (
        "Be kind.  Always stay polite and short, please.",
        "Be kind. Always stay polite and short, please.",
    )
    (piece,) = differences(text, earlier, 9)
    assert piece.what == "white space"


def test_a_broken_log_is_refused_with_its_line(tmp_path, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt_token_ids": [1, 2]}\nnonsense\n')
    assert main(["prefix", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab \n", max_size=200), min_size=1, max_size=6))
def test_pieces_lie_within_the_text_and_what_follows_is_equal(texts):
    index = Index()
    for number, text in enumerate(texts):
        found = index.compare(text)
        assert 0 <= found.shared <= len(text)
        if found.nearest is not None:
            earlier = texts[found.nearest]
            assert found.nearest < number
            assert text[: found.shared] == earlier[: found.shared]
        for piece in found.pieces:
            assert 0 <= piece.start <= piece.stop <= len(text)
            assert piece.stop + max(0, piece.same) <= len(text)


def test_widening_takes_the_whole_date():
    text = "It is 2026-11-29 18:00:01 now."
    start, stop, what = widen(text, text.index("01 now"), text.index(" now"), 0)
    assert (text[start:stop], what) == ("2026-11-29 18:00:01", "a date or time")

"""Token ids made from prefixes alone: equal where the workload's were, and nowhere else."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcatch.replay.prompts import PromptBook
from kvcatch.workload import Workload, build

ALPHABET = np.array([3, 7, 11, 101, 1007, 30000, 30001, 99999])


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that two prompts share from their start."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def workload(prompts: list[list[int]], grain: int = 16) -> Workload:
    rows = [
        {"arrival": 0.0, "prompt": grain * len(ids), "output": 1, "segments": [(one, grain) for one in ids]}
        for ids in prompts
    ]
    return build("made up", rows, grain=grain)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=2, max_size=6))
def test_prompts_share_whole_blocks_exactly_where_the_workload_does(prompts: list[list[int]]) -> None:
    book = PromptBook(workload(prompts), ALPHABET, seed=1)
    tokens = [book.ids(number) for number in range(len(prompts))]
    for i, one in enumerate(prompts):
        assert len(tokens[i]) == 16 * len(one)
        for j, other in enumerate(prompts):
            same = next(
                (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)),
            )
            assert shared(tokens[i], tokens[j]) // 16 == same


def test_another_seed_shares_nothing_and_the_same_seed_everything() -> None:
    made = workload([[1, 2, 3, 4]])
    one = PromptBook(made, ALPHABET, 1).ids(0)
    assert (one == PromptBook(made, ALPHABET, 1).ids(0)).all()
    assert shared(one, PromptBook(made, ALPHABET, 2).ids(0)) < 16


def test_the_json_is_the_ids_and_all_are_of_the_alphabet() -> None:
    book = PromptBook(workload([[1, 2], [5]]), ALPHABET, 4)
    for number in range(2):
        ids = json.loads(book.json(number))
        assert ids == book.ids(number).tolist()
        assert set(ids) <= set(ALPHABET.tolist())


def conversation() -> Workload:
    """A request of 20 + 30 tokens, and one whose prompt is its first 48 tokens and 6 more."""
    rows = [
        {"arrival": 0.0, "prompt": 20, "output": 30, "segments": [("a", 16), ("own", 4)], "made": ["b", "c"]},
        {
            "arrival": 1.0, "prompt": 54, "output": 1,
            "segments": [("a", 16), ("b", 16), ("c", 16), ("more", 6)],
        },
    ]  # fmt: skip
    return build("talk", rows, grain=16)


def test_a_prompt_that_quotes_an_answer_carries_the_tokens_that_came_back() -> None:
    book = PromptBook(conversation(), ALPHABET, 9)
    assert book.wants_answers
    assert book.quotes(1) == (0,)
    assert book.quotes(0) == ()
    answer = [3, 424242, *[7] * 28]  # a token that the alphabet lacks, and wider than all of it
    book.learn(0, answer)
    said = book.ids(0).tolist() + answer
    assert book.ids(1).tolist()[:48] == said[:48]
    assert json.loads(book.json(1)) == book.ids(1).tolist()
    assert book.unanswered == 0


def test_an_answer_that_never_came_is_counted() -> None:
    book = PromptBook(conversation(), ALPHABET, 9)
    book.json(1)
    assert book.unanswered == 1


def test_a_workload_of_prompts_alone_waits_for_nothing() -> None:
    book = PromptBook(workload([[1], [1, 2]]), ALPHABET, 0)
    assert not book.wants_answers
    assert book.quotes(1) == ()


def test_what_is_generated_gets_the_ids_of_the_prompts_that_quote_it() -> None:
    made = conversation()
    assert made.made_ids is not None
    assert made.made_ids.tolist() == made.segment_ids[made.offsets[1] + 1 : made.offsets[1] + 3].tolist()
    assert made.head(1).made_offsets is not None
    assert made.head(1).made_offsets.tolist() == [0, 2]

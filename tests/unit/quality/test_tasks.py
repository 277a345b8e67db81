"""Questions and documents."""

from __future__ import annotations

import re

import pytest

from kvcatch.errors import KVCatchError
from kvcatch.quality import corpus, tasks


def test_needles_lie_at_their_depths_and_can_be_read():
    texts = [one.text for one in corpus.shipped()]
    made = tasks.needles(texts, 3, seed=1)
    assert len(made) == 15
    for question in made:
        found = re.findall(rf"is {question.answer}\.", question.prompt)
        assert len(found) == 1
        place = question.prompt.index(question.answer) / question.prompt.index("\n\nQuestion")
        assert place == pytest.approx(question.depth, abs=0.15)


def test_questions_of_a_group_share_their_beginning():
    made = tasks.needles(["a. " * 600], 1, seed=1)
    heads = {question.prompt.split("Question:")[0] for question in made}
    assert len(heads) == 1


def test_answers_of_a_list_stand_in_it_and_the_seed_decides():
    for question in tasks.recall(2, seed=4):
        word = question.prompt.rsplit("\n", 1)[1]
        assert f"{word} {question.answer}\n" in question.prompt
    assert tasks.recall(2, seed=4) == tasks.recall(2, seed=4)
    assert tasks.recall(2, seed=4) != tasks.recall(2, seed=5)


def test_sums_are_right_and_chance_is_the_commonest_answer():
    for question in tasks.arithmetic(30, seed=2):
        for a, b, total in re.findall(r"(\d+) \+ (\d+) = (\d+)", question.prompt):
            assert int(a) + int(b) == int(total)
        a, b = re.findall(r"(\d+) \+ (\d+) =$", question.prompt)[0]
        assert question.answer == str(int(a) + int(b))
        # 28 of 784 pairs of numbers from 2 to 29 sum to 31
        assert question.chance == pytest.approx(28 / 784)


@pytest.mark.parametrize(
    ("text", "right"),
    [(" 4821.", True), ("4821", True), (" 48210", False), (" the 4821", False), ("", False)],
)
def test_an_answer_is_right_when_it_comes_first_and_whole(text, right):
    question = tasks.Question(kind="needle", prompt="", answer="4821", chance=0.2, group=0)
    assert question.right(text) is right


def test_the_shipped_corpus_is_bilingual_and_has_its_source():
    documents = corpus.shipped()
    assert [one.name[:2] for one in documents] == ["en", "zh", "en", "zh", "en", "zh", "en", "en"]
    assert all(len(one.text) > 600 for one in documents)
    source = corpus.files("kvcatch.quality").joinpath("corpus", "SOURCE.md").read_text(encoding="utf-8")
    assert "written for KV_Catch" in source


def test_own_documents(tmp_path):
    plain = tmp_path / "own.txt"
    plain.write_text("one\n---\ntwo\nlines\n---\n\n", encoding="utf-8")
    assert [one.text for one in corpus.from_file(str(plain))] == ["one", "two\nlines"]
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    assert [one.text for one in corpus.from_file(str(lines))] == ["one", "two"]
    lines.write_text('{"text": "one"}\n{"prompt": "two"}\n', encoding="utf-8")
    with pytest.raises(KVCatchError, match="line 2"):
        corpus.from_file(str(lines))
    plain.write_bytes(b"abc\xff")
    with pytest.raises(KVCatchError, match="byte 3"):
        corpus.from_file(str(plain))

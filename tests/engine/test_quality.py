"""Quality on real engines: the reference against itself, fp8 formats, broken scales, and the layer that is broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.support import env
from engine.support.hardware import FP8_CACHE, needs_fp8_cache
from engine.support.server import Server, engine_lock, server
from kvcatch.cli.main import main
from kvcatch.quality.corpus import shipped
from kvcatch.quality.emulate import Emulator
from kvcatch.quality.endpoint import Endpoint
from kvcatch.quality.locate import locate
from kvcatch.quality.measure import Arm, Floor, Size, Work, divergences, measure, prepare, repeat
from kvcatch.quality.patterns import Signs
from kvcatch.quality.tasks import all_questions
from kvcatch.quality.verdict import Limits, Quality, judge

SIZE = Size(documents=2, tokens=512, generations=2, prompt_tokens=64, generated_tokens=48, tasks=1)
ARMS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "auto": (None, ()),
    "e4m3": (None, ("--kv-cache-dtype", "fp8_e4m3")),
    "e5m2": (None, ("--kv-cache-dtype", "fp8_e5m2")),
    "one layer": ("64:12", ("--kv-cache-dtype", "fp8_e4m3")),
    "all layers": ("64", ("--kv-cache-dtype", "fp8_e4m3")),
    "decode": ("64::decode", ("--kv-cache-dtype", "fp8_e4m3")),
}


def quiet(_text: str) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def arms(tmp_path_factory, smollm2_model: Path) -> Callable[[str], tuple[Work, Arm, list[Floor]]]:
    """One arm on an engine of its own, measured once; the baseline also three times against itself.

    The arms that most tests need are measured under one hold of the machine's engine lock.
    """
    done: dict[str, tuple[Work, Arm, list[Floor]]] = {}

    def run(name: str) -> None:
        fault, flags = ARMS[name]
        folder = tmp_path_factory.mktemp("quality")
        more = ("--max-model-len", "1024", "--dtype", "float32", *flags)
        with server(folder, smollm2_model, *more, lock=False, KVCATCH_TEST_KV_SCALE=fault) as running:
            done[name] = _measured(running, 3 if name == "auto" else 0)

    def of(name: str) -> tuple[Work, Arm, list[Floor]]:
        if name not in done:
            with engine_lock():
                usual = ("auto", "e4m3", "e5m2", "one layer") if FP8_CACHE else ("auto",)
                for one in usual if not done else (name,):
                    run(one)
        return done[name]

    return of


def _measured(running: Server, repeats: int) -> tuple[Work, Arm, list[Floor]]:
    endpoint = Endpoint(running.url)
    documents = shipped()
    questions = all_questions([one.text for one in documents], SIZE.tasks, SIZE.seed)
    work = prepare(endpoint, documents, questions, SIZE)
    arm = measure(endpoint, work, quiet)
    floors = [repeat(endpoint, work, arm, quiet) for _ in range(repeats)]
    endpoint.close()
    return work, arm, floors


def verdict(arms: Callable[[str], tuple[Work, Arm, list[Floor]]], name: str, documents: int = 2) -> Quality:
    work, baseline, floors = arms("auto")
    _, candidate, _ = arms(name)
    cut = [Arm(**{**{f: getattr(a, f) for f in a.__struct_fields__}, "scored": a.scored[:documents]}) for a in (baseline, candidate)]  # fmt: skip
    return judge(
        work_of(work, documents), cut[0], cut[1], floors[0], Limits(), Signs(quantised=name != "auto")
    )


def beginning(
    arms: Callable[[str], tuple[Work, Arm, list[Floor]]],
) -> tuple[list[list[int]], Callable[[str], list]]:
    """The first 160 tokens of the first document, and an arm's answer to them."""
    return [list(arms("auto")[0].ids[0][:160])], lambda name: [list(arms(name)[1].scored[0][:159])]


def work_of(work: Work, documents: int) -> Work:
    return Work(work.names[:documents], work.ids[:documents], work.questions, work.size)


def test_the_reference_against_itself_is_exactly_zero(arms):
    _, baseline, floors = arms("auto")
    assert baseline.k == 20
    for floor in floors:
        assert not any(any(row) for row in (*floor.kl, *floor.flips))
        assert floor.changed_generations == 0
    # Decoding and prefill take different kernels: not bit-equal, but nothing that a model could notice.
    assert max(max(gap) for gap in baseline.decode_gap) < 1e-6
    found = verdict(arms, "auto")
    assert found.check("kl_mean").value == found.check("kl_max").value == 0.0
    assert found.check("top1_flips").value == 0.0
    assert found.first_divergences == (None, None)


@needs_fp8_cache
def test_e4m3_is_seen_in_one_document_of_512_tokens(arms):
    found = verdict(arms, "e4m3", documents=1)
    check = found.check("kl_mean")
    assert found.positions == 511
    assert check.low is not None
    assert check.low > 0.005
    assert found.check("top1_flips").value > 0.02
    # What the usual gate would have said: the perplexity is all but the same.
    assert found.check("perplexity_ratio").value == pytest.approx(1.0, abs=0.05)


@needs_fp8_cache
def test_e5m2_is_worse_than_e4m3_and_fails(arms):
    four, five = verdict(arms, "e4m3"), verdict(arms, "e5m2")
    assert five.check("kl_mean").low > four.check("kl_mean").high
    assert five.check("top1_flips").value > four.check("top1_flips").value
    assert five.verdict == "fail"
    assert four.check("kl_mean").verdict == "pass"


@pytest.fixture(scope="module")
def emulator(smollm2_model: Path) -> Emulator:
    return Emulator(str(smollm2_model))


@pytest.mark.soak  # minutes on two cores
@needs_fp8_cache
def test_a_broken_layer_is_named_from_160_tokens(arms, emulator):
    ids, head = beginning(arms)
    faulty = locate(emulator, ids, head("auto"), {"e5m2": head("e5m2"), "e4m3": head("one layer")}, 20, quiet)
    assert faulty.baseline_kl < 1e-6
    assert faulty.reproductions[0].accepted
    # This build rounds towards zero; GPUs round to the nearest.
    assert faulty.rounding == "zero"
    assert not faulty.accepted
    assert (faulty.broken, faulty.broken_layer) == ("layer 12", 12)


@pytest.mark.soak
@needs_fp8_cache
def test_the_emulator_reproduces_both_formats_and_blames_layers(arms, emulator):
    ids, head = beginning(arms)
    healthy = locate(
        emulator, ids, head("auto"), {"e5m2": head("e5m2"), "e4m3": head("e4m3")}, 20, quiet, formats=("int8", "int4"), worst=1
    )  # fmt: skip
    assert healthy.accepted
    for one in healthy.reproductions:
        assert one.emulated_kl == pytest.approx(one.engine_kl, rel=0.2)
    assert sorted(one.layer for one in healthy.layers) == list(range(30))
    eight, four = healthy.formats
    assert eight.kl < healthy.reproductions[1].engine_kl < four.kl
    assert len(healthy.layers[0].heads) == 3


@pytest.mark.soak
@needs_fp8_cache
def test_a_broken_scale_and_a_lost_decode_scale_fail(arms):
    whole = verdict(arms, "all layers")
    assert whole.verdict == "fail"
    assert whole.check("kl_mean").low > verdict(arms, "e4m3").check("kl_mean").high
    decode = verdict(arms, "decode")
    # Prefill is untouched: every teacher-forced number is that of a healthy e4m3.
    assert decode.check("kl_mean").value == verdict(arms, "e4m3").check("kl_mean").value
    assert decode.check("decode_gap").verdict == "fail"
    assert "decode-side" in [one.name for one in decode.patterns]
    assert decode.verdict == "fail"


@pytest.mark.soak
def test_twenty_self_comparisons_on_two_engines_are_exactly_zero(tmp_path, smollm2_model):
    firsts = []
    for start in range(2):
        more = ("--max-model-len", "1024", "--dtype", "float32")
        with server(tmp_path / str(start), smollm2_model, *more) as running:
            _work, arm, floors = _measured(running, 10)
        firsts.append(arm)
        for floor in floors:
            assert not any(any(row) for row in (*floor.kl, *floor.flips))
            assert floor.changed_generations == 0
    for a, b in zip(firsts[0].scored, firsts[1].scored, strict=True):
        assert not any(any(row) for row in divergences(a, b))
    assert firsts[0].right == firsts[1].right


@pytest.mark.soak
@needs_fp8_cache
def test_the_whole_verb_starts_the_engines_and_locates(tmp_path, smollm2_model, capsys, monkeypatch):
    for name, value in env.environment().items():
        monkeypatch.setenv(name, value)
    command = [env.PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2_model)]
    command += ["--enforce-eager", "--max-model-len", "1024", "--dtype", "float32"]
    page = tmp_path / "quality.html"
    words = ["quality", "--candidate", "--kv-cache-dtype fp8_e5m2", "--documents", "2", "--tasks", "1"]
    with engine_lock():
        code = main([*words, "--locate", "-o", str(page), "--json", "--", *command])
    assert code == 1
    document = json.loads(capsys.readouterr().out)
    assert document["quality"]["verdict"] == "fail"
    # float32 against one byte
    assert document["savings"]["saved_ratio"] == 0.75
    assert document["location"]["accepted"]
    assert [one["code"] for one in document["findings"]] == ["KVC601"]
    assert "Which layers lose it" in page.read_text()
    assert not [one for one in os.listdir(tmp_path) if one.startswith("engine-")]

"""A mirror between two real engines: one configuration twice, and against a cache that keeps less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.support.hardware import FP8_CACHE
from engine.support.mirrors import drive, two_engines
from kvcatch.cli.main import main
from kvcatch.quality.corpus import shipped
from kvcatch.quality.shadow import read_pairs

pytestmark = pytest.mark.soak  # two engines on two cores: minutes

COMMON = (
    "--max-model-len",
    "1024",
    "--dtype",
    "float32",
    "--num-gpu-blocks-override",
    "256",
    "--max-num-seqs",
    "8",
)
#: a candidate that is worse for certain: e5m2 where this machine can compute with it, else a window of 16 tokens
WORSE = ("--kv-cache-dtype", "fp8_e5m2") if FP8_CACHE else (
    "--hf-overrides", json.dumps({"layer_types": ["sliding_attention"] * 30, "sliding_window": 16})
)  # fmt: skip


def asks(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Pieces of the shipped corpus in English, some 60 tokens each."""
    texts = [one.text for one in shipped() if one.text.isascii()]
    pieces = [text[at : at + 240] for text in texts for at in range(0, len(text) - 240, 240)]
    chosen = [pieces[(first + number) % len(pieces)] for number in range(count)]
    return [{"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0} for text in chosen]


def test_one_configuration_twice_never_fails_in_twenty(tmp_path: Path, smollm2_model: Path) -> None:
    with two_engines(tmp_path, smollm2_model, COMMON) as site:
        for run in range(20):
            folder = tmp_path / str(run)
            done = drive(folder, tmp_path / "rings", site.upstream.url, site.candidate.url, asks(6, run * 6))
            assert "mirror stopped" not in done.log
            pairs = read_pairs(str(done.results / "pairs.jsonl"))
            assert len(pairs) >= 3  # a look at the pool may find it busy now and then
            assert {(one.kl_nats, one.flips_ratio, one.first_divergence) for one in pairs} == {
                (0.0, 0.0, None)
            }


def test_a_worse_cache_fails_within_200_and_stops_the_mirror(
    tmp_path: Path, smollm2_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = asks(200)
    with two_engines(tmp_path, smollm2_model, COMMON, WORSE) as site:
        done = drive(tmp_path, tmp_path / "rings", site.upstream.url, site.candidate.url, bodies)
        alone = site.upstream.post("/v1/completions", bodies[0])["choices"]
    assert done.choices[0] == alone  # clients get the upstream's answers
    assert "the candidate answers differently" in done.log
    assert main(["quality", "--mirror", str(done.results / "pairs.jsonl"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["mirror"]
    assert (found["verdict"], found["requests"]) == ("fail", found["decided_at"])

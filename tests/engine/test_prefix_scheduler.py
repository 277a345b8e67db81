"""Prefix losses on the real scheduler: the same requests grouped, interleaved and at once; turns; a changing date."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from simulator_oracle import Settings, real_answer, real_request, real_scheduler

from kvcatch.analysis.prefix import PrefixReport, explain
from kvcatch.analysis.prefix_capture import from_capture
from kvcatch.capture.options import Options
from kvcatch.capture.recorder import Recorder
from kvcatch.capture.ring import RingWriter
from kvcatch.cli.main import main

# The engine's libraries warn about each other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 16


class Engine:
    """A real scheduler with the recorder on it; every request generates two tokens."""

    def __init__(self, folder: Path, num_blocks: int, *, budget: int = 8192, long_prefill: int = 0) -> None:
        self.folder = folder
        chosen = Settings(
            num_blocks=num_blocks, block_size=BLOCK, max_num_seqs=64, max_num_batched_tokens=budget,
            watermark=0.0, requests=0, max_model_len=2048,
        )  # fmt: skip
        self.scheduler = real_scheduler(chosen, folder)
        if long_prefill:
            self.scheduler.scheduler_config.long_prefill_token_threshold = long_prefill
        self.path = str(folder / f"run{len(list(folder.glob('*.kvring')))}.kvring")
        info = {
            "engine": "vllm", "engine_version": "0.32.0", "num_blocks": num_blocks, "block_size": BLOCK,
            "groups": [{"kind": "full", "layers": 1, "block_size": BLOCK}], "prefix_caching": True,
            "start_unix_ns": 1_764_439_200_000_000_000, "start_monotonic_ns": 0,
        }  # fmt: skip
        self.ring = RingWriter(self.path, 64 << 20, info)
        self.recorder = Recorder(
            self.scheduler, self.ring, [("full", BLOCK)], Options({"KVCATCH_DIR": str(folder)})
        )
        self.recorder.attach()
        self.hits = 0
        self.count = 0
        self.salt = 0

    def add(self, tokens: list[int]) -> None:
        self.scheduler.add_request(real_request(str(self.count), tokens, 2, BLOCK))
        self.count += 1

    def run(self) -> None:
        """Until nothing is left to do; counts hits as the scheduler gives them out."""
        while self.scheduler.requests:
            output = self.scheduler.schedule()
            self.hits += sum(new.num_computed_tokens for new in output.scheduled_new_reqs)
            self.scheduler.update_from_output(output, real_answer(self.scheduler, output, self.salt))
            self.salt += 1

    def report(self) -> PrefixReport:
        self.recorder.detach()
        self.ring.close()
        report, _ = explain(from_capture(self.path, window_seconds=3600), self.path, "capture")
        assert sum(cause.tokens for cause in report.causes) == report.missed_tokens
        assert report.hit_tokens == self.hits
        return report


def shared_by_groups(groups: int = 25, each: int = 20) -> list[list[int]]:
    """500 requests: 25 groups that share 160 tokens, with 20 tokens of their own each."""
    rng = random.Random(5)
    heads = [[rng.randrange(1000) for _ in range(160)] for _ in range(groups)]
    return [heads[g] + [rng.randrange(1000) for _ in range(20)] for g in range(groups) for _ in range(each)]


def serve(
    folder: Path, prompts: list[list[int]], num_blocks: int, *, at_once: bool = False, **how: Any
) -> PrefixReport:
    engine = Engine(folder, num_blocks, **how)
    for prompt in prompts:
        engine.add(prompt)
        if not at_once:
            engine.run()
    engine.run()
    return engine.report()


def test_grouped_against_interleaved_is_order_and_nothing_else(tmp_path):
    prompts = shared_by_groups()
    interleaved = [prompts[20 * (n % 25) + n // 25] for n in range(500)]
    # 25 heads of ten blocks do not fit into 100 blocks, one of them does.
    best = serve(tmp_path, prompts, 101)
    worst = serve(tmp_path, interleaved, 101)
    assert best.hit_tokens == 25 * 19 * 160
    assert worst.hit_tokens < best.hit_tokens
    assert worst.tokens("order") == best.hit_tokens - worst.hit_tokens
    assert worst.tokens("evicted") == worst.tokens("in_flight") == 0
    assert worst.tokens("first_seen") == best.tokens("first_seen")


def test_at_once_is_in_flight_and_nothing_else(tmp_path):
    prompts = shared_by_groups(groups=4, each=10)
    # Room for everything; prefill in pieces of 32 tokens, so that a head is computed over several steps.
    best = serve(tmp_path, prompts, 2001)
    together = serve(tmp_path, prompts, 2001, at_once=True, budget=2048, long_prefill=32)
    assert together.hit_tokens < best.hit_tokens == 4 * 9 * 160
    assert together.tokens("in_flight") == best.hit_tokens - together.hit_tokens
    assert together.tokens("evicted") == together.tokens("order") == 0


def test_evicted_comes_back_at_the_room_named(tmp_path):
    rng = random.Random(3)
    heads = [[rng.randrange(1000) for _ in range(rng.randrange(40, 300))] for _ in range(12)]
    prompts = [
        rng.choice(heads) + [rng.randrange(1000) for _ in range(rng.randrange(1, 60))] for _ in range(150)
    ]
    report = serve(tmp_path, prompts, 61)
    assert report.tokens("evicted") + report.tokens("order") > 0
    for gain in report.gains:
        again = serve(tmp_path, prompts, gain.num_blocks)
        assert again.hit_tokens - report.hit_tokens == gain.won_tokens


def test_turns_hit_n_over_n_plus_one_in_full_blocks(tmp_path):
    rng = random.Random(8)
    talks = [[rng.randrange(1000) for _ in range(64 * 8)] for _ in range(5)]
    engine = Engine(tmp_path, 1001)
    for turn in range(1, 9):
        before, asked = engine.hits, 0
        for talk in talks:
            engine.add(talk[: 64 * turn])
            asked += 64 * turn
            engine.run()
        # Turn n asks for n parts of 64 tokens, of which n - 1 are there.
        assert (engine.hits - before) / asked == pytest.approx((turn - 1) / turn)
    report = engine.report()
    assert report.missed_tokens == 5 * 64 * 8 == report.tokens("first_seen") + report.tokens("misaligned")


def test_a_date_in_the_system_prompt_is_found_and_moving_it_wins_what_was_predicted(tmp_path, capsys):
    # One character is one token, as with the tiny models: the log holds both the text and its ids.
    rules = " ".join(f"Rule {n}: be {w} and stay {w}." for n, w in enumerate(["kind", "brief", "exact"] * 8))
    texts = [
        f"Current time: 2026-11-29 18:{n:02d}:07. {rules} Question {n * 7919 % 1000}: {'xyz'[n % 3] * 30}?" for n in range(60)
    ]  # fmt: skip
    words = tmp_path / "words.jsonl"
    words.write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    tokenizer = tmp_path / "tokenizer.json"
    _characters(tokenizer)
    assert main(["prefix", str(words), "--tokenizer", str(tokenizer), "--num-blocks", "401", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["targets"][0]
    assert report["divergences"][0]["what"] == "a date or time"
    best = report["rewrites"][0]
    moved = [
        text.replace(f"2026-11-29 18:{n:02d}:07", "") + f"\n2026-11-29 18:{n:02d}:07"
        for n, text in enumerate(texts)
    ]
    before = serve(tmp_path, [[ord(c) for c in text] for text in texts], 401)
    after = serve(tmp_path, [[ord(c) for c in text] for text in moved], 401)
    assert before.hit_tokens == best["hit_tokens_before"]
    assert after.hit_tokens - before.hit_tokens == pytest.approx(best["won_tokens"], rel=0.02)
    # A recording has no text, but shows where all requests part and that much stands behind it.
    assert before.tokens("diverged") > 0.5 * best["won_tokens"]


def _characters(path: Path) -> None:
    """A tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    made = Tokenizer(WordLevel({chr(n): n for n in range(128)}, unk_token="\0"))
    made.pre_tokenizer = Split(Regex("[\\s\\S]"), "isolated")
    made.save(str(path))

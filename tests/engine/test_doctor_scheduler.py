"""The incident on the real scheduler without a model, and a healthy run of the same engine beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from simulator_oracle import Settings, real_request, real_scheduler

from kvcatch.analysis.doctor import Diagnosis
from kvcatch.capture.options import Options
from kvcatch.capture.recorder import Recorder
from kvcatch.capture.ring import RingWriter
from kvcatch.diagnosis import find

# The engine's libraries warn about each other; that is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK, USABLE = 32, 240
HOG = "cmpl-kvc~contracts~~the-long-one-0-0123abcd"


def answer(scheduler: Any, output: Any, rng: random.Random) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    done = [scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_tokens for i in ids]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={i: k for k, i in enumerate(ids)},
        sampled_token_ids=[[rng.randrange(1000)] if ready else [] for ready in done],
    )


def run(folder: Path, clients: int, requests: int, hog_after: int | None) -> Diagnosis:
    """A closed loop of clients that ask with 90 tokens for 170; the hog comes after so many requests."""
    rng = random.Random(2)
    chosen = Settings(
        num_blocks=USABLE + 1, block_size=BLOCK, max_num_seqs=64, max_num_batched_tokens=512,
        watermark=0.0, requests=0, max_model_len=2560,
    )  # fmt: skip
    scheduler = real_scheduler(chosen, folder)
    path = str(folder / "run.kvring")
    info = {
        "engine": "vllm", "engine_version": "0.32.0", "num_blocks": USABLE + 1, "block_size": BLOCK,
        "groups": [{"kind": "full", "layers": 1, "block_size": BLOCK}], "prefix_caching": True,
        "max_num_seqs": 64, "start_unix_ns": 1_764_439_200_000_000_000, "start_monotonic_ns": 0,
    }  # fmt: skip
    ring = RingWriter(path, 64 << 20, info)
    recorder = Recorder(scheduler, ring, [("full", BLOCK)], Options({"KVCATCH_DIR": str(folder)}))
    recorder.attach()
    sent = 0
    while sent < requests or scheduler.requests:
        while sent < requests and len(scheduler.requests) < clients:
            if sent == hog_after:
                scheduler.add_request(
                    real_request(HOG, [rng.randrange(1000) for _ in range(2240)], 64, BLOCK)
                )
            tokens = [rng.randrange(1000) for _ in range(90)]
            # Clients start one after the other, so that their lengths are spread.
            output = 170 if sent >= clients else rng.randrange(10, 170)
            name = f"cmpl-kvc~team{sent % 3}~~r{sent}-0-{sent:08x}"
            scheduler.add_request(real_request(name, tokens, output, BLOCK))
            sent += 1
        decided = scheduler.schedule()
        scheduler.update_from_output(decided, answer(scheduler, decided, rng))
    recorder.detach()
    ring.close()
    return find(path)


def test_the_hog_is_named_with_its_share_and_the_gateway_command(tmp_path):
    diagnosis = run(tmp_path, clients=30, requests=240, hog_after=120)
    (hog,) = [finding for finding in diagnosis.findings if finding.code == "KVC003"]
    assert (hog.request_id, hog.tenant) == ("kvc~contracts~~the-long-one", "contracts")
    # 2,240 prompt tokens fill 70 blocks, with all but the last of 64 generated it holds 72 of 240: 30 %.
    assert 70 <= hog.evidence[0].value <= 72
    assert "30%" in hog.title
    assert any("preemptions" in row.text or "waited for blocks" in row.text for row in hog.evidence)
    # All others ask with 90 tokens.
    assert hog.remedy == (
        "kvcatch gateway --max-input-tokens 256 --over-long reject --long-share 0.3 --long-concurrency 1"
    )


def test_without_it_the_same_engine_gives_no_warning(tmp_path):
    # 26 requests of at most nine blocks always fit into 240: the pool is up to 97 % full and nobody waits.
    diagnosis = run(tmp_path, clients=26, requests=200, hog_after=None)
    assert [finding for finding in diagnosis.findings if finding.severity != "info"] == []

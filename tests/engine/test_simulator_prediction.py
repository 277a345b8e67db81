"""From a recording of the real scheduler to what it would have done with other settings, against doing it."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.simulator_oracle import Settings, real_answer, real_request, real_scheduler
from kvcatch.capture.options import Options
from kvcatch.capture.plugin import start_recorder
from kvcatch.simulator.engine import EngineSettings, simulate_engine
from kvcatch.sources.captured import workload_of
from kvcatch.store.capture import ReplayCapture

# The engine's own imports warn about its dependencies.
pytestmark = pytest.mark.filterwarnings("ignore")

BASE = Settings(
    num_blocks=100,
    block_size=16,
    max_num_seqs=16,
    max_num_batched_tokens=512,
    watermark=0.0,
    requests=120,
    max_model_len=624,
)
OTHERS = {
    "as it was": BASE,
    "double the blocks": dataclasses.replace(BASE, num_blocks=199),
    "double the block size": dataclasses.replace(BASE, num_blocks=51, block_size=32),
    "watermark": dataclasses.replace(BASE, watermark=0.05),
    "fewer requests at once": dataclasses.replace(BASE, max_num_seqs=6),
}


def asked() -> list[tuple[list[int], int]]:
    """Prompts of which most share one of four heads, and how much each generates."""
    rng = random.Random(3)
    heads = [[rng.randrange(1000) for _ in range(length)] for length in (64, 100, 150, 220)]
    return [
        (
            (rng.choice(heads) if rng.random() < 0.8 else [])
            + [rng.randrange(1000) for _ in range(rng.randrange(10, 150))],
            rng.randrange(20, 150),
        )
        for _ in range(BASE.requests)
    ]


def serve(scheduler, block_size):
    """All requests at once; the engine's own count of cached tokens and of preemptions."""
    requests = [
        real_request(str(number), tokens, output, block_size)
        for number, (tokens, output) in enumerate(asked())
    ]
    for request in requests:
        scheduler.add_request(request)
    hits = {}
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        for new in output.scheduled_new_reqs:
            hits.setdefault(new.req_id, new.num_computed_tokens)
        scheduler.update_from_output(output, real_answer(scheduler, output, 0))
    scheduler.schedule()  # the step in which an engine learns what ended
    return sum(hits.values()), sum(request.num_preemptions for request in requests)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The workload, as a recording of the base settings tells it."""
    folder = tmp_path_factory.mktemp("recorded")
    scheduler = real_scheduler(BASE, folder)
    recorder = start_recorder(scheduler, Options({"KVCATCH": "1", "KVCATCH_DIR": str(folder)}))
    done = serve(scheduler, BASE.block_size)
    recorder.detach()
    recorder.ring.close()
    workload, measured = workload_of(ReplayCapture.open(recorder.ring.path))
    assert workload.notes == ()
    assert (int(measured.cached_tokens.sum()), measured.preemptions) == done
    # All were there before the first step.
    return dataclasses.replace(workload, arrival_seconds=workload.arrival_seconds * 0)


@pytest.mark.parametrize("other", OTHERS)
def test_a_recording_predicts_other_settings(recorded, other, tmp_path):
    chosen = OTHERS[other]
    hit_tokens, preemptions = serve(real_scheduler(chosen, tmp_path), chosen.block_size)
    predicted = simulate_engine(
        recorded,
        EngineSettings(
            num_blocks=chosen.num_blocks,
            block_size=chosen.block_size,
            max_num_seqs=chosen.max_num_seqs,
            max_num_batched_tokens=chosen.max_num_batched_tokens,
            max_model_len=chosen.max_model_len,
            watermark=chosen.watermark,
        ),
    )
    assert predicted.hit_tokens == hit_tokens
    assert predicted.preemptions == preemptions
    if other == "as it was":
        assert preemptions > 10
        assert hit_tokens > 2000

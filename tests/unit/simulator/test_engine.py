"""The fast engine decides as the plain one, and predicts a run on a real GPU."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from kvcatch.errors import KVCatchError
from kvcatch.simulator import batching as kernel
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.embedded import Scheduler, sample
from kvcatch.simulator.engine import EngineSettings, serve, simulate_engine, summary
from kvcatch.simulator.fit import fit_step_cost
from kvcatch.simulator.requests import Request, hash_of
from kvcatch.sources.traces import read_workload

from .small import workloads

DATA = Path(__file__).parents[2] / "data/llmservingsim_vllm"
#: steps of one second, so that arrivals in whole seconds mean the same to both engines
SECOND = StepCost(fixed=1.0, per_prefill_token=0.0, per_decode=0.0)


def plain_engine(workload, settings):
    """The same run step by step in plain Python; rows as the kernel's log, times, cached tokens."""
    scheduler = Scheduler(
        settings.num_blocks,
        settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_caching=settings.enable_prefix_caching,
        watermark=settings.watermark,
    )
    view = workload.blocks(settings.block_size)
    rows, finished, requests, high, recomputed = [], {}, {}, {}, {}
    now, upcoming = 0, 0
    while upcoming < len(workload) or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, int(workload.arrival_seconds[upcoming]))
        while upcoming < len(workload) and workload.arrival_seconds[upcoming] <= now:
            prompt = int(workload.prompt_tokens[upcoming])
            ids = view.ids[view.offsets[upcoming] :][: prompt // settings.block_size]
            hashes = [hash_of(int(i)) for i in ids]
            requests[upcoming] = Request(
                str(upcoming), prompt, max(1, int(workload.output_tokens[upcoming])), hashes
            )
            scheduler.add_request(requests[upcoming])
            upcoming += 1
        output = scheduler.schedule()
        pool = scheduler.kv_cache_manager.block_pool
        rows.append(
            (
                len(scheduler.running),
                len(scheduler.waiting),
                pool.get_num_free_blocks(),
                output.total_num_scheduled_tokens,
                len(output.preempted_req_ids),
                pool.num_removed,
            )
        )
        for name, tokens in output.num_scheduled_tokens.items():
            end = scheduler.requests[name].num_computed_tokens
            again = min(end, high.get(name, 0)) - (end - tokens)
            recomputed[name] = recomputed.get(name, 0) + max(0, again)
            high[name] = max(high.get(name, 0), end)
        now += 1
        for request in scheduler.update_from_output(output, sample(scheduler, output)):
            finished[int(request.request_id)] = now
    cached = [requests[i].num_cached_tokens for i in range(len(workload))]
    again = [recomputed[str(i)] for i in range(len(workload))]
    return rows, [finished[i] for i in range(len(workload))], cached, again


@given(
    workloads(),
    st.data(),
    st.integers(12, 30),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([5, 16, 200]),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.booleans(),
)
@examples(max_examples=30, deadline=None)
def test_step_by_step_as_the_plain_engine(workload, data, num_blocks, seqs, budget, watermark, caching):
    gaps = [data.draw(st.integers(0, 3)) for _ in range(len(workload))]
    arrivals = np.cumsum(gaps).astype(float)
    workload = dataclasses.replace(workload, arrival_seconds=arrivals - arrivals[0])
    settings = EngineSettings(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        watermark=watermark,
        enable_prefix_caching=caching,
        cost=SECOND,
    )
    rows, finished, cached, again = plain_engine(workload, settings)
    served = serve(workload, settings, log_steps=100_000)
    assert [tuple(row) for row in served.log.tolist()] == rows
    assert served.finished.tolist() == finished
    assert served.cached_tokens.tolist() == cached
    assert served.recomputed_tokens.tolist() == again


@pytest.fixture(scope="module")
def gpu_run():
    """300 ShareGPT requests on an RTX 4090 with vLLM 0.19, recorded by the LLMServingSim project."""
    with gzip.open(DATA / "rtx4090_llama-3.1-8b.requests.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    start = rows[0]["queued_ts"]
    queued, first, last = (
        np.array([row[key] for row in rows]) - start
        for key in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    workload = read_workload(DATA / "workload_sharegpt-llama-3.1-8b-300-sps10.jsonl.gz")
    with (DATA / "rtx4090_llama-3.1-8b.timeseries.csv").open() as lines:
        series = list(csv.DictReader(lines))
    return dataclasses.replace(workload, arrival_seconds=queued), first, last, series


def test_fitted_on_a_third_it_predicts_the_rest_of_a_real_gpu_run(gpu_run):
    workload, first, last, series = gpu_run
    engine = EngineSettings(num_blocks=2588, max_num_seqs=256, max_num_batched_tokens=2048)
    unseen = np.arange(len(workload)) >= 100
    fit = fit_step_cost(workload, engine, np.where(unseen, np.nan, first), np.where(unseen, np.nan, last))
    assert fit.requests == 100
    engine = EngineSettings(num_blocks=2588, max_num_seqs=256, max_num_batched_tokens=2048, cost=fit.cost)
    served = serve(workload, engine)
    real = (first - workload.arrival_seconds)[unseen]
    ours = (served.first_token - workload.arrival_seconds)[unseen]
    assert ours.mean() == pytest.approx(real.mean(), rel=0.01)
    assert np.percentile(ours, 99) == pytest.approx(np.percentile(real, 99), rel=0.01)
    result = simulate_engine(workload, engine)
    assert result.peak_running == pytest.approx(max(int(row["running"]) for row in series), rel=0.03)
    assert result.peak_waiting == pytest.approx(max(int(row["waiting"]) for row in series), rel=0.03)
    assert result.peak_active_ratio == 1.0
    assert max(float(row["kv_cache_pct"]) for row in series) > 99.9
    assert result.preemptions > 0


def test_a_fit_needs_requests(gpu_run):
    workload, first, last, _ = gpu_run
    with pytest.raises(KVCatchError, match="too few to fit"):
        fit_step_cost(workload, EngineSettings(num_blocks=2588), first * np.nan, last * np.nan)


def test_more_blocks_and_a_watermark_prevent_preemptions(gpu_run):
    workload = gpu_run[0]
    tight = simulate_engine(workload, EngineSettings(num_blocks=2588))
    roomy = simulate_engine(workload, EngineSettings(num_blocks=40_000))
    careful = simulate_engine(workload, EngineSettings(num_blocks=2588, watermark=0.2))
    assert tight.preemptions > 10 * careful.preemptions
    assert roomy.preemptions == roomy.recomputed_tokens == 0
    assert tight.recomputed_tokens > 0
    assert roomy.ttft_seconds["mean"] < tight.ttft_seconds["mean"]


def test_summary_of_what_was_served(gpu_run):
    workload = gpu_run[0].head(50)
    result = simulate_engine(workload, EngineSettings(num_blocks=200, cost=SECOND))
    # 200 blocks: 199 x 16 = 3,184 slots; longer requests cannot ever run.
    slots = workload.prompt_tokens + workload.output_tokens - 1
    assert result.rejected_requests == int((slots > 199 * 16).sum())
    assert result.requests == 50
    assert 0 < result.internal_fragmentation_ratio < 0.2
    assert result.queue_seconds["mean"] <= result.ttft_seconds["mean"]
    assert summary(np.array([])) == {}
    with pytest.raises(KVCatchError, match="no request"):
        simulate_engine(workload, EngineSettings(num_blocks=2))


@pytest.mark.parametrize(
    "wrong", [{"num_blocks": 1}, {"max_num_seqs": 0}, {"watermark": 1.0}, {"block_size": 0}]
)
def test_settings_are_checked(gpu_run, wrong):
    with pytest.raises(KVCatchError):
        serve(gpu_run[0], EngineSettings(**{"num_blocks": 100, **wrong}))


def test_log_columns_are_the_kernels():
    assert kernel.LOG_COLUMNS == 6

"""A real server under a load of eight tenants in a pool that is too small, recorded and observed at every step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest

from engine.support import observed
from engine.support.loaded import Loaded
from engine.support.top import metric

MODES = ["sync", "async"]


@pytest.mark.parametrize("mode", MODES)
class TestLoadedServer:
    """One load, many questions."""

    def test_the_load_was_what_it_claims(self, loaded: Callable[[str], Loaded], mode: str) -> None:
        run = loaded(mode)
        assert {answer.status for answer in run.answers} == {200}
        assert run.seen.info["scheduler"] == ("AsyncScheduler" if mode == "async" else "Scheduler")
        assert run.seen.preemptions >= 20
        assert len(run.seen.updates) >= 5000
        if mode == "async":
            # Two batches in flight: somewhere two schedules came before the first one's update.
            order = sorted(
                [(row["ns"], "s") for row in run.seen.schedules]
                + [(row["ns"], "u") for row in run.seen.updates]
            )
            kinds = "".join(kind for _, kind in order)
            assert "ssu" in kinds

    def test_every_step_equals_the_observer(self, loaded: Callable[[str], Loaded], mode: str) -> None:
        run = loaded(mode)
        comparison = observed.compare_rows(run.seen, run.steps)
        assert comparison.steps >= 5000
        assert not comparison.wrong, str(comparison)

    def test_preemptions_and_recomputed_tokens(self, loaded: Callable[[str], Loaded], mode: str) -> None:
        run = loaded(mode)
        assert run.last.preemptions == metric(run.metrics, "vllm:num_preemptions_total")
        assert run.last.recomputed == run.seen.recomputed > 0
        assert sum(view.num_preemptions or 0 for view in run.requests) == run.last.preemptions

    def test_prefix_cache_counters_equal_the_engines(
        self, loaded: Callable[[str], Loaded], mode: str
    ) -> None:
        run = loaded(mode)
        assert run.last.queried_tokens == metric(run.metrics, "vllm:prefix_cache_queries_total")
        assert run.last.hit_tokens == metric(run.metrics, "vllm:prefix_cache_hits_total") > 0

    def test_cached_and_other_tokens_equal_each_response(
        self, loaded: Callable[[str], Loaded], mode: str
    ) -> None:
        run = loaded(mode)
        views = {view.request_id: view for view in run.requests}
        for answer in run.answers:
            assert answer.ask.request_id is not None
            view = views[answer.ask.request_id]
            assert view.cached_tokens == answer.cached_tokens
            assert view.prompt_tokens == answer.usage["prompt_tokens"]
            assert view.output_tokens == answer.usage["completion_tokens"]
            assert view.finish_reason == answer.body["choices"][0]["finish_reason"]

    def test_tags_name_the_tenant_of_every_request(self, loaded: Callable[[str], Loaded], mode: str) -> None:
        run = loaded(mode)
        views = {view.request_id: view for view in run.requests}
        for index, answer in enumerate(run.answers):
            assert views[str(answer.ask.request_id)].tags["tenant"] == f"team{index % 8}"

    @pytest.mark.parametrize(
        ("histogram", "field"),
        [
            ("vllm:time_to_first_token_seconds", "ttft_seconds"),
            ("vllm:request_queue_time_seconds", "queue_seconds"),
        ],
    )
    def test_latency_sums_equal_the_engines_histograms(
        self, loaded: Callable[[str], Loaded], mode: str, histogram: str, field: str
    ) -> None:
        run = loaded(mode)
        values = [getattr(view, field) for view in run.requests if getattr(view, field) is not None]
        count = metric(run.metrics, histogram + "_count")
        times = [row["ns"] for row in run.seen.updates]
        step = statistics.median(after - before for before, after in pairwise(times)) / 1e9
        assert len(values) == count
        assert sum(values) == pytest.approx(metric(run.metrics, histogram + "_sum"), abs=count * step)

    def test_nothing_is_attributed_after_the_last_response(
        self, loaded: Callable[[str], Loaded], mode: str
    ) -> None:
        run = loaded(mode)
        assert run.last.active_blocks == 0
        assert run.last.blocks == {}
        assert run.last.running == run.last.waiting == set()

    def test_the_log_has_one_line_about_it(self, loaded: Callable[[str], Loaded], mode: str) -> None:
        run = loaded(mode)
        assert run.log.count("kvcatch: recording to") == 1
        assert f"recording to {run.ring}" in run.log

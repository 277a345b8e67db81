"""vLLM's own engine loop around its own scheduler, with a device that only takes time.

``EngineCore.step`` and ``EngineCore.step_with_batch_queue`` are the engine's; only the model is missing. The same requests
as a workload, for our simulation.
"""

from __future__ import annotations

import inspect
import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine.support.sched_modelfree import STEP_SECONDS, Setup, Spec, build, make_requests
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.engine import EngineSettings
from kvcatch.workload import Workload
from kvcatch.workload import build as build_workload

ONE_STEP = StepCost(fixed=1.0, per_prefill_token=0.0, per_decode=0.0)


class EngineLoop:
    """One workload. Seconds of a batch: ``fixed`` and ``per_token``; a batch without tokens takes none.

    scheduled, first_token, finished: seconds from the first arrival, by request. seen: what ``look`` made of every batch
    that computes something.
    """

    def __init__(
        self, cls: type, specs: list[Spec], setup: Setup, model: str, *, look: Callable[[Any, Any], Any],
        fixed: float = 1.0, per_token: float = 0.0,
    ) -> None:  # fmt: skip
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.outputs import ModelRunnerOutput

        self.specs, self.setup, self.look = specs, setup, look
        self.fixed, self.per_token = fixed, per_token
        self.scheduler = build(cls, setup, model)
        self.requests = make_requests(specs, setup)
        self.now = self.busy_until = 0.0
        pilot = getattr(self.scheduler, "_kvcatch", None)
        if pilot is not None:
            pilot.clock = lambda: (self.now + specs[0].arrival) * STEP_SECONDS
        self.seen: list[tuple[float, Any]] = []
        self.scheduled, self.first_token, self.finished = ({} for _ in range(3))
        self._executed: Any = None
        self._output = ModelRunnerOutput
        parameters = inspect.signature(ModelRunnerOutput).parameters
        empty = {"logprobs": None, "prompt_logprobs_dict": {}, "pooler_output": []}
        self._fields = {k: v for k, v in empty.items() if parameters[k].default is inspect.Parameter.empty}
        depth = 2 if setup.asynchronous else 1
        core = self.core = object.__new__(EngineCore)
        core.scheduler, core.model_executor = self.scheduler, self
        core.vllm_config = SimpleNamespace(
            observability_config=SimpleNamespace(enable_logging_iteration_details=False)
        )
        core.batch_queue_size, core.batch_queue = depth, deque(maxlen=depth)
        core.is_pooling_model = core.is_mm_encoder_only = core.check_for_draft_tokens = False
        core.log_stats, core._weight_version = False, 0
        core.aborts_queue = queue.Queue()
        self._step = core.step_with_batch_queue if setup.asynchronous else core.step

    def go(self) -> EngineLoop:
        """As ``EngineCore.run_busy_loop``: who has arrived is taken in before each step; idle until somebody arrives."""
        arrivals = [spec.arrival - self.specs[0].arrival for spec in self.specs]
        coming = deque(sorted(range(len(arrivals)), key=arrivals.__getitem__))
        while coming or self.scheduler.has_requests() or self.core.batch_queue:
            if not self.scheduler.has_requests() and not self.core.batch_queue:
                self.now = max(self.now, float(arrivals[coming[0]]))
            while coming and arrivals[coming[0]] <= self.now:
                self.scheduler.add_request(self.requests[coming.popleft()])
            for batch in (self._step()[0] or {}).values():
                for item in batch.outputs:
                    index = int(item.request_id)
                    if item.new_token_ids:
                        self.first_token.setdefault(index, self.now)
                    if item.finish_reason is not None:
                        assert index not in self.finished
                        self.finished[index] = self.now
        return self

    # ---- the executor's side -----------------------------------------------------------------------------

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        """Queue a batch behind what is computed."""
        for data in output.scheduled_new_reqs:
            self.scheduled.setdefault(int(data.req_id), self.now)
        tokens = output.total_num_scheduled_tokens
        start = max(self.now, self.busy_until)
        self.busy_until = start + (self.fixed + self.per_token * tokens if tokens else 0.0)
        if tokens:
            self.seen.append((self.now, self.look(self.scheduler, output)))
        table = self.scheduler.requests
        samples = {
            i: table[i].num_computed_tokens >= table[i].num_tokens for i in output.num_scheduled_tokens
        }
        self._executed = SimpleNamespace(
            result=lambda end=self.busy_until: self._answer(output, samples, end)
        )
        return self._executed

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        """The answer to the batch queued last."""
        return self._executed

    def _answer(self, output: Any, samples: dict[str, bool], end: float) -> Any:
        self.now = max(self.now, end)
        ids = list(output.num_scheduled_tokens)
        tokens = []
        for request_id in ids:
            index = int(request_id)
            request = self.requests[index]
            made = request.num_output_tokens + 1
            last = made >= self.specs[index].output
            stop = last and request.max_tokens > made
            # No two requests generate the same, so that generated blocks never repeat.
            tokens.append(([1] if stop else [2 + (made + index) % 990]) if samples[request_id] else [])
        return self._output(
            req_ids=ids, req_id_to_index={name: k for k, name in enumerate(ids)}, sampled_token_ids=tokens,
            **self._fields,
        )  # fmt: skip


def trace_of(specs: list[Spec], block_size: int) -> Workload:
    """The same requests as a workload, a step a second. Whole blocks of a common beginning are shared."""
    rows = []
    for number, spec in enumerate(specs):
        common = spec.prefix_tokens // block_size if spec.prefix >= 0 else 0
        segments: list[tuple[object, int]] = []
        for start in range(0, spec.prompt, block_size):
            place = start // block_size
            owner: object = ("prefix", spec.prefix) if place < common else number
            segments.append(((owner, place), min(block_size, spec.prompt - start)))
        rows.append(
            {"arrival": spec.arrival, "prompt": spec.prompt, "output": spec.output, "segments": segments,
             "max_tokens": spec.max_tokens, "tenant": spec.tenant}
        )  # fmt: skip
    return build_workload("specs", rows, grain=block_size)


def settings_of(setup: Setup, scheduler: str = "stock", cost: StepCost = ONE_STEP) -> EngineSettings:
    """The same engine for our simulation."""
    return EngineSettings(
        num_blocks=setup.num_blocks, block_size=setup.block_size, max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.budget, max_model_len=setup.max_model_len, watermark=setup.watermark,
        enable_prefix_caching=setup.caching, scheduler=scheduler, async_scheduling=setup.asynchronous, cost=cost,
    )  # fmt: skip


def with_prefixes(specs: list[Spec]) -> list[Spec]:
    """Two thirds of them begin with one of two common texts."""
    return [
        Spec(s.arrival, s.prompt, s.output, s.max_tokens, s.long, prefix=i % 3 - 1, prefix_tokens=min(96, s.prompt // 2))
        for i, s in enumerate(specs)
    ]  # fmt: skip

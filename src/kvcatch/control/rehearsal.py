"""kvcatch's scheduler on the simulated engine: the pilot of the plugin itself, not a model of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvcatch.control.pilot import Decision, Pilot
from kvcatch.control.queue import GovernedLine
from kvcatch.errors import KVCatchError
from kvcatch.policy.settings import MODES, Settings, settings_from
from kvcatch.simulator.embedded import AsyncScheduler, Scheduler
from kvcatch.simulator.engine import EngineSettings, Served, serve
from kvcatch.simulator.requests import SchedulerOutput
from kvcatch.simulator.stepwise import scheduler_arguments, serve_stepwise
from kvcatch.workload import BlockView, Workload

logger = logging.getLogger("kvcatch")


class _Governed(Scheduler):
    """The embedded engine with the plugin's pilot at its waiting queue, as in ``control.scheduler``."""

    #: batches in flight at once
    depth = 1

    def __init__(self, policy: Settings, clock: Callable[[], float], **arguments: Any) -> None:
        """clock: seconds, as the policy's patience is measured; arguments: of ``embedded.Scheduler``."""
        super().__init__(**arguments)
        # The rest of what the pilot reads of a vLLM scheduler.
        self.policy = SimpleNamespace(value="fcfs")
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(),
            max_concurrent_batches=self.depth,
        )
        self.kvcatch_decisions: list[Decision] = []
        self.pilot = Pilot(self, policy, logger, self.kvcatch_decisions)
        self.pilot.clock = clock
        self.waiting = GovernedLine(self.pilot)  # type: ignore[assignment]

    def schedule(self) -> SchedulerOutput:
        """The engine's own step under the pilot."""
        if self.pilot.failed:
            raise RuntimeError("the scheduler policy failed, see the warning above")
        output: SchedulerOutput = self.pilot.run(super().schedule)
        return output


class GovernedScheduler(_Governed):
    """For engines without async scheduling."""


class GovernedAsyncScheduler(_Governed, AsyncScheduler):
    """For engines with async scheduling."""

    depth = 2


def serve_governed(workload: Workload, settings: EngineSettings, view: BlockView) -> Served:
    """Run the engine with ``settings.scheduler``: ``stock`` or a mode of the plugin.

    The policy's other settings come from the environment variables that the plugin reads (``policy.settings``).
    Raises KVCatchError for a scheduler that does not exist or a bad variable.
    """
    if settings.scheduler == "stock":
        return serve(workload, settings, view)
    if settings.scheduler not in MODES:
        raise KVCatchError(
            f"no scheduler {settings.scheduler!r}.", f"Choose one of: stock, {', '.join(MODES)}."
        )
    policy = settings_from({**os.environ, "KVCATCH_SCHEDULER_MODE": settings.scheduler})

    def build(chosen: EngineSettings, max_model_len: int, clock: Callable[[], float]) -> Scheduler:
        kind = GovernedAsyncScheduler if chosen.async_scheduling else GovernedScheduler
        return kind(policy, clock, **scheduler_arguments(chosen, max_model_len))

    return serve_stepwise(workload, settings, view, build)

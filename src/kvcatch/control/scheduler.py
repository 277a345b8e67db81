"""``--scheduler-cls kvcatch.control.scheduler.KVCatchScheduler`` (or ``KVCatchAsyncScheduler``) for vLLM.

Nothing of ``schedule()`` is copied: the classes replace the waiting queue and look at what each step did.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from kvcatch.control.contract import missing
from kvcatch.control.pilot import Decision, Pilot
from kvcatch.control.queue import GovernedLine
from kvcatch.control.signals import stored_watermark
from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.policy.settings import can_fire, settings_from

logger = init_logger("vllm.kvcatch.scheduler")


class GovernedQueue(GovernedLine, RequestQueue):  # type: ignore[misc]
    """The line as the type that vLLM expects."""


def _info(scheduler: Any) -> EngineInfo:
    """As much of the configuration as a stored watermark is judged by."""
    config = scheduler.scheduler_config
    return EngineInfo(
        num_blocks=int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks),
        max_num_seqs=getattr(config, "max_num_seqs", None),
        max_num_batched_tokens=getattr(config, "max_num_batched_tokens", None),
    )


def _take_over(scheduler: Any, decisions: list[Decision]) -> Pilot | None:
    """Put the governed queue in place of an empty stock one; None (with a warning) when that is not safe."""
    lacks = missing(scheduler, RequestQueue)
    if lacks:
        logger.warning("kvcatch: scheduling as without the plugin, this vLLM lacks: %s", ", ".join(lacks))
        return None
    try:
        settings = settings_from(os.environ, stored_watermark(os.environ, _info(scheduler)))
        pilot = Pilot(scheduler, settings, logger, decisions)
    except KVCatchError:
        raise  # a setting of the user: better no start than a silent default
    except Exception as error:
        logger.warning("kvcatch: scheduling as without the plugin: %s", error, exc_info=error)
        return None
    scheduler.waiting = GovernedQueue(pilot)
    ahead = isinstance(scheduler, AsyncScheduler)
    if ahead != bool(getattr(scheduler.scheduler_config, "async_scheduling", ahead)):
        logger.warning(
            "kvcatch: %s is for engines %s async scheduling and this one is not: name %s in --scheduler-cls",
            type(scheduler).__name__, "with" if ahead else "without",
            "KVCatchScheduler" if ahead else "KVCatchAsyncScheduler",
        )  # fmt: skip
    governor = pilot.governor
    logger.info(
        "kvcatch: scheduler mode %s, bound %s, safe utilisation %.2f (%s), %d usable blocks",
        settings.mode, settings.quantile or "max", settings.safe_utilization, settings.safe_source,
        governor.usable,
    )  # fmt: skip
    largest = governor.blocks[governor.blocks.max_tokens]
    if not can_fire(settings.safe_utilization, governor.usable, largest, scheduler.max_num_running_reqs):
        logger.warning(
            "kvcatch: the safe utilisation %.2f can never be passed: %d sequences of at most %d blocks in a "
            "pool of %d. The scheduler will behave like stock.",
            settings.safe_utilization, scheduler.max_num_running_reqs, largest, governor.usable,
        )  # fmt: skip
    return pilot


class _Governed:
    """What both classes add to vLLM's own."""

    #: (step, request id, decision, reason) of the last step, cleared at the next
    kvcatch_decisions: list[Decision]
    _kvcatch: Pilot | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kvcatch_decisions = []
        self._kvcatch = _take_over(self, self.kvcatch_decisions)

    @property
    def kvcatch_held(self) -> int:
        """Requests the policy kept waiting in the last step."""
        return self._kvcatch.held if self._kvcatch is not None else 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own step, with our choice at the front of the waiting queue."""
        pilot = self._kvcatch
        if pilot is None or pilot.failed:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        return pilot.run(functools.partial(super().schedule, *args, **kwargs))  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, then an error for each request that can never fit."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        pilot = self._kvcatch
        if pilot is not None and pilot.rejected:
            rejected = list(pilot.rejected.values())
            self.finish_requests([r.request_id for r in rejected], RequestStatus.FINISHED_ERROR)  # type: ignore[attr-defined]
            for request in rejected:
                answer = outputs.setdefault(request.client_index, EngineCoreOutputs())
                answer.outputs.append(
                    EngineCoreOutput(
                        request_id=request.request_id,
                        new_token_ids=[],
                        finish_reason=request.get_finished_reason(),
                        stop_reason="kvcatch: the request needs more KV blocks than the pool has",
                        events=request.take_events(),
                        trace_headers=request.trace_headers,
                    )
                )
        return outputs


class KVCatchScheduler(_Governed, Scheduler):  # type: ignore[misc]
    """For engines without async scheduling."""


class KVCatchAsyncScheduler(_Governed, AsyncScheduler):  # type: ignore[misc]
    """For engines with async scheduling (vLLM's default on GPU)."""

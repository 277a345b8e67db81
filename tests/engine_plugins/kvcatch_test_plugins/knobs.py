"""Switches that the CPU engine does not offer.

KVCATCH_TEST_ASYNC=1    keep asynchronous scheduling on: the CPU platform turns it off after all flags.
KVCATCH_TEST_SEQS=N     another default of --max-num-seqs, as another release might have.
KVCATCH_TEST_NOCHECK=1  start although one request of maximum length exceeds the pool (as older releases do).
KVCATCH_TEST_PATIENT=1  wait for the other process by short sleeps, not by sched_yield.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any


def register() -> None:
    """Entry point of ``vllm.general_plugins``; may run more than once in a process."""
    if os.environ.get("KVCATCH_TEST_ASYNC") == "1":
        _keep_async_scheduling()
    if os.environ.get("KVCATCH_TEST_NOCHECK") == "1":
        _skip_memory_check()
    if os.environ.get("KVCATCH_TEST_SEQS"):
        _default_max_num_seqs(int(os.environ["KVCATCH_TEST_SEQS"]))
    if os.environ.get("KVCATCH_TEST_PATIENT") == "1":
        _sleep_while_waiting()


def _sleep_while_waiting() -> None:
    """Engine core and worker wait for each other in a loop of sched_yield.

    On two cores Linux 6.18 lets that loop starve other processes: a command of 0.4 s of work that was run beside
    one decoding request waited 5 to 26 s for a processor, and 0.1 s with sleeps instead.
    """
    from vllm.distributed import utils

    def sched_yield() -> None:
        time.sleep(0.0001)

    utils.sched_yield = sched_yield
    users = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if users is not None:
        users.sched_yield = sched_yield


def _keep_async_scheduling() -> None:
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if getattr(platform, "_kvcatch_test_async", False):
        return
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        original(cls, config)
        config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform._kvcatch_test_async = True


def _skip_memory_check() -> None:
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils._check_enough_kv_cache_memory = lambda *args, **kwargs: None


def _default_max_num_seqs(number: int) -> None:
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, "_kvcatch_test_seqs", False):
        return
    original = EngineArgs.get_batch_defaults.__func__

    def get_batch_defaults(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, seqs = original(cls, *args, **kwargs)
        return tokens, dict.fromkeys(seqs, number)

    EngineArgs.get_batch_defaults = classmethod(get_batch_defaults)
    EngineArgs._kvcatch_test_seqs = True

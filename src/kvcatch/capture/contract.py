"""The names of the engine that the hooks use, and a check that they are there."""

from __future__ import annotations

import inspect
from typing import Any

#: (module, class, method, first arguments after self): what must not have moved
HOOKED: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output", ("scheduler_output",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "add_request", ("request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "finish_requests", ("request_ids",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "_preempt_request", ("request",)),
    ("vllm.v1.core.block_pool", "BlockPool", "get_new_blocks", ("num_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool", "touch", ("blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool", "free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool", "reset_prefix_cache", ()),
    ("vllm.v1.core.block_pool", "BlockPool", "get_num_free_blocks", ()),
)

#: attributes read on live objects, as paths from the scheduler
READ = (
    "running", "waiting", "requests", "finished_req_ids", "max_num_running_reqs", "max_num_scheduled_tokens",
    "kv_cache_manager.block_pool.num_gpu_blocks", "kv_cache_manager.block_pool.blocks",
    "kv_cache_manager.block_pool.free_block_queue.num_free_blocks",
    "kv_cache_manager.block_pool.free_block_queue.fake_free_list_head",
    "kv_cache_manager.coordinator.single_type_managers",
)  # fmt: skip


def first_difference(scheduler: Any) -> str | None:
    """The first hooked name or first argument that is missing on this scheduler; None when all are there."""
    owners = {
        "Scheduler": scheduler,
        "BlockPool": getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None),
    }
    for _, owner, method, arguments in HOOKED:
        function = getattr(owners[owner], method, None)
        if function is None:
            return f"{owner}.{method}"
        parameters = tuple(inspect.signature(function).parameters)[: len(arguments)]
        if parameters != arguments:
            return f"{owner}.{method}({', '.join(arguments)})"
    for path in READ:
        value: Any = scheduler
        for name in path.split("."):
            if not hasattr(value, name):
                return f"Scheduler.{path}"
            value = getattr(value, name)
    return None

"""Does this vLLM look the way the plugin needs? Checked once, before anything is replaced."""

from __future__ import annotations

from typing import Any

#: what the plugin reads or calls on the scheduler, and on the objects below it
_SCHEDULER = ("waiting", "running", "requests", "finished_req_ids", "kv_cache_manager", "policy")
_METHODS = ("schedule", "update_from_output", "finish_requests", "add_request", "_preempt_request")
_QUEUE = {
    "add_request", "pop_request", "peek_request", "prepend_request", "prepend_requests",
    "remove_request", "remove_requests", "__bool__", "__len__", "__iter__",
}  # fmt: skip


def missing(scheduler: Any, queue_class: type) -> list[str]:
    """Names the plugin needs and this engine lacks; empty when it can take over.

    scheduler: a constructed vLLM scheduler. queue_class: vLLM's abstract ``RequestQueue``.
    """
    lacks = [f"Scheduler.{name}" for name in _SCHEDULER if not hasattr(scheduler, name)]
    lacks += [f"Scheduler.{name}()" for name in _METHODS if not callable(getattr(scheduler, name, None))]
    for name in ("max_num_scheduled_tokens", "vllm_config", "max_model_len"):
        if not hasattr(scheduler, name):
            lacks.append(f"Scheduler.{name}")
    manager = getattr(scheduler, "kv_cache_manager", None)
    pool = getattr(manager, "block_pool", None)
    if not callable(getattr(pool, "get_num_free_blocks", None)) or not hasattr(pool, "num_gpu_blocks"):
        lacks.append("KVCacheManager.block_pool")
    coordinator = getattr(manager, "coordinator", None)
    if not callable(getattr(coordinator, "get_num_blocks_to_allocate", None)):
        lacks.append("KVCacheCoordinator.get_num_blocks_to_allocate()")
    if not getattr(coordinator, "single_type_managers", None):
        lacks.append("KVCacheCoordinator.single_type_managers")
    unknown = set(getattr(queue_class, "__abstractmethods__", ())) - _QUEUE
    lacks += [f"RequestQueue.{name}() is new" for name in sorted(unknown)]
    if not isinstance(getattr(scheduler, "running", None), list):
        lacks.append("Scheduler.running as a list")
    if not isinstance(getattr(scheduler, "waiting", None), queue_class) or len(scheduler.waiting):
        lacks.append("Scheduler.waiting as an empty RequestQueue")
    return lacks

"""A small ring per worker rank: step time and device memory, at low frequency.

The hook is on the worker wrapper's ``execute_model``; between two samples it only reads the clock. On a GPU the
step time is the host's share (the launch), memory comes from the torch allocator and the driver; on CPU the
process memory plays the card.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from array import array
from typing import Any

from kvcatch.capture.options import Options
from kvcatch.store import layout as L
from kvcatch.store.layout import UNKNOWN

logger = logging.getLogger("kvcatch")
mono = time.monotonic_ns
RING_BYTES = 2 << 20
_MEMORY_PARTS = (
    "model_memory_usage", "peak_activation_memory", "non_torch_memory", "cudagraph_memory_estimate",
    "available_kv_cache_memory_bytes",
)  # fmt: skip


def install() -> None:
    """Wrap the worker wrapper: a ring when the KV cache is allocated, a sample when a step is due."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    initialize, execute = WorkerWrapperBase.initialize_from_config, WorkerWrapperBase.execute_model

    @functools.wraps(initialize)
    def initialize_from_config(self: Any, kv_cache_configs: Any, *args: Any, **kwargs: Any) -> Any:
        result = initialize(self, kv_cache_configs, *args, **kwargs)
        try:
            options = Options(os.environ)
            if options.enabled:
                self.kvcatch_rank = RankRecorder(self, kv_cache_configs, options)
        except Exception as error:  # noqa: BLE001 (nothing of ours may reach the engine)
            logger.warning("kvcatch: no memory record of this rank: %s: %s", type(error).__name__, error)
        return result

    @functools.wraps(execute)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        rank = self.__dict__.get("kvcatch_rank")
        if rank is None:
            return execute(self, *args, **kwargs)
        start = mono()
        result = execute(self, *args, **kwargs)
        rank.step(start)
        return result

    WorkerWrapperBase.initialize_from_config = initialize_from_config
    WorkerWrapperBase.execute_model = execute_model


class RankRecorder:
    """Writes one RANK row per memory interval."""

    def __init__(self, wrapper: Any, kv_cache_configs: Any, options: Any) -> None:
        from kvcatch.capture.info import dp_rank_of
        from kvcatch.capture.plugin import _owned, prune, unused_path
        from kvcatch.capture.recorder import ring_path
        from kvcatch.capture.ring import RingWriter

        worker, parallel = wrapper.worker, wrapper.vllm_config.parallel_config
        tp_size = int(parallel.tensor_parallel_size)
        rank = int(wrapper.global_rank)
        dp_rank = dp_rank_of(parallel)
        self.memory = device_memory(str(getattr(worker, "device", "cpu")))
        config = kv_cache_configs[rank]
        info = {
            "dp_rank": dp_rank,
            "pp_rank": rank // tp_size,
            "tp_rank": rank % tp_size,
            "device": self.memory.name,
            "pid": os.getpid(),
            "kv_cache_bytes": sum(int(tensor.size) for tensor in config.kv_cache_tensors),
            "memory_parts": _parts(worker),
        }
        os.makedirs(options.directory, mode=0o700, exist_ok=True)
        part = f"rank-dp{dp_rank}-pp{info['pp_rank']}-tp{info['tp_rank']}"
        prune(options.directory, part)
        path = unused_path(ring_path(options.directory, options.run_id, part))
        self.ring = RingWriter(path, RING_BYTES, info)
        _owned(self.ring)
        self.interval = options.memory_interval_ns
        self.steps = self.longest = self.last = 0
        self.step(mono())

    def step(self, start: int) -> None:
        """One executed step that began at ``start``."""
        now = mono()
        took = now - start
        self.steps += 1
        self.longest = max(self.longest, took)
        if now - self.last < self.interval:
            return
        self.last = now
        try:
            self._write(now, took)
        except Exception as error:  # noqa: BLE001 (nothing of ours may reach the engine)
            self.interval = 1 << 62
            self.ring.count_hook_error()
            logger.warning("kvcatch: memory record stopped: %s: %s", type(error).__name__, error)

    def _write(self, now: int, took: int) -> None:
        ring = self.ring
        row = array("I", (
            L.RANK | (1 + len(L.RANK_ROW)) << 16, now & UNKNOWN, now >> 32, self.steps, min(took, UNKNOWN),
            min(self.longest, UNKNOWN), *self.memory.sample(),
        )).tobytes()  # fmt: skip
        self.steps = self.longest = 0
        if len(row) > 4 * ring.room():
            ring.pad(now, 0)
            ring.append(L.segment_record(ring.head // L.SEGMENT_WORDS, now, time.time_ns()), now, 0)
        ring.append(row, now, 0)


def _parts(worker: Any) -> dict[str, int]:
    """The engine's own memory split, as far as this version keeps it."""
    parts = {}
    for owner in (worker, getattr(worker, "model_runner", None)):
        for name in _MEMORY_PARTS:
            value = getattr(owner, name, None)
            if isinstance(value, (int, float)):
                parts[name] = int(value)
    return parts


class _ProcessMemory:
    """Resident memory of this process against the machine's (or its cgroup's) memory."""

    name = "cpu"

    def sample(self) -> list[int]:
        """used, peak since the last sample, total, torch, torch peak, reserved, free; KiB, UNKNOWN where not known."""
        used = peak = 0
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmRSS:"):
                    used = int(line.split()[1])
                elif line.startswith("VmHWM:"):
                    peak = int(line.split()[1])
        try:
            # Resets the peak, so that the next sample tells the maximum since this one.
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            pass
        total = free = UNKNOWN
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemTotal:"):
                    total = int(line.split()[1])
                elif line.startswith("MemAvailable:"):
                    free = int(line.split()[1])
                    break
        return [used, max(used, peak), total, UNKNOWN, UNKNOWN, UNKNOWN, free]


class _TorchMemory:
    """The torch allocator's and the driver's view of one GPU."""

    def __init__(self, device: str) -> None:
        import torch

        self.cuda: Any = torch.cuda
        self.device: Any = torch.device(device)
        self.name = device

    def sample(self) -> list[int]:
        """As _ProcessMemory.sample; used = what this process holds in the allocator."""
        cuda, device = self.cuda, self.device
        allocated = cuda.memory_allocated(device) >> 10
        peak = cuda.max_memory_allocated(device) >> 10
        reserved = cuda.memory_reserved(device) >> 10
        free, total = (value >> 10 for value in cuda.mem_get_info(device))
        cuda.reset_peak_memory_stats(device)
        return [reserved, max(reserved, peak), total, allocated, peak, reserved, free]


def device_memory(device: str) -> Any:
    """The sampler for a device name."""
    return _TorchMemory(device) if device.startswith("cuda") else _ProcessMemory()

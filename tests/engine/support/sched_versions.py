"""One seeded workload on stock and on the plugin, in a process that has another vLLM release first on its path.

python sched_versions.py MODEL_FOLDER   ->  one JSON document on the last line
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(model: str) -> None:
    import vllm
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from engine.support.sched_modelfree import Run, Setup, ttft_p95, workload
    from kvcatch.control.scheduler import KVCatchAsyncScheduler, KVCatchScheduler

    rows: list[dict[str, Any]] = []
    for asynchronous, stock, ours in (
        (False, Scheduler, KVCatchScheduler),
        (True, AsyncScheduler, KVCatchAsyncScheduler),
    ):
        for caching in (False, True):
            setup = Setup(asynchronous=asynchronous, caching=caching)
            specs = workload(21, 160, 1.2)
            aborts = {i: specs[i].arrival + 30 for i in range(0, 160, 16)}
            base = Run(stock, specs, setup, model, aborts=aborts).go()
            found = Run(ours, specs, setup, model, aborts=aborts).go()
            pilot = found.scheduler._kvcatch
            rows.append(
                {
                    "in_charge": pilot is not None and not pilot.failed,
                    "lost": len(specs) - len(set(found.finished)),
                    "twice": len(found.finished) - len(set(found.finished)),
                    "pool_whole": found.free_at_end == setup.num_blocks - 1,
                    "preemptions": [base.preemptions, found.preemptions],
                    "short": [ttft_p95(base, specs, False), ttft_p95(found, specs, False)],
                    "long": [ttft_p95(base, specs, True), ttft_p95(found, specs, True)],
                    "steps": [base.steps, found.steps],
                }
            )
    setup = Setup(num_blocks=401)
    specs = workload(22, 80, 1.5)
    same = (
        Run(Scheduler, specs, setup, model, trace=True).go().trace
        == Run(KVCatchScheduler, specs, setup, model, trace=True).go().trace
    )
    print(json.dumps({"vllm": vllm.__version__, "rows": rows, "identical_below": same}))


if __name__ == "__main__":
    main(sys.argv[1])

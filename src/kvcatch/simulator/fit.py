"""The cost of a step, found from when requests of a real run got their first and last token."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.results import Result
from kvcatch.simulator.cost import StepCost
from kvcatch.simulator.engine import EngineSettings, serve
from kvcatch.workload import Workload

Seconds = npt.NDArray[np.float64]
TRIES = 80
LEAST = 10


class Fit(Result, frozen=True):
    """A fitted cost. error_seconds: mean distance of first and last tokens from the measured ones."""

    cost: StepCost
    error_seconds: float
    requests: int


def fit_step_cost(
    workload: Workload, settings: EngineSettings, first_token: Seconds, finished: Seconds, *, seed: int = 0
) -> Fit:
    """Search the five parts of ``StepCost`` by simulating the whole workload again and again.

    A step's duration is not observable from outside, so the search compares what is: tokens' times. Five
    positive numbers are changed at random in the logarithm, and kept when the simulation comes closer.

    Args:
        workload: every request that the engine served, in order of arrival.
        settings: the engine as it was; its cost is where the search starts, or orders of magnitude seen in the
            times if those are closer.
        first_token, finished: seconds from the first arrival; NaN for requests that are not to be used.
        seed: of the search.

    Raises:
        KVCatchError: fewer than 10 requests with times.
    """
    used = np.isfinite(first_token) & np.isfinite(finished)
    if used.sum() < LEAST:
        raise KVCatchError(
            f"{int(used.sum())} requests with times are too few to fit.", f"Give {LEAST} or more."
        )
    view = workload.blocks(settings.block_size)

    def distance(parts: Seconds) -> float:
        served = serve(workload, _with(settings, parts), view=view)
        apart = np.abs(served.first_token - first_token) + np.abs(served.finished - finished)
        return float(np.nanmean(apart[used])) / 2

    starts = [_start(workload, first_token, finished, used), settings.cost.array()]
    error, best = min(((distance(parts), parts) for parts in starts), key=lambda pair: pair[0])
    random = np.random.default_rng(seed)
    reach = 0.3
    for _ in range(TRIES):
        changed = best * np.exp(reach * random.normal(size=5) * (random.random(5) < 0.5))
        found = distance(changed)
        if found < error:
            best, error, reach = changed, found, min(reach * 1.3, 0.5)
        else:
            reach = max(reach * 0.98, 0.01)
    return Fit(cost=_with(settings, best).cost, error_seconds=error, requests=int(used.sum()))


def _start(
    workload: Workload, first_token: Seconds, finished: Seconds, used: npt.NDArray[np.bool_]
) -> Seconds:
    """Orders of magnitude: the fastest decoding and the fastest first token."""
    output = workload.output_tokens[used]
    between = (finished - first_token)[used] / np.maximum(output - 1, 1)
    fixed = max(float(np.percentile(between, 5)) * 0.7, 1e-5)
    waited = (first_token - workload.arrival_seconds)[used]
    prefill = max(float(np.percentile(waited / workload.prompt_tokens[used], 2)), 1e-7)
    return np.array([fixed, prefill, fixed / 200, fixed / 1e5, prefill / 1e5])


def _with(settings: EngineSettings, parts: Seconds) -> EngineSettings:
    fixed, prefill, decode, context, attention = (float(part) for part in parts)
    cost = StepCost(
        fixed=fixed,
        per_prefill_token=prefill,
        per_decode=decode,
        per_context_token=context,
        per_attention=attention,
    )
    return msgspec.structs.replace(settings, cost=cost)

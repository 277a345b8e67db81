"""What one step of an engine costs in time."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step: the sum of what it computes.

    fixed: every step. per_prefill_token, per_decode: each token of a prompt, each decoding request.
    per_context_token: each cached token that a decoding request reads. per_attention: each pair of a prompt token
    and a token before it. The defaults are of the order of an 8-billion-parameter model on one large card.
    """

    fixed: float = 0.007
    per_prefill_token: float = 25e-6
    per_decode: float = 0.1e-3
    per_context_token: float = 0.0
    per_attention: float = 0.0

    def array(self) -> Array:
        """The five numbers in the kernel's order."""
        return np.array(msgspec.structs.astuple(self), np.float64)

"""How long will this answer get? A conditional quantile of what similar requests produced."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

#: samples kept per (tenant, prompt bucket), and how many are needed before the bound may go below max_tokens
WINDOW = 512
ENOUGH = 50
#: samples that must have outlived the tokens generated so far for the conditional quantile to mean anything
ENOUGH_LONGER = 10
#: tenants x prompt buckets kept; the least recently finished go first
MAX_KEYS = 1024


class OutputLengths:
    """Bounds on output tokens from observed outputs, by tenant and prompt length.

    quantile None is strict: the bound is always ``max_tokens``. Otherwise the bound is that quantile of the
    observed lengths *above the tokens generated so far* (past-future's rule, arXiv 2507.10150), and
    ``max_tokens`` until 50 samples exist.
    """

    def __init__(self, quantile: float | None = None) -> None:
        if quantile is not None and not 0 < quantile <= 1:
            raise ValueError(f"quantile must be in (0, 1], not {quantile}")
        self.quantile = quantile
        self._recent: dict[tuple[str, int], deque[int]] = {}
        self._sorted: dict[tuple[str, int], list[int]] = {}

    @staticmethod
    def bucket(prompt_tokens: int) -> int:
        """Powers of four: prompts of 256 to 1,023 tokens share a bucket, so that it fills soon."""
        return (prompt_tokens.bit_length() - 1) // 2

    def observe(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        """A request finished by itself after ``output_tokens``."""
        if self.quantile is None:
            return
        key = (tenant, self.bucket(prompt_tokens))
        recent = self._recent.pop(key, None)
        if recent is None:
            recent = deque()
            self._sorted[key] = []
            if len(self._recent) >= MAX_KEYS:
                oldest = next(iter(self._recent))
                del self._recent[oldest], self._sorted[oldest]
        self._recent[key] = recent  # last: most recently used
        ordered = self._sorted[key]
        if len(recent) == WINDOW:
            ordered.pop(bisect_right(ordered, recent.popleft()) - 1)
        recent.append(output_tokens)
        insort(ordered, output_tokens)

    def bound(self, tenant: str, prompt_tokens: int, generated: int, max_tokens: int) -> int:
        """Output tokens to plan for, in [generated + 1, max_tokens] (max_tokens when already reached)."""
        if self.quantile is None:
            return max_tokens
        ordered = self._sorted.get((tenant, self.bucket(prompt_tokens)))
        if ordered is None or len(ordered) < ENOUGH:
            return max_tokens
        longer = bisect_right(ordered, generated)
        count = len(ordered) - longer
        if count < ENOUGH_LONGER:
            return max_tokens
        at = longer + min(count - 1, int(self.quantile * count))
        return min(max_tokens, max(generated + 1, ordered[at]))

"""Live requests that a gateway asked two engines about: numbers of each, and a verdict that may be read at any time.

Nothing here was sent or answered: counts, divergences and keyed hashes only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.quality.endpoint import Position
from kvcatch.quality.measure import divergences
from kvcatch.quality.sequential import Bet
from kvcatch.quality.verdict import Limits
from kvcatch.results import Result

KIND = "kvcatch-mirror"
SCHEMA_VERSION = 1
#: probability of a wrong verdict over the whole life of a mirror, for fail and for pass each
ERROR = 0.01


class PairsHead(Result, frozen=True):
    """First line of a file of pairs."""

    kind: str = KIND
    schema_version: int = SCHEMA_VERSION
    kvcatch_version: str = ""
    candidate: str = ""


class Pair(Result, frozen=True):
    """One request on both engines. kl_nats, flips_ratio: means over the positions of its prompt.

    first_divergence: place of the first different token of both greedy continuations, None when there was none.
    """

    request: str
    positions: int
    logprobs_k: int
    kl_nats: float
    kl_max_nats: float
    flips_ratio: float
    continued_tokens: int
    first_divergence: int | None


class ShadowCheck(Result, frozen=True):
    """One number: its mean, its limit, and the largest stake of either gambler. verdict = pass | fail | inconclusive."""

    name: str
    value: float
    limit: float
    fail_evidence: float  # of the one that bets on above the limit; 2 / error decides
    pass_evidence: float  # on below; 1 / error for both numbers decides
    verdict: str


class Shadow(Result, frozen=True):
    """The verdict on a mirror. decided_at: requests after which it stood, None = not yet."""

    verdict: str
    requests: int
    decided_at: int | None
    continuations_changed: int
    continuations: int
    checks: tuple[ShadowCheck, ...]
    error: float
    limits: Limits


def pair(
    request: str,
    logprobs_k: int,
    scored: tuple[Sequence[Position], Sequence[Position]],
    continued: tuple[Sequence[Position], Sequence[Position]],
) -> Pair:
    """The numbers of one request; each argument is (baseline, candidate). Raises ValueError for other lengths."""
    kl, flips = divergences(*scored)
    if not kl:
        raise ValueError("no position")
    a, b = ([one.token for one in side] for side in continued)
    shorter = min(len(a), len(b))
    first = next((at for at in range(shorter) if a[at] != b[at]), None if len(a) == len(b) else shorter)
    return Pair(
        request=request,
        positions=len(kl),
        logprobs_k=logprobs_k,
        kl_nats=sum(kl) / len(kl),
        kl_max_nats=max(kl),
        flips_ratio=sum(flips) / len(flips),
        continued_tokens=shorter,
        first_divergence=first,
    )


class Judge:
    """Takes pairs one by one; the verdict stands once it is reached. error: for fail and for pass each."""

    def __init__(self, limits: Limits, error: float = ERROR) -> None:
        for name, limit in (("--max-kl", limits.kl), ("--max-flips", limits.flips)):
            if not 0.0 < limit < 1.0:
                raise KVCatchError(f"{name} {limit}: a mirror needs a limit above 0 and below 1.")
        self._limits, self._error = limits, error
        self.verdict = "inconclusive"
        self.requests = 0
        self.decided_at: int | None = None
        self._changed = self._continued = 0
        self._sums = [0.0, 0.0]
        self._bounds = (limits.kl, limits.flips)
        self._above = [Bet(bound, above=True) for bound in self._bounds]
        self._below = [Bet(bound, above=False) for bound in self._bounds]

    def add(self, one: Pair) -> None:
        """Take one pair in. A KL above 1 nat counts as 1: that can only delay a fail."""
        self.requests += 1
        self._changed += one.first_divergence is not None
        self._continued += one.continued_tokens > 0 or one.first_divergence is not None
        for at, value in enumerate((one.kl_nats, one.flips_ratio)):
            self._sums[at] += value
            inside = min(1.0, max(0.0, value))
            self._above[at].add(inside)
            self._below[at].add(inside)
        if self.verdict == "inconclusive":
            # Two chances to fail share the error; a pass needs both numbers, so each may use all of it.
            if any(bet.decided(self._error / 2) for bet in self._above):
                self.verdict = "fail"
            elif all(bet.decided(self._error) for bet in self._below):
                self.verdict = "pass"
            if self.verdict != "inconclusive":
                self.decided_at = self.requests

    def shadow(self) -> Shadow:
        """Everything known so far."""
        checks = []
        for at, name in enumerate(("kl_mean", "top1_flips")):
            above, below = self._above[at], self._below[at]
            failed, passed = above.decided(self._error / 2), below.decided(self._error)
            checks.append(
                ShadowCheck(
                    name=name,
                    value=self._sums[at] / max(1, self.requests),
                    limit=self._bounds[at],
                    fail_evidence=_readable(above.log_most),
                    pass_evidence=_readable(below.log_most),
                    verdict="fail" if failed else "pass" if passed else "inconclusive",
                )
            )
        return Shadow(
            verdict=self.verdict,
            requests=self.requests,
            decided_at=self.decided_at,
            continuations_changed=self._changed,
            continuations=self._continued,
            checks=tuple(checks),
            error=self._error,
            limits=self._limits,
        )


def judge_pairs(pairs: Iterable[Pair], limits: Limits) -> Shadow:
    """The verdict on a whole file. Raises KVCatchError for limits that cannot be tested."""
    judge = Judge(limits)
    for one in pairs:
        judge.add(one)
    return judge.shadow()


def read_pairs(path: str) -> list[Pair]:
    """The pairs of a mirror's file, in order. Raises KVCatchError for another or a damaged file, and without a pair."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except OSError as error:
        raise KVCatchError(
            f"cannot read {path}: {error.strerror}.", "Give pairs.jsonl of a mirror."
        ) from None
    try:
        head = msgspec.json.decode(lines[0], type=PairsHead)
        # What follows the last line end was still being written.
        found = [msgspec.json.decode(line, type=Pair) for line in lines[1:-1] if line]
    except msgspec.MsgspecError:
        raise KVCatchError(f"{path}: not the pairs of a mirror.", "Give its pairs.jsonl.") from None
    if head.kind != KIND or head.schema_version != SCHEMA_VERSION:
        raise KVCatchError(f"{path}: not pairs that this kvcatch reads.", "Give pairs.jsonl of a mirror.")
    if not found:
        raise KVCatchError(f"{path}: no request was compared yet.", "Wait, or raise --mirror-share.")
    return found


def _readable(log_stake: float) -> float:
    """A stake as a number that JSON and people can take: at most a million."""
    return round(min(1e6, math.exp(min(log_stake, 20.0))), 3)

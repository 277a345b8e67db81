"""The baseline file of CI: what an accepted candidate measured, so that later runs are judged against it."""

from __future__ import annotations

import json
import os

import msgspec
import numpy as np

from kvcatch.errors import KVCatchError
from kvcatch.quality.stats import ROUNDS, mcnemar
from kvcatch.quality.verdict import SIGNIFICANT, Check, Quality

SCHEMA = 1
#: a run is worse when its KL may be above this multiple of the accepted one
KL_FACTOR = 1.25
#: or when so much more of the top tokens flip
FLIPS_MORE = 0.01


class Accepted(msgspec.Struct, frozen=True):
    """One accepted run: numbers and hashes only, no text and no tokens."""

    schema: int
    key: dict[str, str]
    logprobs_k: int
    kl_by_document: dict[str, float]
    top1_flips: float
    right: list[bool]


def accepted(quality: Quality, key: dict[str, str], right: tuple[bool, ...]) -> Accepted:
    """What to keep of a run."""
    flips = quality.check("top1_flips").value
    return Accepted(SCHEMA, key, quality.logprobs_k, dict(quality.kl_by_document), flips or 0.0, list(right))


def write(path: str, run: Accepted, *, force: bool = False) -> None:
    """Write the file. Raises KVCatchError when it exists or cannot be written."""
    if os.path.exists(path) and not force:
        raise KVCatchError(f"{path} exists.", "Overwrite it with --force.")
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(msgspec.to_builtins(run), file, indent=1)
            file.write("\n")
    except OSError as error:
        raise KVCatchError(f"cannot write {path}: {error.strerror}.", "Name another file.") from None


def read(path: str) -> Accepted:
    """Read the file. Raises KVCatchError when it is none of ours."""
    try:
        with open(path, "rb") as file:
            run = msgspec.json.decode(file.read(), type=Accepted)
    except OSError as error:
        raise KVCatchError(
            f"cannot read {path}: {error.strerror}.", "Write one with --write-baseline."
        ) from None
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise KVCatchError(
            f"{path}: no baseline file ({error}).", "Write one with --write-baseline."
        ) from None
    if run.schema != SCHEMA:
        raise KVCatchError(f"{path}: schema {run.schema}, this release reads {SCHEMA}.", "Write it anew.")
    return run


def against(run: Accepted, now: Accepted, path: str, seed: int = 0) -> list[Check]:
    """Relative checks, in place of the assumed limits. Raises KVCatchError when the runs do not measure the same."""
    different = sorted(
        name for name in run.key.keys() | now.key.keys() if run.key.get(name) != now.key.get(name)
    )
    if run.logprobs_k != now.logprobs_k or run.kl_by_document.keys() != now.kl_by_document.keys():
        different.append("documents or logprobs_k")
    if different:
        raise KVCatchError(
            f"{path} was measured with another {', '.join(different)}.",
            "Write a new one with --write-baseline after looking at the verdict without it.",
        )
    names = sorted(run.kl_by_document)
    before = np.array([run.kl_by_document[name] for name in names])
    after = np.array([now.kl_by_document[name] for name in names])
    low, value, high = _ratio(before, after, seed)
    lost = sum(a and not b for a, b in zip(run.right, now.right, strict=True))
    won = sum(b and not a for a, b in zip(run.right, now.right, strict=True))
    p = mcnemar(lost, won)
    more = now.top1_flips - run.top1_flips
    return [
        Check(
            name="kl_against_accepted", value=value, low=low, high=high, limit=KL_FACTOR, unit="ratio",
            verdict="fail" if high > KL_FACTOR else "pass", note="paired by document",
        ),
        Check(
            name="flips_against_accepted", value=more, limit=FLIPS_MORE, unit="ratio",
            verdict="fail" if more > FLIPS_MORE else "pass",
        ),
        Check(
            name="answers_against_accepted", value=p, limit=SIGNIFICANT, unit="p",
            verdict="fail" if p < SIGNIFICANT and lost > won else "pass", note=f"{lost} lost, {won} won",
        ),
    ]  # fmt: skip


def _ratio(before: np.ndarray, after: np.ndarray, seed: int) -> tuple[float, float, float]:
    """(low, value, high) of the ratio of mean KL, documents drawn in pairs."""
    if not before.sum():
        ratio = 1.0 if not after.sum() else float("inf")
        return ratio, ratio, ratio
    picks = np.random.default_rng(seed).integers(0, len(before), (ROUNDS, len(before)))
    under = before[picks].sum(axis=1)
    ratios = after[picks].sum(axis=1)[under > 0] / under[under > 0]
    value = float(after.sum() / before.sum())
    low, high = np.quantile(ratios, [0.025, 0.975])
    return min(value, float(low)), value, max(value, float(high))

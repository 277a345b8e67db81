"""From a measured regression to the layers behind it: the emulator is run on what the engines answered."""

from __future__ import annotations

import os

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.quality.emulate import Emulator
from kvcatch.quality.endpoint import Endpoint, Position
from kvcatch.quality.locate import Location, locate
from kvcatch.quality.measure import Progress
from kvcatch.quality.run import Outcome
from kvcatch.quality.serving import Side, option, serving

#: what the emulator is run on: so many documents and tokens of each
DOCUMENTS = 2
TOKENS = 256
#: vLLM's names of the formats that the emulator must reproduce first
FP8 = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}


def blame(outcome: Outcome, baseline: Side, candidate: Side, say: Progress) -> Location:
    """Locate the loss of a regression whose candidate stores fp8; starts the other fp8 format once, to be checked by both.

    Raises KVCatchError when the model is not at hand or the candidate's format cannot be emulated.
    """
    form = FP8.get(option(candidate.command, "--kv-cache-dtype") or "")
    if form is None:
        raise KVCatchError(
            "--locate needs a candidate with --kv-cache-dtype fp8, fp8_e4m3 or fp8_e5m2.",
            "Give the candidate as a command or as flags, not as a URL.",
        )
    folder = option(baseline.command, "--model") or outcome.baseline.root
    if not os.path.isdir(folder):
        raise KVCatchError(
            f"--locate needs the model's folder on this machine; {folder} is none.", "Give a local path."
        )
    ids = [list(row[:TOKENS]) for row in outcome.work.ids[:DOCUMENTS]]
    other = {"e4m3": "fp8_e5m2", "e5m2": "fp8_e4m3"}[form]
    say(f"the engine with {other}, to check the emulator by")
    with serving(_with_dtype(candidate, other)) as url:
        endpoint = Endpoint(url)
        extra = [endpoint.score(row) for row in ids]
        endpoint.close()
    say("loading the model into transformers")
    emulator = Emulator(folder, option(baseline.command, "--dtype") or _dtype(folder))
    return locate(
        emulator,
        ids,
        _head(outcome.baseline.scored, ids),
        {FP8[other]: extra, form: _head(outcome.candidate.scored, ids)},
        min(outcome.baseline.k, outcome.candidate.k),
        say,
    )


def _head(scored: tuple[tuple[Position, ...], ...], ids: list[list[int]]) -> list[list[Position]]:
    """The answers to the first tokens: later ones cannot change them."""
    return [list(rows[: len(row) - 1]) for rows, row in zip(scored, ids, strict=False)]


def _with_dtype(where: Side, dtype: str) -> Side:
    words = list(where.command)
    for at, word in enumerate(words):
        if word == "--kv-cache-dtype":
            words[at + 1] = dtype
        elif word.startswith("--kv-cache-dtype="):
            words[at] = f"--kv-cache-dtype={dtype}"
    return Side(None, tuple(words))


def _dtype(folder: str) -> str:
    """The type that an engine takes by itself: that of the checkpoint."""
    try:
        with open(os.path.join(folder, "config.json"), "rb") as file:
            config = msgspec.json.decode(file.read(), type=dict)
    except (OSError, msgspec.DecodeError):
        return "float32"
    name = str(config.get("torch_dtype") or config.get("dtype") or "float32")
    return name if name in ("bfloat16", "float16", "float32") else "float32"

"""What differs between vLLM releases: defaults, arithmetic and the wording of the start-up log.

Every switch names the release it was read from; between two read releases the later behaviour is assumed.
"""

from __future__ import annotations

import re

import msgspec

from kvcatch.errors import KVCatchError
from kvcatch.planner.lengths import Lengths, lengths
from kvcatch.planner.specs import EngineFlags, ModelShape
from kvcatch.units import GIB

#: The release assumed when none is named.
LATEST = (0, 33)
_NUMBER = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
_DATE = re.compile(r"(?:([A-Z][a-z]{2})[a-z]* )?(20\d\d)(?:-(\d\d))?")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
#: First release whose arithmetic a nightly build of that (year, month) has.
_RELEASED = (
    ((2026, 9), (0, 31)), ((2026, 8), (0, 28)), ((2026, 7), (0, 25)), ((2026, 6), (0, 23)), ((2026, 5), (0, 21)),
    ((2026, 4), (0, 19)), ((2026, 3), (0, 17)), ((2026, 2), (0, 15)), ((2026, 1), (0, 14)), ((2025, 12), (0, 12)),
    ((2025, 10), (0, 11)), ((2025, 7), (0, 10)), ((2025, 5), (0, 9)), ((2025, 3), (0, 8)), ((2025, 1), (0, 7)),
)  # fmt: skip


class Era(msgspec.Struct, frozen=True):
    """The rules of one release."""

    version: tuple[int, int]
    #: log lines: blocks (before 0.8), tokens (blocks // groups x block size), derived (int(concurrency x length))
    token_line: str
    #: one joined sentence since 0.31 (separate lines in 0.24)
    joined_line: bool
    #: hybrid KV cache manager: sliding and chunked layers get their own groups (since 0.10)
    hybrid_groups: bool
    #: layers of the larger class set the group size when it is less than this much larger
    group_slack: float
    #: in-flight batches that hold recycled blocks (F4: since 0.26 with async scheduling)
    in_flight: bool
    #: the start-up check keeps the null block back (read in 0.31)
    reserves_null_block: bool
    #: the check adds up single layers, of the whole model on every worker (0.12; PP bug of 0.14-0.16)
    check_sums_layers: bool
    #: pages that do not divide the largest are padded (read in 0.24)
    pads_pages: bool
    #: prefix caching of recurrent models is on by default, state kept at block ends (off in 0.24, on in 0.31)
    aligned_states: bool
    #: cross-attention reserves a step of encoder input, not the encoder's length (0.12 no, 0.24 yes)
    encoder_by_step: bool
    #: GiB printed as 24.0 instead of 24.00 (read in 0.24; logs of 0.15 have it)
    rounded_gib: bool


def parse_version(text: str | None) -> tuple[int, int]:
    """(major, minor) of a vLLM version; development builds and unknown text count as the newest.

    Raises KVCatchError when the text holds no version at all.
    """
    if text is None or text in ("", "latest"):
        return LATEST
    match = _NUMBER.search(text)
    if match is None:
        return _by_date(text)
    found = (int(match.group(1)), int(match.group(2)))
    # setuptools-scm names development builds 0.1.devN: they are newer than any release of their time.
    return LATEST if found == (0, 1) and "dev" in text else found


def _by_date(text: str) -> tuple[int, int]:
    """The release line of a nightly build named by its month ("nightly Jan 2026"), or by its year alone."""
    match = _DATE.search(text)
    if match is None:
        raise KVCatchError(f"not a vLLM version: {text!r}.", "Write for example 0.19.0 or 0.32.0.")
    month = 12
    if match.group(1) in _MONTHS:
        month = _MONTHS.index(match.group(1)) + 1
    elif match.group(3):
        month = int(match.group(3))
    day = (int(match.group(2)), month)
    return next((release for date, release in _RELEASED if date <= day), (0, 6))


def era_of(text: str | None) -> Era:
    """The rules of a vLLM version."""
    version = parse_version(text)
    if version < (0, 8):
        token_line = "blocks"
    elif version < (0, 21):
        token_line = "tokens"
    else:
        token_line = "derived"
    return Era(
        version=version,
        token_line=token_line,
        joined_line=version >= (0, 31),
        hybrid_groups=version >= (0, 10),
        group_slack=1.5 if version >= (0, 24) else 1.25,
        in_flight=version >= (0, 26),
        reserves_null_block=version >= (0, 31),
        check_sums_layers=version < (0, 17),
        pads_pages=version >= (0, 24),
        aligned_states=version >= (0, 31),
        encoder_by_step=version >= (0, 13),
        rounded_gib=version >= (0, 14),
    )


class Limits(msgspec.Struct, frozen=True):
    """Resolved scheduler limits."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    in_flight_tokens: int
    enable_prefix_caching: bool


def resolve_limits(shape: ModelShape, flags: EngineFlags, gpu_memory: int | None) -> Limits:
    """Fill in what the user left out, as ``EngineArgs.get_batch_defaults`` of 0.32 does for ``vllm serve``.

    ``gpu_memory``: bytes of one card, None when unknown (then the defaults of large cards are not assumed).
    """
    era = era_of(flags.engine_version)
    world = flags.tensor_parallel_size * flags.pipeline_parallel_size
    length = max_model_len(shape, flags)
    large = (gpu_memory or 0) >= 70 * GIB and "a100" not in (flags.gpu or "").lower()
    if flags.device == "cpu":
        seqs, batched = 128 * world, 2048 * world
    elif era.version < (0, 8):
        seqs, batched = 256, max(length, 2048)
    elif (gpu_memory or 0) >= 160 * GIB and era.version >= (0, 31):
        seqs, batched = 1024, 16384
    elif large:
        seqs, batched = 1024 if era.version >= (0, 9) else 256, 8192
    else:
        seqs, batched = 256, 2048
    if flags.enable_chunked_prefill is False:
        batched = max(length, batched)
    asked_seqs, asked_batched = flags.max_num_seqs, flags.max_num_batched_tokens
    seqs = asked_seqs if asked_seqs is not None else seqs
    if asked_batched is None:
        batched = min(seqs * length, batched)
    else:
        batched = asked_batched
    if asked_seqs is None:
        seqs = min(seqs, batched)
    cached = flags.enable_prefix_caching
    if cached is None:
        cached = _caches_by_default(shape, era)
    return Limits(
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        in_flight_tokens=batched * concurrent_batches(flags),
        enable_prefix_caching=cached,
    )


def _caches_by_default(shape: ModelShape, era: Era) -> bool:
    """Whether prefix caching is on unless switched off (``ModelConfig.is_prefix_caching_supported``)."""
    kinds = {layer.kind for layer in shape.layers}
    attention_free = shape.model_type in ("mamba", "mamba2", "falcon_mamba") or kinds <= {"none", "encoder"}
    if era.version < (0, 8) or attention_free or "cross" in kinds:
        return False
    return era.aligned_states or "mamba" not in kinds


def max_model_len(shape: ModelShape, flags: EngineFlags) -> int:
    """``--max-model-len``, or what the config states. Raises KVCatchError when neither does."""
    if flags.max_model_len is not None and flags.max_model_len > 0:
        return flags.max_model_len
    start = lengths_of(shape, flags).start
    if start is None:
        raise KVCatchError(
            f"{shape.name}: the config states no maximum length (max_position_embeddings).",
            "Give it with --max-model-len.",
        )
    return start


def lengths_of(shape: ModelShape, flags: EngineFlags) -> Lengths:
    """What this release makes of the length that the config states."""
    stated, version = shape.max_position_embeddings, parse_version(flags.engine_version)
    return lengths(stated, shape.text, shape.model_type, version)


def concurrent_batches(flags: EngineFlags) -> int:
    """Batches whose blocks are not yet settled (``VllmConfig.max_concurrent_batches`` of 0.32).

    Asynchronous scheduling is the default on GPUs since 0.15 and needs two; the CPU backend runs without.
    """
    pipeline = flags.pipeline_parallel_size
    if not era_of(flags.engine_version).in_flight:
        return 1
    asynchronous = flags.async_scheduling
    if asynchronous is None:
        asynchronous = flags.device != "cpu" and not (
            flags.speculative_method
            and flags.speculative_method not in ("mtp", "eagle", "eagle3", "draft_model")
        )
    if asynchronous:
        return pipeline + 1 if _runner_v2(flags) or pipeline == 1 else pipeline
    return pipeline


def _runner_v2(flags: EngineFlags) -> bool:
    """Whether the second model runner, which overlaps pipeline stages too, is in use (default on GPUs in 0.32)."""
    return flags.device != "cpu" and parse_version(flags.engine_version) >= (0, 31)

"""The record layout shared by the in-engine writer and every reader. Standard library only.

A ring file is one header page, a JSON information area, and a ring of little-endian 32-bit words::

    0        4096              4096 + INFO_BYTES
    | header | resolved config | segment 0 | segment 1 | ...

A record is ``[kind | aux << 8 | length << 16] [payload words ...]`` where ``length`` counts all words of the
record. Records never cross a segment border; the rest of a segment is filled with one PAD record, and each
segment starts with a SEGMENT record that carries clocks and running totals, so that a reader can start at any
segment. After each SEGMENT the writer describes every live request anew (REFRESH), a few per step.
64-bit values are two words, low word first. Times are nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

MAGIC = b"KVRING01"
RING_VERSION = 1
HEADER_BYTES = 4096
INFO_BYTES = 256 * 1024
SEGMENT_WORDS = 1 << 16
#: longest record; lists of ids that are longer are written as several records
MAX_RECORD_WORDS = 1 << 14

#: magic, version, header bytes, info length, segment words, ring words, start wall ns, start monotonic ns, pid, rank kind
HEADER = struct.Struct("<8sIIIIQQQII")
HEAD_OFFSET = 64  # u64: words written since the start; updated after the words themselves
LAST_MONO_OFFSET = 72  # u64: monotonic ns of the last write
LAST_STEP_OFFSET = 80  # u64: number of the last recorded step
HOOK_ERRORS_OFFSET = 88  # u32
STATE_OFFSET = 92  # u32: see STATES
DROPPED_OFFSET = 96  # u64: records the writer had to drop

STATES = ("empty", "recording", "closed", "disabled")

# Kinds of records: payload after the header word.
PAD = 0
SEGMENT = 1  # segment number(2) mono(2) wall(2) then totals, two words each, in the order of TOTALS
ARRIVE = (
    2  # rid arrival_mono(2) added_mono(2) prompt_tokens max_tokens priority num_hashes salt(2) lora(2) text
)
REFRESH = 3  # rid arrival_mono(2) added_mono(2) sched_mono(2) first_mono(2) prompt max_tokens priority state computed outputs
#              queried hit preemptions recomputed text; clears the request's blocks, BLOCKS records follow
REFRESHED = 4  # segment number, low word: every request that lived when the segment began has been described
NEW = 5  # rid hit_tokens queried_tokens: first scheduled
RESUME = 6  # rid hit_tokens: scheduled again after a preemption or a pause; clears the request's blocks
BLOCKS = 7  # rid ids...; aux = KV cache group: ids appended to the request's list
DROP = 8  # rid start count; aux = group: list entries [start, start + count) became the null block
REPLACE = 9  # rid ids...; aux = group: the whole list, for groups that reorder (state caches)
TOKENS = (
    10  # (rid, tokens | DONE)...: scheduled tokens of requests in prefill, and of decodes that did not get 1
)
COMPUTED = 11  # (rid, computed)...: absolute computed tokens after rejected drafts
SCHEDULED = 12  # total_tokens num_requests start_mono(2): end of one schedule(); running decodes not in TOKENS got 1 token each
PREEMPT = 13  # rid computed_tokens held_blocks freed_blocks cause beneficiary_rid mono(2)
FIRST = 14  # rid mono(2): has its first output token
FINISH = 15  # rid reason output_tokens computed_tokens preemptions recomputed_tokens mono(2)
EVICT = 16  # ids...: hashed blocks taken for new data
RESET = 17  # prefix cache cleared
CHAIN = 18  # rid parent_node start_index hashes(2 each)...: hashes not seen before in this epoch
EPOCH = 19  # the writer forgot which hashes it has seen; node numbers start again at 1
SAMPLE = 20  # one row in the order of ROW
DECISION = 21  # rid text: what the scheduler plugin decided about a request, and why
RANK = 22  # one row of a worker rank in the order of RANK_ROW
NOTE = 23  # text: something a reader should tell the user

KIND_NAMES = {
    PAD: "pad", SEGMENT: "segment", ARRIVE: "arrive", REFRESH: "refresh", REFRESHED: "refreshed", NEW: "new",
    RESUME: "resume", BLOCKS: "blocks", DROP: "drop", REPLACE: "replace", TOKENS: "tokens", COMPUTED: "computed",
    SCHEDULED: "scheduled", PREEMPT: "preempt", FIRST: "first_token", FINISH: "finish", EVICT: "evict",
    RESET: "reset", CHAIN: "chain", EPOCH: "epoch", SAMPLE: "sample", DECISION: "decision", RANK: "rank",
    NOTE: "note",
}  # fmt: skip

DONE = 1 << 31  # flag in TOKENS: with these tokens the prefill is complete
UNKNOWN = 0xFFFFFFFF

TOTALS = (
    "steps", "arrived", "finished", "preemptions", "resumes", "recomputed_tokens", "queried_tokens", "hit_tokens",
    "evicted_blocks", "prefill_tokens", "decode_tokens", "output_tokens",
)  # fmt: skip

#: words of a SAMPLE row. ``*_max`` = maximum since the previous row; counts are sums since the previous row.
ROW = (
    "step", "mono_lo", "mono_hi", "schedule_ns", "step_ns", "interval_ns", "running", "waiting", "deferred", "held",
    "active_blocks", "cached_blocks", "free_blocks", "held_tokens", "prefill_tokens", "decode_tokens",
    "queried_tokens", "hit_tokens", "evicted_blocks", "preemptions", "recomputed_tokens", "bound",
    "active_max", "running_max", "waiting_max", "step_max_ns", "steps", "in_flight",
    "completed",
)  # fmt: skip

RANK_ROW = (
    "mono_lo", "mono_hi", "steps", "step_ns", "step_max_ns", "used_kib", "peak_kib", "total_kib", "torch_kib",
    "torch_peak_kib", "reserved_kib", "free_kib",
)  # fmt: skip

CAUSES = ("unknown", "blocks", "cache_reset")
REQUEST_STATES = ("waiting", "running", "preempted", "decoding")
FINISH_REASONS = ("unknown", "stop", "length", "abort", "error", "repetition", "ignored")


def text_bytes(data: bytes) -> bytes:
    """Text in a record: the byte count as a word, then the bytes padded with zeros to whole words."""
    return len(data).to_bytes(4, "little") + data + b"\0" * (-len(data) % 4)


def segment_record(number: int, mono_ns: int, wall_ns: int, totals: Sequence[int] = ()) -> bytes:
    """The record that begins a segment."""
    words = 7 + 2 * len(totals)
    return struct.pack(f"<I{3 + len(totals)}Q", SEGMENT | words << 16, number, mono_ns, wall_ns, *totals)


def put_ids(out: bytearray, kind: int, aux: int, prefix: tuple[int, ...], ids: list[int]) -> None:
    """Append one or more records of ``kind`` with ``prefix`` and a list that may be longer than a record."""
    limit = MAX_RECORD_WORDS - 8
    for start in range(0, len(ids), limit):
        part = ids[start : start + limit]
        out += array("I", (kind | aux << 8 | (1 + len(prefix) + len(part)) << 16, *prefix))
        out += array("I", part)

"""Where prefix hits are lost: every missed prompt token gets one cause.

A prompt of Q tokens that shares its first L tokens with an earlier request, and of which H were found in the cache,
falls into parts: [0, H) hit; [H, A) shared in whole blocks but not there any more or not there yet; [A, L) shared but
below a block border (only whole blocks can be reused, and the last token is always computed); [L, Q) not shared. So
the parts add up to the missed tokens by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcatch.analysis.prefix_reuse import NEVER, grouped, hits_at, needed_room
from kvcatch.errors import KVCatchError
from kvcatch.results import Result
from kvcatch.workload import Workload

Ints = npt.NDArray[np.int64]

#: cause -> what it means
CAUSES: dict[str, str] = {
    "first_seen": "content that no earlier request had",
    "diverged": "content that earlier requests had too, behind something that changed",
    "misaligned": "shared, but below a block border or the last token",
    "evicted": "was in the cache and had been evicted",
    "order": "evicted, but kept if the same requests arrive grouped",
    "in_flight": "was still being computed for a concurrent request",
    "salt": "shared, but isolated by cache salt, LoRA or media keys",
    "other_engine": "another engine had it",
    "caching_off": "prefix caching is off",
    "unrecorded": "the hash chain of the request was not recorded",
}


class Cause(Result, frozen=True):
    """One cause. ``up_to_tokens``: where the evidence only bounds it, the most it can be."""

    cause: str
    tokens: int
    share_ratio: float
    requests: int
    meaning: str = ""
    up_to_tokens: int | None = None


class Group(Result, frozen=True):
    """One tenant's lookups."""

    tenant: str
    queried_tokens: int
    hit_tokens: int
    missed_tokens: int
    causes: dict[str, int]


class Divergence(Result, frozen=True):
    """A place where shared prefixes end.

    block: number of the first block that differs; token: where it differs, exact or the start of that block.
    before, after: the differing characters of the earlier and the later request, when a text was given.
    """

    block: int
    token: int
    requests: int
    lost_tokens: int
    nearest: str | None = None
    example: str | None = None
    before: str | None = None
    after: str | None = None
    what: str | None = None
    where: str | None = None


class Gain(Result, frozen=True):
    """Tokens that more room would have kept. num_blocks as vLLM counts, the null block included."""

    num_blocks: int
    more_blocks: int
    won_tokens: int


class Saved(Result, frozen=True):
    """What caching saved."""

    prefill_tokens: int
    blocks: int
    seconds: float | None = None


class Rewrite(Result, frozen=True):
    """A proposed change and what it wins, from running the changed requests through the same pool."""

    what: str
    hit_tokens_before: int
    hit_tokens_after: int
    won_tokens: int
    won_blocks: int
    ttft_seconds_per_request: float | None = None
    requests: int = 0
    example: str | None = None


class PrefixReport(Result, frozen=True):
    """What ``prefix --json`` prints for one target. Causes sum to ``missed_tokens``."""

    target: str
    source: str  # capture | log | bodies
    requests: int
    block_size: int
    num_blocks: int | None
    queried_tokens: int
    hit_tokens: int
    missed_tokens: int
    hit_ratio: float | None
    hits: str  # recorded | simulated
    causes: tuple[Cause, ...]
    tenants: tuple[Group, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    gains: tuple[Gain, ...] = ()
    saved: Saved | None = None
    rewrites: tuple[Rewrite, ...] = ()
    order_window_seconds: float | None = None
    seconds_per_token: float | None = None
    notes: tuple[str, ...] = ()
    unit_tokens: int | None = None  # between places where a hit can end, when more than a block
    given_back_tokens: int = 0  # of a match, computed again for drafts

    def tokens(self, cause: str) -> int:
        """Tokens lost to a cause."""
        return next((row.tokens for row in self.causes if row.cause == cause), 0)


@dataclass(frozen=True, eq=False)
class Stored:
    """When each request had each of its blocks in the cache: rows sorted by block, then by place of the request.

    key: block x count + place of the request. earliest: the first step at which this or an earlier place had the
    block stored.
    """

    key: Ints
    earliest: Ints
    count: int

    @classmethod
    def build(cls, block: Ints, place: Ints, step: Ints, count: int) -> Stored:
        """From one row per request and block."""
        order = np.lexsort((place, block))
        block, place, step = block[order], place[order], step[order]
        # A running minimum within each block: shift the blocks apart, later ones lower.
        least = int(step.max(initial=0)) + 1
        shifted = np.minimum.accumulate(step - block * least) if len(step) else step
        return cls(block * count + place, shifted + block * least, count)

    def before(self, blocks: Ints, place: int) -> Ints:
        """The first step at which a request before ``place`` had each block; a huge number without one."""
        at = np.searchsorted(self.key, blocks * self.count + place) - 1
        found = (at >= 0) & (self.key[np.maximum(at, 0)] // self.count == blocks)
        return np.where(found, self.earliest[np.maximum(at, 0)], NEVER)


@dataclass(eq=False)
class Lookups:
    """Prompts in order of admission with what is known of them.

    hit: tokens found, None to simulate. engine, salt: groups that cannot share. stored, asked: of recordings, whose
    segments are blocks: when each block was there, and the step of each lookup. tail: tokens of each prompt whose
    identity is unknown (the recorded chain covers whole blocks only). unrecorded: prompts without a chain.
    unit: tokens between places where a hit can end, None for every block. given_back: tokens at the end of a match
    that are computed again (a block with EAGLE or MTP drafts).
    """

    workload: Workload
    names: Sequence[str]
    block_size: int
    usable: int | None = None
    hit: Ints | None = None
    queried: Ints | None = None
    engine: Ints | None = None
    salt: Ints | None = None
    stored: Stored | None = None
    asked: Ints | None = None
    tail: Ints | None = None
    unrecorded: npt.NDArray[np.bool_] | None = None
    diverged: Ints | None = None
    reported: npt.NDArray[np.bool_] | None = None
    caching: bool = True
    window_seconds: float = 60.0
    seconds_per_token: float | None = None
    notes: list[str] = field(default_factory=list)
    unit: int | None = None
    given_back: int = 0

    def limit(self, unit: int | None, drafts: bool) -> None:
        """Let hits end only every ``unit`` tokens, and with drafts a block earlier. Raises KVCatchError."""
        if unit is not None and (unit < 1 or unit % self.block_size):
            raise KVCatchError(
                f"--hit-unit {unit} is no multiple of the block of {self.block_size} tokens.",
                "cache_hit_alignment_tokens on the metrics page tells it (vLLM 0.32 and newer).",
            )
        self.unit, self.given_back = unit, self.block_size if drafts else 0

    def reach(self, shared: Ints, prompt: Ints) -> Ints:
        """Tokens that can hit of prompts of these lengths when so many are shared and cached.

        The last token is always computed. With one KV group it goes off before a draft's block does; with several
        the draft's block may lie behind it.
        """
        size, unit = self.block_size, self.unit or self.block_size
        whole = shared // size * size
        if unit == size:
            whole = np.minimum(shared, prompt - 1) // size * size
        return np.maximum(0, np.minimum(prompt - 1, whole - self.given_back)) // unit * unit


@dataclass(eq=False)
class Parts:
    """Missed tokens of each request by cause."""

    hit: Ints
    by_cause: dict[str, Ints]
    shared: Ints  # L, within the own engine and salt
    room: Ints  # per block, see needed_room
    offsets: Ints
    evicted_blocks: npt.NDArray[np.bool_]


def shared_tokens(workload: Workload, group: Ints | None = None) -> Ints:
    """For each request the leading tokens that an earlier request (of the same group) had too."""
    rows = np.repeat(np.arange(len(workload)), np.diff(workload.offsets))
    ids = workload.segment_ids
    if group is not None and len(ids):
        ids = group[rows] * (int(ids.max()) + 1) + ids
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    seen = first[inverse] < workload.offsets[rows]
    # Ids name prefixes, so the seen ones of a request are its leading ones.
    result = np.zeros(len(workload), np.int64)
    np.add.at(result, rows[seen], workload.segment_tokens[seen])
    return result


def attribute(look: Lookups) -> Parts:
    """Give every missed token its cause."""
    workload, size = look.workload, look.block_size
    prompt = workload.prompt_tokens
    count = len(workload)
    group = None
    if look.engine is not None or look.salt is not None:
        engine = np.zeros(count, np.int64) if look.engine is None else look.engine
        salt = np.zeros(count, np.int64) if look.salt is None else look.salt
        group = engine * (int(salt.max(initial=0)) + 1) + salt
    own = shared_tokens(workload, group)
    any_engine = shared_tokens(workload, look.salt) if look.engine is not None else own
    anyone = shared_tokens(workload) if group is not None else own
    room, offsets = needed_room(workload, size)
    if look.hit is not None:
        hit = np.minimum(look.hit, prompt)
    elif not look.caching:
        hit = np.zeros(count, np.int64)
    elif group is None:
        hit = look.reach(hits_at(workload, size, look.usable), prompt)
    else:
        hit = look.reach(_hits_by_group(look, group), prompt)
    # What was hit was shared, if with generated text that the prompts do not show.
    own, any_engine, anyone = (np.maximum(part, hit) for part in (own, any_engine, anyone))
    whole, whole_any, whole_all = (
        np.maximum(hit, look.reach(part, prompt)) for part in (own, any_engine, anyone)
    )
    whole_any = np.maximum(whole, whole_any)
    whole_all = np.maximum(whole_any, whole_all)
    ends = np.minimum(np.maximum(anyone, whole_all), prompt)
    by_cause = {name: np.zeros(count, np.int64) for name in CAUSES}
    by_cause["other_engine"] = whole_any - whole
    by_cause["salt"] = whole_all - whole_any
    by_cause["misaligned"] = ends - whole_all
    rest = prompt - ends
    if look.diverged is not None:
        by_cause["diverged"] = np.minimum(look.diverged, rest)
    by_cause["first_seen"] = rest - by_cause["diverged"]
    evicted_blocks = np.zeros(len(room), bool)
    _lost_blocks(look, hit, whole, by_cause, room, offsets, evicted_blocks)
    if not look.caching:
        for name in CAUSES:
            by_cause[name] = np.zeros(count, np.int64)
        by_cause["caching_off"] = prompt - hit
    elif look.unrecorded is not None:
        for name in CAUSES:
            by_cause[name] = np.where(look.unrecorded, 0, by_cause[name])
        by_cause["unrecorded"] = np.where(look.unrecorded, prompt - hit, 0)
        evicted_blocks &= ~np.repeat(look.unrecorded, np.diff(offsets))
    if look.reported is not None:
        hit = np.where(look.reported, hit, 0)
        by_cause = {name: np.where(look.reported, tokens, 0) for name, tokens in by_cause.items()}
        evicted_blocks &= np.repeat(look.reported, np.diff(offsets))
    return Parts(hit, by_cause, own, room, offsets, evicted_blocks)


def _lost_blocks(
    look: Lookups, hit: Ints, whole: Ints, by_cause: dict[str, Ints], room: Ints, offsets: Ints,
    evicted_blocks: npt.NDArray[np.bool_],
) -> None:  # fmt: skip
    """Shared whole blocks that were not hit: in flight, lost to the order, or evicted."""
    size, workload = look.block_size, look.workload
    losers = np.flatnonzero(whole > hit)
    if not len(losers):
        return
    better: Ints | None = None
    if look.usable is not None and look.window_seconds > 0:
        order = grouped(workload, size, look.window_seconds)
        better = hits_at(workload, size, look.usable, order)
    for row in losers:
        start, stop = int(hit[row]) // size, int(whole[row]) // size
        blocks = np.arange(start, stop)
        kept_grouped = np.zeros(len(blocks), bool)
        if better is not None:
            kept_grouped = (blocks + 1) * size <= better[row]
        flying = np.zeros(len(blocks), bool)
        if look.stored is not None and look.asked is not None:
            names = workload.segment_ids[workload.offsets[row] + blocks]
            flying = look.stored.before(names, int(row)) > look.asked[row]
        by_cause["in_flight"][row] = size * int(flying.sum())
        by_cause["order"][row] = size * int((kept_grouped & ~flying).sum())
        gone = ~flying & ~kept_grouped
        by_cause["evicted"][row] = size * int(gone.sum())
        evicted_blocks[offsets[row] + blocks[~flying]] = True


def _hits_by_group(look: Lookups, group: Ints) -> Ints:
    """Simulated hits where engines have a pool each and salts share none."""
    hit = np.zeros(len(look.workload), np.int64)
    engines = np.zeros(len(group), np.int64) if look.engine is None else look.engine
    for engine in np.unique(engines):
        rows = np.flatnonzero(engines == engine)
        part = take(look.workload, rows, None if look.salt is None else look.salt[rows])
        hit[rows] = hits_at(part, look.block_size, look.usable)
    return hit


def take(workload: Workload, rows: Ints, salt: Ints | None = None) -> Workload:
    """The workload of some requests; with ``salt`` equal prefixes under different salts are different."""
    from dataclasses import replace

    lengths = np.diff(workload.offsets)[rows]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    places = np.repeat(workload.offsets[rows] - offsets[:-1], lengths) + np.arange(int(offsets[-1]))
    ids = workload.segment_ids[places]
    if salt is not None and len(ids):
        ids = np.unique(np.repeat(salt, lengths) * (int(ids.max()) + 1) + ids, return_inverse=True)[1]
    return replace(
        workload,
        arrival_seconds=workload.arrival_seconds[rows],
        prompt_tokens=workload.prompt_tokens[rows],
        output_tokens=workload.output_tokens[rows],
        offsets=offsets,
        segment_ids=ids,
        segment_tokens=workload.segment_tokens[places],
        content_ids=None,
        tenant=None if workload.tenant is None else workload.tenant[rows],
    )


def explain(look: Lookups, target: str, source: str) -> tuple[PrefixReport, Parts]:
    """The report of these lookups, and the parts of each request behind it."""
    parts = attribute(look)
    size = look.block_size
    shown = np.ones(len(look.workload), bool) if look.reported is None else look.reported
    queried, hit = int(look.workload.prompt_tokens[shown].sum()), int(parts.hit.sum())
    missed = queried - hit
    bound = None
    if look.tail is not None:
        # Recorded chains name whole blocks: up to a block of what follows the shared ones may be shared too.
        rest = parts.by_cause["first_seen"] + parts.by_cause["diverged"]
        bound = int(parts.by_cause["misaligned"].sum() + np.minimum(rest, size - 1).sum())
    causes = tuple(
        Cause(
            cause=name, tokens=int(tokens.sum()), share_ratio=float(tokens.sum()) / missed if missed else 0.0,
            requests=int((tokens > 0).sum()), meaning=CAUSES[name],
            up_to_tokens=bound if name == "misaligned" else None,
        )
        for name, tokens in parts.by_cause.items()
        if tokens.any() or (name == "misaligned" and bound)
    )  # fmt: skip
    report = PrefixReport(
        target=target,
        source=source,
        requests=int(shown.sum()),
        block_size=size,
        num_blocks=None if look.usable is None else look.usable + 1,
        queried_tokens=queried,
        hit_tokens=hit,
        missed_tokens=missed,
        hit_ratio=hit / queried if queried else None,
        hits="recorded" if look.hit is not None else "simulated",
        causes=tuple(sorted(causes, key=lambda row: -row.tokens)),
        tenants=_by_tenant(look.workload, parts, shown),
        divergences=_divergences(look, parts),
        gains=_gains(look, parts),
        saved=Saved(
            prefill_tokens=hit, blocks=hit // size,
            seconds=hit * look.seconds_per_token if look.seconds_per_token is not None else None,
        ),
        order_window_seconds=look.window_seconds if look.usable is not None else None,
        seconds_per_token=look.seconds_per_token,
        notes=tuple(look.notes),
        unit_tokens=look.unit if look.unit != size else None,
        given_back_tokens=look.given_back,
    )  # fmt: skip
    return report, parts


def _by_tenant(workload: Workload, parts: Parts, shown: npt.NDArray[np.bool_]) -> tuple[Group, ...]:
    if len(workload.tenants) < 2:
        return ()
    groups = []
    for number, tenant in enumerate(workload.tenants):
        mine = (workload.tenant_index == number) & shown
        if not mine.any():
            continue
        queried, hit = int(workload.prompt_tokens[mine].sum()), int(parts.hit[mine].sum())
        causes = {
            name: int(tokens[mine].sum()) for name, tokens in parts.by_cause.items() if tokens[mine].any()
        }
        groups.append(
            Group(
                tenant=tenant or "-",
                queried_tokens=queried,
                hit_tokens=hit,
                missed_tokens=queried - hit,
                causes=causes,
            )
        )
    return tuple(sorted(groups, key=lambda group: -group.missed_tokens))


def _divergences(look: Lookups, parts: Parts, most: int = 8) -> tuple[Divergence, ...]:
    """Where shared heads end, by block: requests that part there and the unshared tokens behind."""
    size = look.block_size
    lost = parts.by_cause["first_seen"] + parts.by_cause["diverged"]
    parting = np.flatnonzero((lost > 0) & (parts.shared > 0))
    if not len(parting):
        return ()
    view_rows = look.workload.offsets[parting] + _leading(look.workload, parts.shared)[parting]
    # The segment before the parting names the prefix that is shared.
    prefix = look.workload.segment_ids[np.maximum(view_rows - 1, 0)]
    result: list[Divergence] = []
    for identity in np.unique(prefix):
        rows = parting[prefix == identity]
        token = int(parts.shared[rows[-1]])
        users = np.unique(
            np.searchsorted(look.workload.offsets, np.flatnonzero(look.workload.segment_ids == identity), side="right") - 1
        ) if len(result) < 64 else np.zeros(0, np.int64)  # fmt: skip
        earlier = users[users < rows[-1]]
        result.append(
            Divergence(
                block=token // size, token=token, requests=len(rows), lost_tokens=int(lost[rows].sum()),
                nearest=look.names[int(earlier[-1])] if len(earlier) else None, example=look.names[int(rows[-1])],
            )
        )  # fmt: skip
    return tuple(sorted(result, key=lambda row: -row.lost_tokens)[:most])


def _leading(workload: Workload, shared: Ints) -> Ints:
    """Segments that make up the shared tokens of each request."""
    ends = np.cumsum(workload.segment_tokens)
    starts = np.concatenate([[0], ends])[workload.offsets[:-1]]
    return np.searchsorted(ends, starts + shared, side="right") - workload.offsets[:-1]


def _gains(look: Lookups, parts: Parts) -> tuple[Gain, ...]:
    """Room against evicted tokens won back: at a quarter, half, 90 % and all of them."""
    if look.usable is None:
        return ()
    rooms = np.sort(parts.room[parts.evicted_blocks])
    rooms = rooms[(rooms != NEVER) & (rooms > look.usable)]
    if not len(rooms):
        return ()
    gains = []
    for share in (0.25, 0.5, 0.9, 1.0):
        room = int(rooms[max(0, int(np.ceil(share * len(rooms))) - 1)])
        won = int((rooms <= room).sum()) * look.block_size
        gains.append(Gain(num_blocks=room + 1, more_blocks=room - look.usable, won_tokens=won))
    return tuple({gain.num_blocks: gain for gain in gains}.values())

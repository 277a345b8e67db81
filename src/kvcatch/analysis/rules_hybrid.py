"""Findings about models with several kinds of layers: where their prefixes can hit, and what their states hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvcatch.analysis.evidence import Case, Floats, Series
from kvcatch.analysis.layout_facts import StateCache, drafting, given_back, reuse_unit, state_cache
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Evidence, Finding
from kvcatch.sources.readings import Reading
from kvcatch.units import human_count, human_ratio

_LONG_STATE = 8192


class _Lookups(NamedTuple):
    """Tokens looked up, and the share that was found; a bound where a log gives only rates."""

    queried: float
    hit_ratio: float


# -- hits that depend on the load --------------------------------------------------------------------------


def hits_need_company(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC201: a state cache that hits nothing while requests run one at a time, and something when they meet."""
    state = state_cache(case)
    if state is None or not state.aligned or case.series is None:
        return
    parts = _by_company(case, case.series)
    if parts is None:
        return
    alone, company, again = parts
    if alone.hit_ratio > 0 or alone.queried < limits.queried_tokens or company.hit_ratio <= 0:
        return
    # The first requests after a start hit nothing anywhere.
    sure = again >= limits.queried_tokens or alone.queried >= 10 * limits.queried_tokens
    yield _company(state, alone, company, "warning" if sure else "info")


def hits_need_company_across(cases: Sequence[Case], limits: Limits) -> Iterator[Finding]:
    """The same of two runs: one that never had two requests at a time and hit nothing, one that had and hit."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        state = state_cache(case)
        if state is not None and state.aligned:
            groups.setdefault(case.info.model or "", []).append(case)
    for members in groups.values():
        runs = [(case, _whole_run(case), _most_running(case)) for case in members]
        alone = [(case, run) for case, run, most in runs if run and most <= 1 and run.hit_ratio == 0]
        company = [(case, run) for case, run, most in runs if run and most > 1 and run.hit_ratio > 0]
        if not alone or not company or alone[0][1].queried < limits.queried_tokens:
            continue
        state = state_cache(alone[0][0])
        assert state is not None
        yield _company(state, alone[0][1], company[0][1], "warning", alone[0][0].target, company[0][0].target)


def _company(state: StateCache, alone: _Lookups, company: _Lookups, severity: str, *targets: str) -> Finding:
    first, second = (*targets, None, None)[:2]
    chunk = (
        f"every {human_count(state.chunk)} tokens (max_num_batched_tokens)"
        if state.chunk
        else "at the token budget"
    )
    evidence = [
        fact(f"one request at a time: 0 of {human_count(alone.queried)} tokens looked up were found", alone.queried,
             "tokens", first),
        fact(f"several at a time: {human_ratio(company.hit_ratio)} were found", company.hit_ratio, "ratio", second),
        fact(f"a prefill chunk ends {chunk}, and a state is kept only there", state.chunk, "tokens"),
    ]  # fmt: skip
    if state.every:
        evidence.append(fact(f"on a border of {human_count(state.every)} tokens", state.every, "tokens"))
    interval = f" {state.every}" if state.every else " of one block"
    return found(
        "KVC201", severity, "prefixes hit only when several requests run: states are kept where a prefill chunk ends",
        *evidence,
        cause="A prompt that is prefilled alone in one chunk leaves a state at its own end only, where no other prompt "
        "continues; company cuts prompts into chunks, and some cuts fall into the shared part by accident.",
        remedy="Not a matter of routing: upgrade (the schedulers of vLLM 0.24 and 0.32 keep a state where prompts part), "
        f"keep states more often with --prefix-cache-retention-interval{interval} (0.31 and newer), or lower "
        "--max-num-batched-tokens.",
    )  # fmt: skip


def _by_company(case: Case, series: Series) -> tuple[_Lookups, _Lookups, float] | None:
    """Lookups while at most one request ran, while more did, and of the former those after a first hit."""
    running, waiting = series.get("running"), series.get("waiting")
    if running is None:
        return None
    lone = np.nan_to_num(running, nan=2.0) <= 1
    if waiting is not None:
        lone &= np.nan_to_num(waiting) == 0
    queried, hit, rate = series.get("queried_tokens"), series.get("hit_tokens"), series.get("hit_ratio")
    if queried is not None and hit is not None:
        queried, hit = np.nan_to_num(queried), np.nan_to_num(hit)
        if not series.steps:
            # What one page adds happened since the page before.
            lone[1:] &= lone[:-1].copy()
        hits = np.flatnonzero(hit > 0)
        later = np.arange(len(hit)) > (hits[0] if len(hits) else len(hit))
        return _sums(queried, hit, lone), _sums(queried, hit, ~lone), float(queried[lone & later].sum())
    prompts = series.get("prefill_tokens")
    if rate is None or prompts is None:
        return None
    # A log's rate is of the newest thousand requests: after the first hit it says nothing of single lines.
    rate, prompts = np.nan_to_num(rate), np.nan_to_num(prompts)
    hits = np.flatnonzero(rate > 0)
    if not len(hits):
        return None
    before = np.arange(len(rate)) < hits[0]
    alone = _Lookups(float(prompts[lone & before].sum()), float(rate[lone & before].max(initial=0.0)))
    company = _Lookups(float(prompts[~lone].sum()), float(rate[~lone].max(initial=0.0)))
    return alone, company, 0.0


def _sums(queried: Floats, hit: Floats, rows: np.ndarray) -> _Lookups:
    total = float(queried[rows].sum())
    return _Lookups(total, float(hit[rows].sum()) / total if total else 0.0)


def _whole_run(case: Case) -> _Lookups | None:
    if case.pages is not None and case.pages[1].queries is not None and case.pages[1].hits is not None:
        last = case.pages[1]
        return _Lookups(float(last.queries or 0), (last.hits or 0) / last.queries if last.queries else 0.0)
    if case.series is None:
        return None
    queried, hit = case.series.total("queried_tokens"), case.series.total("hit_tokens")
    if queried is not None and hit is not None:
        return _Lookups(queried, hit / queried if queried else 0.0)
    rate, prompts = case.series.get("hit_ratio"), case.series.total("prefill_tokens")
    return None if rate is None or prompts is None else _Lookups(prompts, float(np.nanmax(rate)))


def _most_running(case: Case) -> float:
    running = case.series.get("running") if case.series is not None else None
    return float(np.nanmax(running)) if running is not None else float(case.moment.queues.running or 0)


# -- drafts ------------------------------------------------------------------------------------------------


def draft_gives_back(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC201: with EAGLE or MTP the usual prompt loses a whole unit of reuse, because it ends just behind one."""
    method = drafting(case)
    unit, back = reuse_unit(case.info, case.log), given_back(case.info, method)
    if not unit or unit < limits.large_block_tokens or not back or case.pages is None:
        return
    last = case.pages[1]
    sizes = last.request_prompt_tokens
    if last.hits is None or not sizes or not sizes.observations or not last.queries:
        return
    prompt = sizes.total / sizes.observations
    plain, drafted = could_hit(prompt - 1, unit, back, 0), could_hit(prompt - 1, unit, back, back)
    mean = last.hits / sizes.observations
    if plain - drafted < limits.lost_share * prompt or not 0 < mean <= drafted:
        return
    # The mean of all requests at the step itself is no accident.
    yield draft_finding("warning" if mean >= 0.9 * drafted else "info", method or "", unit, back, plain, drafted, (
        fact(f"{human_count(mean)} of {human_count(prompt)} prompt tokens hit on average", mean, "tokens"),
    ))  # fmt: skip


def could_hit(shared: float, unit: int, block: int, back: int) -> int:
    """Tokens that hit of a match of ``shared``: whole blocks, less what is given back, in whole units."""
    return max(0, int(shared) // block * block - back) // unit * unit


def draft_finding(
    severity: str, method: str, unit: int, back: int, plain: int, drafted: int, more: Sequence[Evidence]
) -> Finding:
    """KVC201 of drafts: ``plain`` tokens could hit without them, ``drafted`` can with them."""
    name = "speculative decoding" if method in ("", "unknown") else method
    return found(
        "KVC201", severity, f"{name} costs a unit of {human_count(unit)} tokens of each prefix hit",
        *more,
        fact(f"floor((match - {human_count(back)}) / {human_count(unit)}) x {human_count(unit)} = {human_count(drafted)} "
             f"tokens can hit, {human_count(plain)} without drafts", drafted, "tokens"),
        cause="EAGLE and MTP compute the last matched block again, and what is left is cut down to a border that the "
        "blocks of all KV groups share.",
        remedy="Make the unit smaller (--block-size, --prefix-match-unit on hybrids), lengthen the shared part by "
        f"{human_count(back)} tokens, or drop the drafts where reuse matters more.",
    )  # fmt: skip


# -- what states hold --------------------------------------------------------------------------------------


def state_pages(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC302: states that long prompts leave behind fill a part of the pool that the printed token figure forgets."""
    state = state_cache(case)
    if state is None:
        return
    # Short requests hold the one state they run on and a block that is never full: not what is meant here.
    least = limits.long_prompt_states * state.every if state.every else 0
    measured = _held_by_states(case, least) or _beyond_tokens(case, least, limits)
    if measured is None:
        return
    share, evidence = measured
    if share < limits.state_page_share:
        return
    every = state.every
    remedy = ""
    if every:
        wider = max(_LONG_STATE, state.chunk or 0)
        wider = wider if wider > every else 2 * every
        left = share * every / wider
        remedy = (
            f"--mamba-block-size {wider} (now {every}): a state every {human_count(wider)} tokens leaves about "
            f"{human_ratio(left, 0)} to states, and prefixes hit in steps of that size. Until then count {human_ratio(share, 0)} off the printed tokens."
        )
        evidence.append(fact(f"a state every {human_count(every)} tokens", every, "tokens"))
    yield found(
        "KVC302", "warning" if pressed(case, limits) else "info", f"states of recurrent layers hold {human_ratio(share, 0)} of the used pool",
        *evidence,
        cause="Each long prompt keeps its recurrent state every so many tokens, in blocks of the same pool; the token "
        "figure printed at start counts none of them.",
        remedy=remedy,
    )  # fmt: skip


def pressed(case: Case, limits: Limits) -> bool:
    """A full pool that makes requests wait or throws them out."""
    series = case.series
    if series is None:
        pool, queues = case.moment.pool, case.moment.queues
        full = (pool.utilization_ratio or 0.0) >= limits.full_ratio
        return full and bool(queues.waiting or case.moment.preemption.preemptions)
    usage, waiting = series.get("usage"), series.get("waiting")
    if usage is None or float(np.nanmax(usage)) < limits.full_ratio:
        return False
    thrown = series.total("preemptions") or (case.log.preemptions if case.log is not None else 0)
    return bool(thrown) or (waiting is not None and bool((np.nan_to_num(waiting) > 0).any()))


def _held_by_states(case: Case, least: int) -> tuple[float, list[Evidence]] | None:
    """From the blocks of the largest requests: what their tokens do not need in the groups without a state.

    least: tokens of a request that counts.
    """
    from kvcatch.analysis.headroom import group_demand

    kept = [group.kind != "mamba" for group in case.info.groups]
    if all(kept) or not any(kept):
        return None
    blocks = states = tokens = 0
    for holder in case.holders:
        if not holder.output_tokens:
            continue  # how far it has got is unknown
        held = holder.prompt_tokens + holder.output_tokens - 1
        if held < least:
            continue
        need = sum(count for count, plain in zip(group_demand(held, case.info), kept, strict=True) if plain)
        blocks, states, tokens = blocks + holder.blocks, states + max(0, holder.blocks - need), tokens + held
    if not blocks:
        return None
    return states / blocks, [
        fact(f"{human_count(states)} of {human_count(blocks)} blocks of the largest requests hold states", states, "blocks"),
        fact(f"{human_count(tokens)} tokens are in them", tokens, "tokens"),
    ]  # fmt: skip


def _beyond_tokens(case: Case, least: int, limits: Limits) -> tuple[float, list[Evidence]] | None:
    """From the printed token figure: usage x tokens against the most tokens that can be alive at that moment.

    least: tokens that each running request must have on average.
    """
    printed = None
    if case.log is not None:
        printed = case.log.kv_tokens
    elif case.info.config.get("kv_cache_size_tokens", "").isdigit():
        printed = int(case.info.config["kv_cache_size_tokens"])
    rows = _alive(case)
    if not printed or rows is None:
        return None
    usage, alive, running = rows
    full = usage >= limits.full_ratio
    if not full.any():
        return None
    # A prompt counts when its prefill ends: of the full moments the one with most tokens counts.
    at = int(np.argmax(np.where(full, alive, -1.0)))
    slots = float(usage[at]) * printed
    if alive[at] <= 0 or alive[at] < least * running[at]:
        return None
    share = 1.0 - float(alive[at]) / slots
    return share, [
        fact(f"{human_ratio(float(usage[at]))} of a pool of {human_count(printed)} tokens is used", float(usage[at]), "ratio"),
        fact(f"at most {human_count(float(alive[at]))} tokens of prefilled requests were alive then", float(alive[at]), "tokens"),
    ]  # fmt: skip


def _alive(case: Case) -> tuple[Floats, Floats, Floats] | None:
    """Usage, the most tokens of unfinished requests and how many run (0 where unknown), row by row."""
    if case.pages is not None:
        known = [
            (row.usage_ratio, row.prompt_tokens + row.generation_tokens - sum(
                part.total for part in (row.request_prompt_tokens, row.request_generation_tokens) if part is not None
            ), row.running or 0)
            for row in case.readings
            if row.usage_ratio is not None and row.prompt_tokens is not None and row.generation_tokens is not None
            and not _prefilling(row)
        ]  # fmt: skip
        if not known:
            return None
        usage, alive, running = np.array(known, dtype=np.float64).T
        return usage, alive, running
    series = case.series
    if series is None:
        return None
    usage, prompts, outputs = (series.get(name) for name in ("usage", "prefill_tokens", "decode_tokens"))
    if usage is None or prompts is None:
        return None
    came = np.nan_to_num(prompts) + (0.0 if outputs is None else np.nan_to_num(outputs))
    usage = np.nan_to_num(usage)
    # Only what came since the pool was last empty (or since the start, which the log shows) can be in it.
    empty = np.flatnonzero(usage[: int(np.argmax(usage))] <= 0)
    total = np.cumsum(came)
    at_work = series.get("running")
    running = np.zeros(len(usage)) if at_work is None else np.nan_to_num(at_work)
    return usage, total - (total[empty[-1]] if len(empty) else 0.0), running


def _prefilling(row: Reading) -> bool:
    """Whether some running request has given no token yet: its tokens are held and not counted."""
    if row.ttft is None or row.e2e is None or row.running is None:
        return False
    return row.ttft.observations - row.e2e.observations < row.running

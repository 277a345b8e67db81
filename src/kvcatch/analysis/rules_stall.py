"""Findings about an engine that does not get on: KVC005, KVC006, KVC008."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcatch.analysis.evidence import Case, Floats, Series
from kvcatch.analysis.headroom import group_demand, least_blocks, longest_that_fits
from kvcatch.analysis.layout_facts import state_cache
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.rules_hold import named
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Evidence, Finding
from kvcatch.units import human_count, human_ratio, human_seconds


def request_never_fits(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC005: waiting > 0, running = 0, usage about 0; or a waiting request that needs more than the pool."""
    giant = _giant(case)
    longest = _longest_prompt(case)
    if giant is not None:
        key, tenant, need, prompt = giant
        yield found(
            "KVC005", "critical", f"request {key} needs {human_count(need)} blocks, the pool has {human_count(case.usable)}",
            fact(f"{human_count(prompt)} prompt tokens need {human_count(need)} blocks", need, "blocks"),
            fact("usable blocks", case.usable, "blocks"), *_by_group(case, prompt), request_id=key, tenant=tenant,
            remedy=f"Abort it, and reject such prompts: kvcatch gateway --max-input-tokens {longest or 1} --over-long reject",
        )  # fmt: skip
        return
    for waiting, seconds, when in _stuck(case, limits):
        remedy = ""
        if longest and _several_kinds(case):
            remedy = (
                f"Abort it, and reject at the gateway what cannot fit (its --max-input-tokens, below {human_count(longest)} "
                "and above the longest prompt that ran); or lower --max-model-len."
            )
        elif longest:
            remedy = (
                f"Abort it, and reject at the gateway what cannot fit: kvcatch gateway --max-input-tokens {longest} "
                "--over-long reject; or lower --max-model-len."
            )
        yield found(
            "KVC005", "critical", f"{human_count(waiting)} request{' waits' if waiting == 1 else 's wait'} while nothing runs and the pool is empty",
            fact("running requests", 0, "requests"), fact("waiting requests", waiting, "requests"),
            fact("for at least " + human_seconds(seconds) if seconds else "at this moment", seconds, "seconds"),
            *_by_group(case, longest), remedy=remedy, unix_seconds=when,
        )  # fmt: skip


def _longest_prompt(case: Case) -> int | None:
    """The longest prompt that can run and still give one token; None when the pool is unknown."""
    fits = longest_that_fits(case.info)
    if not case.info.groups:
        # A page or a log names no groups, but newer engines count them in the figure they print.
        fits = _printed_tokens(case) or fits
    return fits - 1 if fits and fits > 1 else None


def _printed_tokens(case: Case) -> int | None:
    """The pool's size in tokens as the engine gives it."""
    if case.log is not None:
        return case.log.kv_tokens
    text = str(case.info.config.get("kv_cache_size_tokens", ""))
    return int(text) if text.isdigit() and int(text) > 0 else None


def _several_kinds(case: Case) -> bool:
    """Whether groups that are not named may share the pool: the printed figure is then no limit of one prompt."""
    printed = _printed_tokens(case)
    if case.info.groups or not printed:
        return False
    # A pool of one group holds whole blocks of tokens.
    return state_cache(case) is not None or printed % (case.block_size or 16) != 0


def _by_group(case: Case, tokens: int | None) -> list[Evidence]:
    """What each KV group needs for so many tokens, where there are several: they share the pool's block numbers."""
    groups = case.info.groups
    if _several_kinds(case):
        printed = _printed_tokens(case)
        return [
            fact(f"{human_count(printed)} tokens are what the engine prints; where layers are of several kinds a long prompt "
                 "can need more block numbers than the pool has (a recording, or group_block_sizes in the log, tells)",
                 printed, "tokens")
        ]  # fmt: skip
    if len(groups) < 2 or not tokens:
        return []
    need = group_demand(tokens, case.info)
    alike: dict[tuple[int, int, str], int] = {}
    for count, group in zip(need, groups, strict=True):
        key = (count, group.block_size, group.kind)
        alike[key] = alike.get(key, 0) + 1
    parts = ", ".join(
        f"{f'{times} x ' if times > 1 else ''}{human_count(count)} of {size} tokens ({kind})"
        for (count, size, kind), times in alike.items()
    )
    return [
        fact(f"{human_count(tokens)} tokens take {human_count(sum(need))} block numbers of the one pool: {parts}",
             sum(need), "blocks"),
        fact("the limit is the number of blocks, not their memory", case.usable, "blocks"),
    ]  # fmt: skip


def _giant(case: Case) -> tuple[str, str, int, int] | None:
    """A waiting request whose prompt alone exceeds the pool."""
    table, rows = case.requests, case.rows
    fits = longest_that_fits(case.info)
    if table is not None and rows is not None and fits is not None:
        rows = rows[(table.scheduled[rows] == 0) & (table.prompt_tokens[rows] > fits)]
        for row in rows[:1]:
            name, tenant = named(case, int(table.rid[row]))
            prompt = int(table.prompt_tokens[row])
            return name, tenant or "-", least_blocks(prompt, case.info), prompt
    for view in case.moment.requests:
        waits = view.prompt_tokens and view.status == "waiting" and fits is not None
        if waits and (view.prompt_tokens or 0) > (fits or 0):
            need = least_blocks(view.prompt_tokens or 0, case.info)
            return view.request_id, view.tags.get("tenant", "-"), need, view.prompt_tokens or 0
    return None


def _stuck(case: Case, limits: Limits) -> Iterator[tuple[float, float, float | None]]:
    """(waiting, seconds, when) of an engine that is empty with a queue."""
    series = case.series
    if series is None:
        pool, queues = case.moment.pool, case.moment.queues
        used = pool.utilization_ratio
        if used is None and pool.num_blocks and pool.active_blocks is not None:
            used = pool.active_blocks / pool.num_blocks
        waiting = queues.waiting_for_blocks if queues.waiting_for_blocks is not None else queues.waiting
        if waiting and queues.running == 0 and used is not None and used <= limits.empty_ratio:
            yield float(waiting), 0.0, case.moment.unix_seconds
        return
    usage, waiting_column, running = series.get("usage"), series.get("waiting"), series.get("running")
    if usage is None or waiting_column is None or running is None:
        return
    stuck = (waiting_column > 0) & (running == 0) & (usage <= limits.empty_ratio)
    deferred = series.get("deferred")
    if deferred is not None:
        stuck &= waiting_column > np.nan_to_num(deferred)
    flow = series.get("prefill_tokens")
    if flow is not None:
        stuck &= np.nan_to_num(flow) == 0
    length, last = _longest(series, stuck)
    if length >= limits.stuck_seconds:
        yield float(waiting_column[last]), length, float(series.unix[last])


def _longest(series: Series, mask: np.ndarray) -> tuple[float, int]:
    """Seconds and last row of the longest run of rows where ``mask`` holds."""
    best, at, since = 0.0, 0, None
    for row in np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))):
        if since is None:
            since = row
            continue
        length = float(series.unix[row - 1] - series.unix[since])
        if length > best:
            best, at = length, int(row - 1)
        since = None
    return best, at


def admission_livelock(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC006: prompts are computed again and again and nothing comes out."""
    series = case.series
    if series is None:
        return
    prefill, decode = series.get("prefill_tokens"), series.get("decode_tokens")
    running, waiting = series.get("running"), series.get("waiting")
    if prefill is None or decode is None or running is None or waiting is None:
        return
    # Long prompts fill whole intervals; only far more tokens than one prompt of the largest length is a circle.
    silent = (np.nan_to_num(decode) == 0) & (running + waiting > 0)
    if case.requests is not None:
        first = series.get("first_tokens")
        if first is not None:
            silent &= np.nan_to_num(first) == 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], silent, [False]]).astype(np.int8)))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        tokens = float(np.nansum(prefill[start:stop]))
        owed = _owed(case, series, start, stop, running + waiting)
        seconds = float(series.unix[stop - 1] - series.unix[start])
        if owed is None or tokens <= 2 * owed or seconds < limits.stuck_seconds:
            continue
        yield found(
            "KVC006", "critical", f"{human_count(tokens)} tokens prefilled in {human_seconds(seconds)} without one token of output",
            fact(f"{human_count(tokens)} prefilled tokens", tokens, "tokens"),
            fact("generated tokens", 0, "tokens"),
            fact(f"the requests there can need {human_count(owed)} at most", owed, "tokens"),
            unix_seconds=float(series.unix[start]),
        )  # fmt: skip
        return


def _owed(case: Case, series: Series, start: int, stop: int, there: Floats) -> float | None:
    """The most prompt tokens that the requests present can have together; one pass would compute those."""
    most = float(np.nanmax(there[start:stop]))
    if case.requests is not None and case.rows is not None:
        prompts = np.sort(case.requests.prompt_tokens[case.rows])[::-1][: int(most)]
        return float(prompts.sum())
    longest = case.info.max_model_len or ((case.usable or 0) * (case.block_size or 0)) or None
    return most * longest if longest else None


def kv_leak(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC008: blocks held although nothing runs or waits."""
    if case.info.engine == "sglang":
        return  # its gauge counts evictable cache as used
    series = case.series
    if series is None:
        pool, queues = case.moment.pool, case.moment.queues
        if (
            queues.running == 0
            and queues.waiting == 0
            and (pool.utilization_ratio or 0.0) > limits.leak_ratio
        ):
            yield _leak(case, pool.utilization_ratio or 0.0, case.moment.unix_seconds, 0.0)
        return
    usage, running, waiting = series.get("usage"), series.get("running"), series.get("waiting")
    if usage is None or running is None:
        return
    # Requests that wait do not hold blocks (but for a connector's), so a full pool with none running leaks too.
    idle = (running == 0) & (
        np.zeros(len(running)) == 0 if waiting is None else (waiting == 0) | (usage > 0.9)
    )
    held = idle & (usage > limits.leak_ratio)
    seconds, last = _longest(series, held)
    last_idle = np.flatnonzero(idle)
    still = len(last_idle) > 0 and held[last_idle[-1]]
    rows = int(held.sum())
    if not still or (rows < 2 and not series.steps) or (series.steps and not _idle_at_end(case, series)):
        return
    if not series.steps and seconds < limits.stuck_seconds:
        return
    yield _leak(
        case, float(usage[last if not series.steps else last_idle[-1]]), float(series.unix[last]), seconds
    )


def _idle_at_end(case: Case, series: Series) -> bool:
    """A recorder writes rows while idle; a row with held blocks must be followed by nothing that gave them back."""
    running, waiting = series.columns["running"], series.columns["waiting"]
    return bool(running[-1] == 0 and waiting[-1] == 0)


def _leak(case: Case, share: float, when: float | None, seconds: float) -> Finding:
    evidence = [
        fact(f"{human_ratio(share)} of the usable blocks held", share, "ratio"),
        fact("running requests", 0, "requests"),
    ]
    if seconds:
        evidence.append(fact(f"for at least {human_seconds(seconds)}", seconds, "seconds"))
    remedy = ""
    if case.info.kv_connector:
        evidence.append(fact(f"KV connector: {case.info.kv_connector}"))
        remedy = (
            "Blocks wait for a transfer that was aborted: lower VLLM_NIXL_ABORT_REQUEST_TIMEOUT (or the "
            "connector's lease), and upgrade."
        )
    return found(
        "KVC008", "critical" if share > 0.5 else "warning", f"{share:.0%} of the pool is held by no live request",
        *evidence, remedy=remedy, unix_seconds=when,
    )  # fmt: skip

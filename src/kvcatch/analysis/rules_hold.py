"""Findings about who holds the pool and who is thrown out of it: KVC002, KVC003, KVC009."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import numpy as np

from kvcatch.analysis.evidence import Case, Holder, Series, increase
from kvcatch.analysis.rules import fact, found
from kvcatch.analysis.tenant_peaks import TenantPeak
from kvcatch.analysis.thresholds import Limits
from kvcatch.results import Finding
from kvcatch.units import human_count, human_ratio, human_seconds


def preemption_storm(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC002: the same requests preempted again and again, or much computed twice."""
    if case.preempted is not None and case.series is not None:
        yield from _recorded_storm(case, case.series, limits)
        return
    if case.series is not None and case.series.steps:
        yield from _storm_of_rows(case.series, limits)
        return
    yield from _swapping(case, limits)
    yield from _collapse(case)
    count, finished = increase(case, "preemptions"), None
    if case.pages is not None:
        histogram = case.pages[1].e2e or case.pages[1].ttft
        older = case.pages[0].e2e or case.pages[0].ttft
        if histogram is not None:
            same = case.pages[0] is case.pages[1] or older is None
            finished = histogram.observations - (0 if same or older is None else older.observations)
    elif case.log is not None:
        count = case.log.preemptions
        if case.series is not None and case.series.total("preemptions"):
            count = max(count or 0, case.series.total("preemptions") or 0)
    if count is None or count < 2 * limits.preemptions:
        return
    if finished is not None and count < limits.preemptions_per_request * finished:
        return
    evidence = [fact(f"{human_count(count)} preemptions", count, "preemptions")]
    if finished:
        evidence.append(fact(f"{human_count(finished)} requests finished", finished, "requests"))
    if case.log is not None and case.log.swapping:
        evidence.append(fact("preempted requests are swapped out, not recomputed"))
    yield found("KVC002", "warning", f"{human_count(count)} preemptions", *evidence)


def _storm_of_rows(series: Series, limits: Limits) -> Iterator[Finding]:
    """The storm of a living engine, whose rows count preemptions but name nobody."""
    count = series.total("preemptions") or 0.0
    again, prefilled = series.total("recomputed_tokens") or 0.0, series.total("prefill_tokens") or 0.0
    share = again / prefilled if prefilled else 0.0
    if count < limits.preemptions or share < limits.recomputed_share:
        return
    yield found(
        "KVC002", "critical" if share >= limits.recomputed_share_critical else "warning",
        f"{human_count(count)} preemptions, {human_ratio(share, 0)} of all prefill computed again",
        fact(f"{human_count(count)} preemptions in {human_seconds(series.span_seconds)}", count, "preemptions"),
        fact(f"{human_count(again)} of {human_count(prefilled)} prefilled tokens were computed before", again, "tokens"),
    )  # fmt: skip


def _swapping(case: Case, limits: Limits) -> Iterator[Finding]:
    """The first engine swapped groups of several sequences out, and could stop doing anything else."""
    waiting = case.series.get("waiting") if case.series is not None else None
    if (
        case.log is None
        or not case.log.swapping
        or waiting is None
        or float(np.nanmax(waiting)) < limits.waiting
    ):
        return
    yield found(
        "KVC002", "warning", f"requests are swapped out while {human_count(float(np.nanmax(waiting)))} wait",
        fact("the log names PreemptionMode.SWAP"), fact("requests waiting", float(np.nanmax(waiting)), "requests"),
        remedy="Avoid swapping: --swap-space 0 and n=1, or upgrade to an engine that recomputes.",
    )  # fmt: skip


def _collapse(case: Case) -> Iterator[Finding]:
    """SGLang retracts requests on a full pool; its log then shows as many running, many times slower."""
    series = case.series
    if series is None or case.info.engine != "sglang":
        return
    usage, output, running = series.get("usage"), series.get("decode_tokens"), series.get("running")
    if usage is None or output is None or running is None or len(output) < 4:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = output / series.seconds / running
    full = (usage > 0.9) & (running > 0) & ~np.isnan(rate)
    if full.sum() < 2 or not (running > 0).any():
        return
    best = float(np.nanmax(rate[running > 0]))
    now = float(np.median(rate[full][-3:]))
    if now <= 0 or best / now < 5:
        return
    yield found(
        "KVC002", "warning", f"generation is {best / now:.0f} times slower per request on a full pool",
        fact(f"{human_ratio(float(usage[full][-1]))} of the pool used", float(usage[full][-1]), "ratio"),
        fact(f"{best:.1f} tokens/s per request at best, {now:.1f} now", now, "tokens per second"),
        cause="The engine retracts and computes again what does not fit.",
        remedy="Admit fewer requests: lower --max-running-requests or raise --schedule-conservativeness.",
    )  # fmt: skip


def _recorded_storm(case: Case, series: Series, limits: Limits) -> Iterator[Finding]:
    assert case.preempted is not None
    rids = case.preempted["rid"]
    if len(rids) < limits.preemptions:
        return
    again, prefilled = series.total("recomputed_tokens") or 0.0, series.total("prefill_tokens") or 0.0
    share = again / prefilled if prefilled else 0.0
    who, times = np.unique(rids, return_counts=True)
    round_and_round = int((times >= limits.preemptions_of_one).sum())
    requests = len(case.rows) if case.rows is not None else 0
    if share < limits.recomputed_share and not (
        round_and_round >= 5 and len(rids) >= limits.preemptions_per_request * requests
    ):
        return
    victim = int(np.argmax(times))
    name, tags = named(case, int(who[victim]))
    freed = int(case.preempted["freed_blocks"].sum())
    severity = "critical" if share >= limits.recomputed_share_critical else "warning"
    yield found(
        "KVC002", severity,
        f"{human_count(len(rids))} preemptions, {human_ratio(share, 0)} of all prefill computed again",
        fact(f"{human_count(len(rids))} preemptions of {human_count(len(who))} requests", len(rids), "preemptions"),
        fact(f"{human_count(again)} of {human_count(prefilled)} prefilled tokens were computed before", again, "tokens"),
        fact(f"{human_count(freed)} blocks thrown away", freed, "blocks"),
        fact(f"most often: {name}, {int(times[victim])} times", int(times[victim]), "preemptions"),
        request_id=name, tenant=tags, unix_seconds=(int(case.preempted["time"][0]) + case.wall_offset) / 1e9,
    )  # fmt: skip


def named(case: Case, rid: int) -> tuple[str, str | None]:
    from kvcatch.store.names import client_request_id

    table = case.requests
    if table is None:
        return f"#{rid}", None
    row = int(np.searchsorted(table.rid, rid))
    if row >= len(table) or table.rid[row] != rid:
        return f"#{rid}", None
    key, tags = table.named(row)
    return client_request_id(key), tags.get("tenant")


def block_hog(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC003: one request, or one tenant among several, holds a large share of the pool."""
    groups: dict[str, list[tuple[Holder, list[tuple[str, float, str]]]]] = {}
    for holder in case.holders:
        if holder.share < limits.hog_share:
            break
        usual = case.median_blocks
        if usual and holder.blocks < limits.hog_times_median * usual and len(case.holders) > 1:
            continue
        impact = _impact(case, holder)
        if impact or (case.series is None and holder.share >= limits.quiet_hog_share):
            groups.setdefault(holder.tenant, []).append((holder, impact))
    for members in groups.values():
        # The one that hurt most stands for its tenant.
        holder, impact = max(members, key=lambda pair: (len(pair[1]), pair[0].share))
        yield _hog(case, holder, impact, [other for other, _ in members if other is not holder], limits)
    named = set(groups)
    for peak in case.tenant_peaks:
        if peak.tenant not in named and _few_and_large(peak, limits):
            named.add(peak.tenant)
            yield _hog_tenant(case, peak, limits)
    if len(case.tenants) < 2:
        return
    tenant, (share, when) = max(case.tenants.items(), key=lambda item: item[1][0])
    waiting = _blocked_at(case, when)
    # Two tenants with half each are no hogs: clearly more than the equal share is needed.
    least = max(limits.tenant_share, min(0.9, 1.4 / len(case.tenants)))
    if share < least or not waiting or tenant in named or tenant == "-":
        return
    yield found(
        "KVC003", "warning", f"tenant {tenant} holds {share:.0%} of the pool while {human_count(waiting)} requests wait for blocks",
        fact(f"{share:.0%} of the usable blocks", share, "ratio"), fact("requests waiting for blocks", waiting, "requests"),
        remedy=f"Give the tenant a limit of its own at the gateway: kvcatch gateway {_tenant_share(tenant, 0.5)}",
        tenant=tenant, unix_seconds=when or None,
    )  # fmt: skip


def _few_and_large(peak: TenantPeak, limits: Limits) -> bool:
    """A large share in few requests, each several times as large as those of the others."""
    if peak.share < limits.hog_share or peak.tenant == "other" or not peak.running or not peak.others_running:
        return False
    usual = peak.others_blocks / peak.others_running
    return peak.blocks / peak.running >= limits.hog_times_median * usual > 0


def _hog_tenant(case: Case, peak: TenantPeak, limits: Limits) -> Finding:
    """The hog where only its tenant is known."""
    each = peak.blocks / (peak.running or 1)
    waiting, preempted = _blocked_at(case, peak.unix), _preempted_around(case, peak.unix)
    who = "requests without a tenant" if peak.tenant == "-" else f"tenant {peak.tenant}"
    count = human_count(peak.running)
    evidence = [
        fact(f"{human_count(peak.blocks)} of {human_count(case.usable)} blocks in {count} running request"
             f"{'' if peak.running == 1 else 's'} of this tenant", peak.blocks, "blocks"),
        fact(f"{human_count(each)} blocks a request; those of other tenants hold "
             f"{human_count(peak.others_blocks / (peak.others_running or 1))}", each, "blocks"),
        fact(f"meanwhile {human_count(waiting)} requests waited for blocks", waiting, "requests"),
    ]  # fmt: skip
    if preempted >= 3:
        evidence.append(fact(f"meanwhile {human_count(preempted)} preemptions", preempted, "preemptions"))
    evidence.append(fact("which request it was no metric tells: a recording does (kvcatch run -- vllm ...)"))
    limit = input_limit(case, limits)
    command = (
        f"kvcatch gateway --max-input-tokens {limit} --over-long reject --long-share 0.3 --long-concurrency 1"
    )
    if peak.tenant != "-":
        command += f" {_tenant_share(peak.tenant, limits.hog_share)}"
    return found(
        "KVC003", "critical" if peak.share >= 2 * limits.hog_share and preempted >= 3 else "warning",
        f"{who} holds {peak.share:.0%} of the pool with {count} request{'' if peak.running == 1 else 's'}",
        *evidence, remedy=command, tenant=peak.tenant, unix_seconds=peak.unix,
    )  # fmt: skip


def _tenant_share(name: str, share: float) -> str:
    """The option of ``kvcatch gateway --tenant-share team=0.5`` for this tenant."""
    tenant = shlex.quote(name)
    return f"--tenant-share {tenant}={share:g}"


def _preempted_around(case: Case, when: float) -> float:
    """Preemptions within a minute of a moment."""
    preempted = case.series.get("preemptions") if case.series is not None else None
    if case.series is None or preempted is None:
        return 0.0
    return float(np.nansum(preempted[np.abs(case.series.unix - when) <= 60.0]))


def _hog(
    case: Case, holder: Holder, impact: list[tuple[str, float, str]], others: list[Holder], limits: Limits
) -> Finding:
    severity = (
        "info"
        if not impact
        else "critical"
        if holder.share >= 2 * limits.hog_share and len(impact) > 1
        else "warning"
    )
    evidence = [
        fact(f"request {holder.request_id} of tenant {holder.tenant}: {human_count(holder.blocks)} of "
             f"{human_count(case.usable)} blocks for {human_seconds(max(0.0, holder.stop - holder.start))}",
             holder.blocks, "blocks"),
        fact(f"{human_count(holder.prompt_tokens)} prompt tokens, {human_count(holder.output_tokens)} generated",
             holder.prompt_tokens, "tokens"),
    ]  # fmt: skip
    if case.median_blocks:
        evidence.append(
            fact(f"the median request holds {human_count(case.median_blocks)}", case.median_blocks, "blocks")
        )
    evidence += [fact(text, value, unit) for text, value, unit in impact]
    if others:
        names = ", ".join(f"{other.request_id} ({other.share:.0%})" for other in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        evidence.append(fact(f"so did {names}{more}", len(others), "requests"))
    limit = input_limit(case, limits)
    if holder.prompt_tokens > limit:
        remedy = f"kvcatch gateway --max-input-tokens {limit} --over-long reject --long-share 0.3 --long-concurrency 1"
        cause = "An over-long prompt takes blocks that many others wait for."
    else:
        remedy = "Cap its output: max_tokens in the request, or kvcatch gateway --max-output-tokens " + str(
            _round_up(_usual(case, "output_tokens", 0.99) or 1024)
        )
        cause = "A long generation takes blocks that many others wait for."
    return found(
        "KVC003", severity, f"one request holds {holder.share:.0%} of the pool: {holder.request_id} ({holder.tenant})",
        *evidence, cause=cause, remedy=remedy, request_id=holder.request_id, tenant=holder.tenant,
        unix_seconds=holder.start,
    )  # fmt: skip


def input_limit(case: Case, limits: Limits) -> int:
    """Prompt tokens up to which requests of this capture are usual: the longest of those that are no hogs.

    At most what a tenth of the pool holds; rounded up to a multiple of 256.
    """
    room = (case.usable or 0) * (case.block_size or 0)
    tenth = max(256, room // 10 // 256 * 256)
    usual = _usual(case, "prompt_tokens", 0.99)
    return min(_round_up(usual), tenth) if usual else tenth


def _round_up(tokens: float) -> int:
    return max(256, -(-int(tokens) // 256) * 256)


def _usual(case: Case, name: str, quantile: float) -> float | None:
    if case.requests is None or case.rows is None or len(case.rows) < 2:
        return None
    values = getattr(case.requests, name)[case.rows]
    prompts = case.requests.prompt_tokens[case.rows]
    size = (case.usable or 0) * (case.block_size or 0)
    small = values[prompts < 0.1 * size] if size else values
    return float(np.quantile(small, quantile)) if len(small) else None


def _impact(case: Case, holder: Holder) -> list[tuple[str, float, str]]:
    """What others suffered while the holder held: waiting, preemptions, slower first tokens."""
    series = case.series
    if series is None:
        waiting = case.moment.queues.waiting_for_blocks
        return (
            [(f"{human_count(waiting)} requests wait for blocks", float(waiting), "requests")]
            if waiting
            else []
        )
    inside = (series.unix >= holder.start) & (series.unix <= holder.stop)
    result = []
    blocked = series.get("blocked")
    if (
        blocked is not None
        and inside.any()
        and float((series.seconds * (blocked > 0))[inside].sum()) > 0.1 * float(series.seconds[inside].sum())
    ):
        most = float(blocked[inside].max())
        result.append((f"meanwhile up to {human_count(most)} requests waited for blocks", most, "requests"))
    preempted = series.get("preemptions")
    if preempted is not None and inside.any():
        count = float(np.nansum(preempted[inside]))
        if count >= 3:
            result.append((f"meanwhile {human_count(count)} preemptions", count, "preemptions"))
    slower = _slower(case, holder)
    if slower is not None and result:
        inner, outer = slower
        result.append(
            (f"first tokens took {human_seconds(inner)}, otherwise {human_seconds(outer)}", inner, "seconds")
        )
    return result


def _slower(case: Case, holder: Holder) -> tuple[float, float] | None:
    """Mean TTFT of requests that arrived while the holder held, and of the others, when at least 1.5 times."""
    table, rows = case.requests, case.rows
    if table is None or rows is None:
        return None
    rows = rows[table.first[rows] > 0]
    waits = (table.first[rows] - table.arrival[rows]) / 1e9
    arrival = (table.arrival[rows] + case.wall_offset) / 1e9
    inside = (arrival >= holder.arrival) & (arrival <= holder.stop)
    if inside.sum() < 3 or (~inside).sum() < 3:
        return None
    inner, outer = float(waits[inside].mean()), float(waits[~inside].mean())
    return (inner, outer) if inner >= 1.5 * outer else None


def _blocked_at(case: Case, when: float) -> float:
    if case.series is None:
        return float(case.moment.queues.waiting_for_blocks or 0)
    blocked = case.series.get("blocked")
    if blocked is None:
        return 0.0
    near = np.abs(case.series.unix - when) <= 5.0
    return float(blocked[near].max()) if near.any() else 0.0


def long_generation(case: Case, limits: Limits) -> Iterator[Finding]:
    """KVC009: one request's own output explains the growth."""
    for holder in case.holders[:10]:
        size = case.block_size or 0
        own = holder.output_tokens * 1.0
        if holder.live and case.kind == "recording" and size:
            # What a live request has generated is not in its record yet.
            own = max(own, holder.blocks * size - holder.prompt_tokens)
        if holder.share < limits.long_output_share or own < holder.prompt_tokens or not size:
            continue
        yield found(
            "KVC009", "info", f"request {holder.request_id} fills {holder.share:.0%} of the pool with its own output",
            fact(f"about {human_count(own)} generated tokens after a prompt of {human_count(holder.prompt_tokens)}", own, "tokens"),
            fact(f"{human_count(holder.blocks)} blocks for {human_seconds(holder.stop - holder.start)}", holder.blocks, "blocks"),
            request_id=holder.request_id, tenant=holder.tenant, unix_seconds=holder.start,
        )  # fmt: skip
        return

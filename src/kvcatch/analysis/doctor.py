"""Running every rule over every case: the findings, and which rules had nothing to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvcatch.analysis import rules_hold as hold
from kvcatch.analysis import rules_hybrid as hybrid
from kvcatch.analysis import rules_load as load
from kvcatch.analysis import rules_memory as memory
from kvcatch.analysis import rules_prefix as prefix
from kvcatch.analysis import rules_record as record
from kvcatch.analysis import rules_shape as shape
from kvcatch.analysis import rules_stall as stall
from kvcatch.analysis.evidence import Case, from_live, from_snapshot
from kvcatch.analysis.rules import RULES, worst_first
from kvcatch.analysis.thresholds import LIMITS, Limits
from kvcatch.results import Finding, Result, Snapshot
from kvcatch.store.base import Capture

#: what ``top`` looks back over, and the findings that need a past
_LIVE_SECONDS = 600.0
_TRENDS = ("KVC002", "KVC004", "KVC006", "KVC007")

Check = Callable[[Case, Limits], Iterator[Finding]]


def _has(case: Case, *names: str) -> bool:
    return case.series is not None and all(case.series.get(name) is not None for name in names)


def _has_load(case: Case) -> bool:
    pool = case.moment.pool
    return (
        _has(case, "usage", "waiting") or pool.utilization_ratio is not None or pool.active_blocks is not None
    )


def _counts_preemptions(case: Case) -> bool:
    if (
        case.preempted is not None
        or case.pages is not None
        or (case.series is not None and case.series.steps)
    ):
        return True
    # SGLang's log shows retraction by its speed.
    return case.log is not None and (case.log.preemptions is not None or case.info.engine == "sglang")


#: codes a check may give, the check, and what a case must have for it to say anything
CHECKS: tuple[tuple[tuple[str, ...], Check, Callable[[Case], bool]], ...] = (
    (("KVC001",), load.kv_pressure, _has_load),
    (("KVC002",), hold.preemption_storm, _counts_preemptions),
    (("KVC003",), hold.block_hog, lambda case: bool(case.requests is not None or case.moment.requests or case.tenants)),
    (("KVC004",), load.exhaustion_ahead, lambda case: case.series is not None and case.moment.state not in ("ended",)),
    (("KVC005",), stall.request_never_fits, _has_load),
    (("KVC006",), stall.admission_livelock, lambda case: _has(case, "prefill_tokens", "decode_tokens")),
    (("KVC007",), load.not_kv_bound, lambda case: _has(case, "usage", "waiting")),
    (("KVC008",), stall.kv_leak, _has_load),
    (("KVC009",), hold.long_generation, lambda case: bool(case.holders)),
    (("KVC010",), load.limit_not_kv, lambda case: bool(case.info.max_num_seqs or case.moment.bound_by)),
    (tuple(f"KVC10{n}" for n in range(1, 10)), memory.out_of_memory, lambda case: case.log is not None),
    (("KVC107",), memory.no_room_at_start, lambda case: case.log is not None),
    (("KVC107",), memory.others_on_card, lambda case: any(rank.device != "cpu" for rank in case.ranks)),
    (("KVC110",), memory.start_refused, lambda case: case.log is not None),
    (("KVC111",), memory.profile_disturbed, lambda case: case.log is not None),
    (("KVC201",), prefix.shorter_than_block, lambda case: bool(case.block_size or (case.log and case.log.attention_block))),
    (("KVC201",), hybrid.hits_need_company, lambda case: case.series is not None),
    (("KVC201",), hybrid.draft_gives_back, lambda case: case.pages is not None),
    (("KVC205",), prefix.caching_off, lambda case: case.info.prefix_caching is not None),
    (("KVC207",), prefix.untrustworthy, lambda case: case.pages is not None or case.log is not None),
    (("KVC208",), prefix.seed_mismatch, lambda case: case.log is not None),
    (("KVC301",), shape.internal_fragmentation, lambda case: _has(case, "filled") or
     case.moment.efficiency.internal_fragmentation_ratio is not None),
    (("KVC302",), shape.state_pinned, lambda case: bool(case.info.groups or case.pages or case.log)),
    (("KVC302",), hybrid.state_pages, lambda case: bool(case.info.groups or case.pages or (case.log and case.log.kv_tokens))),
    (("KVC303",), shape.padding_layers, lambda case: case.log is not None),
    (("KVC304",), shape.rank_imbalance, lambda case: case.log is not None or len(case.ranks) > 1),
    (("KVC501",), record.metric_missing, lambda case: case.pages is not None),
    (("KVC502",), record.metric_stuck, lambda case: case.pages is not None and case.series is not None),
    (("KVC503",), record.capture_loss, lambda case: case.kind in ("recording", "moment")),
    (("KVC504",), record.lifetimes_polluted, lambda case: case.log is not None or
     bool(case.pages and case.pages[1].block_lifetime)),
)  # fmt: skip

#: checks that compare engines with each other
ACROSS: tuple[tuple[str, Callable[[Sequence[Case], Limits], Iterator[Finding]]], ...] = (
    ("KVC201", hybrid.hits_need_company_across),
    ("KVC209", prefix.unit_mismatch),
    ("KVC305", shape.engines_uneven),
)


class Diagnosis(Result, frozen=True):
    """What was found. ``silent``: code -> why it could not be looked for in any target."""

    findings: tuple[Finding, ...] = ()
    silent: dict[str, str] = msgspec.field(default_factory=dict)
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def worst(self) -> str | None:
        """critical, warning, info, or None."""
        return self.findings[0].severity if self.findings else None


def diagnose(cases: Sequence[Case], limits: Limits = LIMITS, extra: Sequence[Finding] = ()) -> Diagnosis:
    """Every finding of these cases, the most severe first.

    Args:
        cases: one per engine, of any mix of kinds.
        limits: thresholds.
        extra: findings of checks that need more than a case (prefix chains); they take part in the order.
    """
    findings = list(extra)
    heard: set[str] = {finding.code for finding in extra}
    for case in cases:
        for codes, check, can in CHECKS:
            if not can(case):
                continue
            heard.update(codes)
            findings += _merged(findings, [_named(one, case, len(cases) > 1) for one in check(case, limits)])
    for code, across in ACROSS:
        if len(cases) > 1 or code == "KVC209":
            heard.add(code)
            findings += list(across(cases, limits))
    silent = {
        code: rule.needs
        for code, rule in RULES.items()
        if rule.verb in ("doctor", "prefix") and code not in heard
    }
    return Diagnosis(
        findings=_consistent(worst_first(findings)),
        silent=silent,
        targets=tuple(case.target for case in cases),
        notes=tuple(note for case in cases for note in case.notes),
    )


def glance(snapshot: Snapshot, capture: Capture | None = None) -> tuple[Finding, ...]:
    """What one snapshot proves, by the same rules: the line in the header of ``top``.

    With the capture of a living engine also what its last ten minutes show: storms, trends, circles.
    """
    now = diagnose([from_snapshot(snapshot)]).findings
    if capture is None or snapshot.state not in ("live", "idle", "stale"):
        return now
    case = from_live(capture, snapshot, _LIVE_SECONDS)
    known = {finding.code for finding in now}
    trends = [one for one in diagnose([case]).findings if one.code in _TRENDS and one.code not in known]
    return worst_first([*now, *trends])


def _named(finding: Finding, case: Case, several: bool) -> Finding:
    """With several targets the title says which one."""
    return msgspec.structs.replace(finding, title=f"{case.target}: {finding.title}") if several else finding


def _merged(before: Sequence[Finding], new: list[Finding]) -> list[Finding]:
    """A log of one server gives one case per engine: what it says once is found once."""
    known = {(one.code, tuple(row.text for row in one.evidence)) for one in before}
    return [one for one in new if (one.code, tuple(row.text for row in one.evidence)) not in known]


def _consistent(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Leaves out what another finding explains: a livelock or a dead queue is not also pressure or a slow engine."""
    codes = {one.code for one in findings}
    hidden: set[str] = set()
    if codes & {"KVC005", "KVC006", "KVC008"}:
        hidden |= {"KVC001", "KVC007", "KVC010"}
    if "KVC006" in codes:
        hidden.add("KVC005")
    if "KVC502" in codes:
        hidden |= {"KVC005", "KVC007", "KVC008"}
    if "KVC003" in codes:
        hidden.add("KVC009")
    return tuple(one for one in findings if one.code not in hidden)

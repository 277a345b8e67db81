"""Every number a finding depends on, in one place. Ratios are 0 to 1."""

from __future__ import annotations

import msgspec

from kvcatch.metrics import THRESHOLDS as SHARED


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Where rules open a finding. Shared with dashboards and alerts where those have the same number."""

    watermark_ratio: float = SHARED.assumed_watermark_ratio
    full_ratio: float = SHARED.usage_critical_ratio
    #: share of the busy time under pressure from which it is a problem and not a moment
    pressure_time_ratio: float = 0.10
    pressure_steps: int = 20
    #: waiting time of requests, as a share of their whole time, from which pressure is critical
    critical_wait_ratio: float = 0.5
    recomputed_share: float = SHARED.recomputed_share_warning
    recomputed_share_critical: float = 0.30
    #: fewer preemptions than this are single ones whatever their share
    preemptions: int = 10
    #: preempted this often, a request is going round in circles
    preemptions_of_one: int = 3
    #: counters only: preemptions per finished request
    preemptions_per_request: float = 0.05
    #: of one request while others wait for blocks or are preempted; of one that hurts nobody
    hog_share: float = 0.25
    quiet_hog_share: float = 0.30
    #: a hog holds this many times the median request's blocks
    hog_times_median: float = 3.0
    tenant_share: float = SHARED.tenant_share_warning_ratio
    exhaustion_seconds: float = 600.0
    #: a trend needs a past of this length
    trend_seconds: float = 60.0
    empty_ratio: float = 0.01
    stuck_seconds: float = 10.0
    low_usage_ratio: float = 0.70
    waiting: int = 8
    long_queue: int = SHARED.waiting_warning
    #: share of the busy time at a limit from which that limit binds
    limit_time_ratio: float = 0.5
    leak_ratio: float = 0.02
    long_output_share: float = 0.20
    oom_slack_bytes: int = 256 << 20
    others_ratio: float = 0.05
    hit_ratio: float = SHARED.hit_ratio_warning
    #: prefix lookups needed before a hit ratio says anything, in tokens
    queried_tokens: int = 10_000
    large_block_tokens: int = 128
    inflated_ratio: float = 1.05
    lost_share: float = 0.10
    fragmentation_ratio: float = SHARED.fragmentation_warning_ratio
    fragmentation_usage: float = 0.5
    state_share: float = 0.25
    #: of the used pool, in states that long prompts leave behind
    state_page_share: float = 0.15
    #: a prompt leaves states behind when it spans this many of their intervals
    long_prompt_states: int = 10
    #: observations of a residency histogram before it says anything
    lifetimes: int = 10
    rank_ratio: float = 0.10
    uneven_usage: float = 0.4
    uneven_running: float = 1.5
    stuck_tokens: int = 1000


LIMITS = Limits()

"""Recording and alert rules. Thresholds come from ``metrics.THRESHOLDS``, anchors are finding codes."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcatch.metrics import THRESHOLDS as T

#: labels that identify one engine through one exporter
ON = "on (job, instance, target, model_name, engine)"
_CAPACITY = "kvcatch_kv_cache_capacity_blocks"
_ACTIVE = 'kvcatch_kv_cache_blocks{state="active"}'
UTILIZATION = "engine:kvcatch_kv_cache_utilization:ratio"
HITS = "model_name:vllm_prefix_cache_hits_per_queries:ratio_rate5m"
RECOMPUTED = "engine:kvcatch_preemption_recomputed_per_prefill_tokens:ratio_rate5m"


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert. ``anchor`` is the runbook section: a finding code, or a word where no finding fits."""

    name: str
    anchor: str
    severity: str
    expr: str
    wait: str
    summary: str
    description: str


_HELD_OR_ASKED = f"sum by (model_name) (kvcatch_committed_ratio * {ON} {_CAPACITY})"
_STEPS = "rate(kvcatch_steps_total[5m])"

RECORDING: dict[str, str] = {
    UTILIZATION: f"{_ACTIVE} / ignoring (state) {_CAPACITY}",
    "model_name:kvcatch_kv_cache_utilization:ratio": f"sum by (model_name) ({_ACTIVE})"
    f" / sum by (model_name) ({_CAPACITY})",
    "model_name:kvcatch_committed:ratio": f"{_HELD_OR_ASKED}"
    f" / sum by (model_name) ({_CAPACITY} and {ON} kvcatch_committed_ratio)",
    HITS: "sum by (model_name) (rate(vllm:prefix_cache_hits_total[5m]))"
    " / sum by (model_name) (rate(vllm:prefix_cache_queries_total[5m]))",
    "engine:kvcatch_prefix_cache_hits_per_queries:ratio_rate5m": "rate(kvcatch_prefix_cache_hit_tokens_total[5m])"
    " / rate(kvcatch_prefix_cache_queried_tokens_total[5m])",
    RECOMPUTED: "rate(kvcatch_preemption_recomputed_tokens_total[5m])"
    ' / ignoring (phase) rate(kvcatch_scheduled_tokens_total{phase="prefill"}[5m])',
    "model_name:vllm_time_to_first_token_seconds:p99_5m": "histogram_quantile(0.99, sum by (model_name, le) "
    "(rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    "engine:kvcatch_steps_bound:ratio_rate5m": f"{_STEPS} / ignoring (bound) group_left () "
    f"sum without (bound) ({_STEPS})",
}

_WHO = "{{ $labels.model_name }} engine {{ $labels.engine }} at {{ $labels.target }}"
_PERCENT = "{{ $value | humanizePercentage }}"
_WAITS = f'{ON} kvcatch_requests_waiting{{reason="blocks"}} > 0'

ALERTS: tuple[Alert, ...] = (
    Alert(
        name="KVCatchKVPressure", anchor="kvc001", severity="warning", wait="5m",
        expr=f"({UTILIZATION} > {ON} group_left () max by (job, instance, target, model_name, engine) "
        f"(kvcatch_watermark_ratio)) and {_WAITS}",
        summary="Requests wait for KV blocks above the safe watermark.",
        description=f"{_WHO}: {_PERCENT} of KV blocks are active and requests wait for blocks.",
    ),
    Alert(
        name="KVCatchKVPressureCritical", anchor="kvc001", severity="critical", wait="5m",
        expr=f"({UTILIZATION} > {T.usage_critical_ratio}) and {_WAITS}",
        summary="The KV cache is full and requests wait.",
        description=f"{_WHO}: {_PERCENT} of KV blocks are active and requests wait for blocks.",
    ),
    Alert(
        name="KVCatchPreemptionStorm", anchor="kvc002", severity="warning", wait="5m",
        expr=f"{RECOMPUTED} > {T.recomputed_share_warning}",
        summary="A large share of prefill work repeats what preemption threw away.",
        description=f"{_WHO}: {_PERCENT} of prefilled tokens are recomputed.",
    ),
    Alert(
        name="KVCatchPreemptions", anchor="kvc002", severity="warning", wait="5m",
        expr=f"sum by (model_name, engine, instance) (rate(vllm:num_preemptions_total[5m]))"
        f" > {T.preemptions_per_second_warning}",
        summary="The engine preempts requests all the time.",
        description="{{ $labels.model_name }} engine {{ $labels.engine }}: {{ $value | humanize }} preemptions/s.",
    ),
    Alert(
        name="KVCatchTenantHog", anchor="kvc003", severity="warning", wait="10m",
        expr=f"(kvcatch_tenant_blocks / {ON} group_left () {_CAPACITY} > {T.tenant_share_warning_ratio})"
        f" and on (job, instance, target, model_name, engine) (kvcatch_requests_waiting{{reason=\"blocks\"}} > 0)",
        summary="One tenant holds most of the KV cache while others wait.",
        description=f"{_WHO}: tenant {{{{ $labels.tenant }}}} holds {_PERCENT} of the blocks.",
    ),
    Alert(
        name="KVCatchExhaustionAhead", anchor="kvc004", severity="warning", wait="3m",
        expr=f"(predict_linear({UTILIZATION}[10m], 600) > 1) and ({UTILIZATION} > 0.5) and ({UTILIZATION} < 0.95)",
        summary="At this growth the KV cache is full within ten minutes.",
        description=f"{_WHO}: active blocks are heading for {_PERCENT} of the pool.",
    ),
    Alert(
        name="KVCatchRequestNeverFits", anchor="kvc005", severity="critical", wait="2m",
        expr="vllm:num_requests_waiting > 0 and vllm:num_requests_running == 0 and vllm:kv_cache_usage_perc < 0.01",
        summary="Requests wait although the engine is empty: the first one can never fit.",
        description="{{ $labels.model_name }} engine {{ $labels.engine }}: {{ $value }} wait, none runs.",
    ),
    Alert(
        name="KVCatchQueueNotKV", anchor="kvc007", severity="info", wait="10m",
        expr=f"vllm:num_requests_waiting > {T.waiting_warning} and vllm:kv_cache_usage_perc < 0.7"
        " and rate(vllm:num_preemptions_total[5m]) == 0",
        summary="A long queue, but not for want of KV blocks.",
        description="{{ $labels.model_name }} engine {{ $labels.engine }}: {{ $value }} wait with KV blocks idle.",
    ),
    Alert(
        name="KVCatchSequenceLimit", anchor="kvc010", severity="info", wait="10m",
        expr=f'engine:kvcatch_steps_bound:ratio_rate5m{{bound="max_num_seqs"}} > 0.5'
        f" and {ON} {UTILIZATION} < 0.7",
        summary="max_num_seqs limits the engine while blocks are free.",
        description=f"{_WHO}: {_PERCENT} of steps stop at max_num_seqs.",
    ),
    Alert(
        name="KVCatchOtherProcessOnCard", anchor="kvc107", severity="warning", wait="10m",
        expr='kvcatch_device_memory_bytes{owner="other_processes", device!~"cpu.*"} / ignoring (owner) group_left () '
        "sum without (owner) (kvcatch_device_memory_bytes) > 0.05",
        summary="Another process holds memory on the engine's card.",
        description=f"{_WHO}: {_PERCENT} of {{{{ $labels.device }}}} belongs to other processes.",
    ),
    Alert(
        name="KVCatchPrefixEvicted", anchor="kvc203", severity="info", wait="15m",
        expr=f"engine:kvcatch_prefix_cache_hits_per_queries:ratio_rate5m < {T.hit_ratio_warning}"
        f" and {ON} rate(kvcatch_kv_block_evictions_total[5m]) > 0",
        summary="Few prefix hits while cached blocks are being evicted.",
        description=f"{_WHO}: {_PERCENT} of looked-up prompt tokens are found.",
    ),
    Alert(
        name="KVCatchHitRateUntrustworthy", anchor="kvc207", severity="info", wait="10m",
        expr="rate(vllm:prefix_cache_queries_total[5m]) > 1.05 * rate(vllm:prompt_tokens_total[5m])",
        summary="The engine counts prefix lookups of failed admissions again.",
        description="{{ $labels.model_name }} engine {{ $labels.engine }}: more tokens looked up than prompted.",
    ),
    Alert(
        name="KVCatchFragmentation", anchor="kvc301", severity="info", wait="15m",
        expr=f"kvcatch_internal_fragmentation_ratio > {T.fragmentation_warning_ratio} and {ON} {UTILIZATION} > 0.5",
        summary="Active blocks are largely empty.",
        description=f"{_WHO}: {_PERCENT} of active token slots hold no token.",
    ),
    Alert(
        name="KVCatchEnginesUneven", anchor="kvc305", severity="warning", wait="10m",
        expr=f"(max by (model_name) ({UTILIZATION}) - min by (model_name) ({UTILIZATION}) > 0.4)"
        ' and on (model_name) (sum by (model_name) (kvcatch_requests_waiting{reason="blocks"}) > 0)',
        summary="Requests wait for blocks on one engine while another has room.",
        description=f"{{{{ $labels.model_name }}}}: fullest and emptiest engine differ by {_PERCENT}.",
    ),
    Alert(
        name="KVCatchPoolUnknown", anchor="kvc501", severity="warning", wait="10m",
        expr=f"kvcatch_up == 1 unless {ON} {_CAPACITY}",
        summary="The engine answers but does not tell the size of its KV pool.",
        description=f"{_WHO}: a metric was renamed or removed, or the engine is not known to kvcatch.",
    ),
    Alert(
        name="KVCatchMetricStuck", anchor="kvc502", severity="warning", wait="10m",
        expr="rate(vllm:generation_tokens_total[5m]) > 10 and max_over_time(vllm:num_requests_running[10m]) == 0"
        " and max_over_time(vllm:kv_cache_usage_perc[10m]) == 0",
        summary="Tokens flow, yet usage and running requests stand at zero.",
        description="{{ $labels.model_name }} engine {{ $labels.engine }}: its gauges are not fed.",
    ),
    Alert(
        name="KVCatchCaptureLoss", anchor="kvc503", severity="warning", wait="0m",
        expr="increase(kvcatch_capture_dropped_records_total[5m]) > 0",
        summary="kvcatch lost records of this engine.",
        description=f"{_WHO}: {{{{ $value | humanize }}}} records lost in five minutes.",
    ),
    Alert(
        name="KVCatchSlowFirstToken", anchor="slow-first-token", severity="warning", wait="5m",
        expr=f"model_name:vllm_time_to_first_token_seconds:p99_5m > {T.ttft_p99_warning_seconds}",
        summary="First tokens are slow.",
        description="{{ $labels.model_name }}: p99 time to first token is {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="KVCatchSlowFirstTokenCritical", anchor="slow-first-token", severity="critical", wait="5m",
        expr=f"model_name:vllm_time_to_first_token_seconds:p99_5m > {T.ttft_p99_critical_seconds}",
        summary="First tokens are very slow.",
        description="{{ $labels.model_name }}: p99 time to first token is {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="KVCatchScaleOut", anchor="scale-out", severity="info", wait="2m",
        expr=f"model_name:kvcatch_committed:ratio > {T.committed_target_ratio}",
        summary="Demand for KV blocks is above the target of the autoscaler.",
        description=f"{{{{ $labels.model_name }}}}: {_PERCENT} of all usable blocks are held or asked for.",
    ),
    Alert(
        name="KVCatchTargetDown", anchor="target-down", severity="warning", wait="2m",
        expr="kvcatch_up == 0",
        summary="kvcatch gets no data from this engine.",
        description=f"{_WHO} does not answer.",
    ),
)  # fmt: skip


def recording_rules() -> dict[str, Any]:
    """The rule file of the recording rules."""
    rules = [{"record": name, "expr": expr} for name, expr in RECORDING.items()]
    return {"groups": [{"name": "kvcatch.recording", "rules": rules}]}


def alert_rules(runbook_url: str) -> dict[str, Any]:
    """The rule file of the alerts; ``runbook_url`` is the address of the runbook page."""
    return {"groups": [{"name": "kvcatch.alerts", "rules": [_alert(row, runbook_url) for row in ALERTS]}]}


def _alert(row: Alert, runbook_url: str) -> dict[str, Any]:
    labels = {"severity": row.severity}
    if row.anchor.startswith("kvc"):
        labels["code"] = row.anchor.upper()
    target = "{{ $labels.target }}" if "$labels.target" in row.description else "{{ $labels.instance }}"
    return {
        "alert": row.name,
        "expr": row.expr,
        "for": row.wait,
        "labels": labels,
        "annotations": {
            "summary": row.summary,
            "description": row.description,
            "runbook_url": f"{runbook_url}#{row.anchor}",
            "command": f"kvcatch doctor {target}",
        },
    }

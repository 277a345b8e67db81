"""The table of findings: code, name, what it means, what to do. Runbook, alerts and doctor read this one table.

The checks live in the ``rules_*`` modules beside this one, one function per finding.
"""

from __future__ import annotations

import msgspec

from kvcatch.results import Evidence, Finding


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. ``severity`` is the usual one; a finding's own follows its impact.

    needs: what a target must tell, in words. thresholds: fields of ``thresholds.Limits`` it depends on.
    ``verb`` is the verb that looks for it.
    """

    code: str
    name: str
    severity: str
    summary: str
    cause: str
    remedy: str
    needs: str
    thresholds: tuple[str, ...] = ()
    verb: str = "doctor"

    @property
    def anchor(self) -> str:
        """The section of the runbook."""
        return self.code.lower()


def _rule(code: str, name: str, severity: str, summary: str, cause: str, remedy: str, needs: str, *thresholds: str,
          verb: str = "doctor") -> Rule:  # fmt: skip
    return Rule(
        code=code, name=name, severity=severity, summary=summary, cause=cause, remedy=remedy, needs=needs,
        thresholds=thresholds, verb=verb,
    )  # fmt: skip


_TABLE = (
    _rule("KVC001", "kv-pressure", "warning", "Requests wait for KV blocks while the pool is nearly full.",
          "Demand for KV blocks is above what the pool holds safely.",
          "Admit less (--max-num-seqs, kvcatch gateway), keep some blocks free at admission (--watermark 0.05), or "
          "give the cache more memory (--gpu-memory-utilization, --kv-cache-dtype fp8, more cards).",
          "block usage and the queue", "watermark_ratio", "full_ratio", "pressure_time_ratio"),
    _rule("KVC002", "preemption-storm", "warning", "Preempted requests make the engine compute tokens again.",
          "More requests are admitted than can grow to their full length, so they throw each other out.",
          "Keep blocks free at admission: --watermark 0.05 (versions without it: kvcatch's scheduler), lower "
          "--max-num-seqs, or cap output lengths at the gateway.",
          "preemptions with recomputed tokens, or their counter", "preemptions", "recomputed_share",
          "recomputed_share_critical", "preemptions_of_one", "preemptions_per_request"),
    _rule("KVC003", "block-hog", "warning", "One request or tenant holds a large share of the pool.",
          "An over-long request takes blocks that many others wait for.",
          "Limit input length at the gateway and give long requests a small share of their own.",
          "a record of requests", "hog_share", "hog_times_median", "tenant_share"),
    _rule("KVC004", "exhaustion-ahead", "warning", "At its present growth the pool is full within minutes.",
          "Running requests grow faster than others finish.",
          "Hold back new long requests now; lower --max-num-seqs or raise --watermark before the next peak.",
          "block usage over at least a minute of a running engine", "exhaustion_seconds", "trend_seconds"),
    _rule("KVC005", "request-never-fits", "critical", "A request waits that can never run.",
          "The request at the head of the queue needs more blocks than the pool has, and blocks all behind it.",
          "Abort it; reject at the gateway what cannot fit (--max-input-tokens); or lower --max-model-len to what "
          "the pool holds.", "queue and block usage", "empty_ratio", "stuck_seconds"),
    _rule("KVC006", "admission-livelock", "critical", "Prefill is repeated without any output.",
          "A request is computed almost to its end, runs out of blocks, is thrown out and starts again.",
          "Abort it; keep a block per KV group free: the longest safe request is the pool's tokens less one block "
          "for each group.", "prefill and output tokens over time", "stuck_seconds"),
    _rule("KVC007", "not-kv-bound", "info", "Requests queue although KV blocks are free.",
          "Compute or prefill is the limit: the step's token budget is spent before the pool is.",
          "More KV memory will not help. Add engines, raise --max-num-batched-tokens if TTFT allows, or shorten "
          "prompts.", "queue, block usage and preemptions", "low_usage_ratio", "waiting", "limit_time_ratio"),
    _rule("KVC008", "kv-leak", "critical", "Blocks are held that no live request owns.",
          "Blocks were not given back after an abort, a transfer or a failed request.",
          "Restart the engine in a quiet moment; with a KV connector lower its abort timeout and upgrade.",
          "block usage at idle", "leak_ratio"),
    _rule("KVC009", "long-generation", "info", "Growth of the pool comes from one request's own output.",
          "A request generates for a long time and keeps every block it fills; this is not a leak.",
          "Cap its output (max_tokens, or a limit at the gateway) if it is not wanted.",
          "a record of requests", "long_output_share"),
    _rule("KVC010", "limit-not-kv", "info", "max_num_seqs limits the engine while blocks are free.",
          "The engine runs as many requests as it may; KV memory is not the limit.",
          "Raise --max-num-seqs if latency allows, or leave it: the pool has room.",
          "which limit bound the steps, or running requests beside max_num_seqs", "limit_time_ratio"),
    _rule("KVC101", "oom-non-kv", "critical", "Memory outside the engine's budget ran out.",
          "Memory that vLLM's profile run did not see grew into the space that was left.",
          "Lower --gpu-memory-utilization by the amount shown, or set --kv-cache-memory-bytes.", "a log with the out-of-memory text",
          "oom_slack_bytes"),
    _rule("KVC102", "oom-sampler-warm-up", "critical", "The sampler's warm-up did not fit.",
          "After the KV cache is taken, vLLM samples max_num_seqs dummy requests: max_num_seqs x vocabulary x 4 bytes.",
          "Lower --max-num-seqs or --gpu-memory-utilization as shown.", "a log with the out-of-memory text"),
    _rule("KVC103", "oom-logprobs", "critical", "Log probabilities of prompts did not fit.",
          "Prompt log probabilities need the logits of every prompt token: tokens x vocabulary x 6 bytes, not in the profile.",
          "Cap prompt tokens of requests with prompt_logprobs at the gateway, or leave that much memory free.",
          "a log with the out-of-memory text"),
    _rule("KVC104", "oom-cuda-graphs", "critical", "CUDA graph capture did not fit.",
          "Before vLLM 0.21 graphs are not part of the memory budget.",
          "Lower --gpu-memory-utilization by the graphs' share, capture fewer sizes (--cuda-graph-sizes), or use "
          "--enforce-eager.", "a log with the out-of-memory text"),
    _rule("KVC105", "oom-allocator-fragmentation", "critical", "PyTorch holds enough memory, in pieces too small.",
          "Reserved but unallocated memory exceeds the request that failed.",
          "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower --gpu-memory-utilization.",
          "a log with the out-of-memory text"),
    _rule("KVC106", "oom-stacked-peaks", "critical", "Several peaks met at one moment.",
          "Activations of a large batch came on top of a full budget while serving.",
          "Lower --max-num-batched-tokens or --gpu-memory-utilization as shown.", "a log with the out-of-memory text"),
    _rule("KVC107", "oom-other-process", "critical", "Another process holds memory of the card.",
          "The engine's share of the card and the other process's do not fit together.",
          "Find the process with nvidia-smi and move it, or lower --gpu-memory-utilization as shown.",
          "a log, or the memory of worker ranks", "others_ratio"),
    _rule("KVC108", "oom-impossible-size", "critical", "One allocation is larger than the whole card.",
          "A size was computed wrongly, or a setting is out of proportion; no load explains it.",
          "Check the model's configuration and the last setting that was changed; report it to the engine.",
          "a log with the out-of-memory text"),
    _rule("KVC109", "oom-multimodal-profile", "critical", "The profile run's largest image did not fit.",
          "vLLM profiles with the largest image or video that the processor accepts.",
          "Set --mm-processor-kwargs with a smaller max_pixels and --limit-mm-per-prompt.", "a log with the out-of-memory text"),
    _rule("KVC110", "start-refused-capacity", "critical", "The engine refused to start: its longest request does not fit.",
          "max_model_len needs more KV memory than is left after weights and activations.",
          "Start with the --max-model-len shown, or give the cache more memory (kvcatch plan says what fits).",
          "a log"),
    _rule("KVC111", "memory-profile-disturbed", "critical", "Memory changed while vLLM measured it.",
          "Another process freed or took memory on the card during the profile run.",
          "Start engines one after the other, or set --kv-cache-memory-bytes, which needs no profile.", "a log"),
    _rule("KVC201", "prefix-shorter-than-block", "warning", "The shared prefix is shorter than one block.",
          "Only whole blocks can be reused, on borders that all KV groups share.",
          "Use a smaller block (--block-size, --prefix-match-unit on hybrids) or make the shared part longer.",
          "prefix counters and the block size, or hash chains", "large_block_tokens", "queried_tokens", "lost_share"),
    _rule("KVC202", "prefix-diverges", "warning", "Changing content breaks a prefix that is otherwise shared.",
          "A date, a counter or a name stands before text that all requests share; all after it is computed again.",
          "Move the changing part behind the shared text (kvcatch prefix shows where and what it wins).",
          "hash chains, or a request log", "lost_share", verb="prefix"),
    _rule("KVC203", "prefix-evicted", "warning", "Prefixes were in the cache but had been evicted.",
          "The pool is too small for the reuse distance of this traffic.",
          "More KV memory, up to the number of blocks shown (kvcatch simulate --curve draws the rest).",
          "hash chains, or a request log", "lost_share", verb="prefix"),
    _rule("KVC204", "prefix-not-shared", "info", "Requests share nothing: a low hit ratio is normal here.",
          "Every prompt is new from its first block.", "Nothing to do for the cache.",
          "hash chains, or a request log", "hit_ratio", verb="prefix"),
    _rule("KVC205", "prefix-caching-off", "warning", "Prefix caching is off.",
          "The effective configuration differs from what was asked for, or caching was never switched on.",
          "Start with --enable-prefix-caching; if the engine still refuses, drop the feature that excludes it "
          "(fp8 KV on some models and versions).", "the effective configuration", "queried_tokens"),
    _rule("KVC206", "prefix-scattered", "warning", "The same prefix is computed on several engines.",
          "Requests with one prefix go to different engines.",
          "Route by prefix or session at the gateway.", "request logs that name the engine, or engines of one service",
          "lost_share", verb="prefix"),
    _rule("KVC207", "hit-rate-untrustworthy", "warning", "The hit rate cannot be believed.",
          "Lookups are counted again for every failed admission (before vLLM 0.31), or preempted requests hit their own blocks.",
          "Compare with the admitted lookups that kvcatch records, or upgrade to 0.31 or newer.",
          "prefix and prompt token counters", "inflated_ratio"),
    _rule("KVC208", "hash-seed-mismatch", "warning", "Processes hash the same tokens differently.",
          "Without PYTHONHASHSEED each process seeds its hashes at random.",
          "Export the same PYTHONHASHSEED for every process.", "a log"),
    _rule("KVC209", "unit-mismatch", "warning", "Block sizes differ where blocks are exchanged.",
          "Router, connector and engine cut prompts at different borders.",
          "Give all of them one block size, or a multiple of it.", "several targets, or a log with a connector"),
    _rule("KVC210", "prefix-order", "info", "Hits are lost to the order of arrival.",
          "Requests that share a prefix arrive apart, so it is evicted in between, or together, while it is computed.",
          "Group requests that share a prefix, or send the first one ahead.", "hash chains, or a request log",
          "lost_share", verb="prefix"),
    _rule("KVC301", "internal-fragmentation", "warning", "Held blocks are largely empty.",
          "Requests are short against the block size: the last block of each is mostly unused.",
          "Use a smaller --block-size.", "held tokens beside held blocks", "fragmentation_ratio", "fragmentation_usage"),
    _rule("KVC302", "hybrid-state-pinned", "warning", "Fixed state blocks of each request fill the pool.",
          "Every running request pins a block in each state group, however short it is, and long prompts keep more.",
          "Lower --max-num-seqs, or raise --mamba-block-size.", "KV groups and running requests, or a hybrid's printed "
          "tokens beside those alive", "state_share", "state_page_share"),
    _rule("KVC303", "padding-layers", "info", "Layers were added to fill KV groups.",
          "Layer kinds do not divide evenly, so each block reserves room for layers that do not exist.",
          "Nothing to set; kvcatch plan counts it.", "a log"),
    _rule("KVC304", "rank-imbalance", "warning", "One rank's memory limits all others.",
          "The pool is as small as the fullest rank allows.",
          "Compare the ranks' memory; with pipeline stages move layers away from the fullest one.",
          "a log, or the memory of worker ranks", "rank_ratio"),
    _rule("KVC305", "dp-imbalance", "warning", "Engines of one service are unevenly filled.",
          "Requests are spread by count, not by the blocks they hold.",
          "Route by KV usage or by prefix (kvcatch serve gives /v1/headroom per engine).",
          "several engines of one service", "uneven_usage", "uneven_running"),
    _rule("KVC401", "regression-preemption", "warning", "The second run preempts more.", "Less room or other admission rules.",
          "See the drift that compare names.", "two runs", verb="compare"),
    _rule("KVC402", "regression-capacity", "warning", "The second run has fewer KV tokens.", "More memory went elsewhere.",
          "See the drift that compare names.", "two runs", verb="compare"),
    _rule("KVC403", "regression-queue", "warning", "The second run queues longer.", "Lower throughput at the same load.",
          "See the drift that compare names.", "two runs", verb="compare"),
    _rule("KVC404", "regression-reuse", "warning", "The second run hits fewer prefix tokens.", "Reuse was lost.",
          "See the drift that compare names.", "two runs", verb="compare"),
    _rule("KVC405", "regression-drift", "warning", "Configuration or defaults differ.", "A flag, default or variable changed.",
          "Paste the flag that restores the old value.", "two runs", verb="compare"),
    _rule("KVC406", "regression-fragmentation", "warning", "The second run needs more blocks for the same tokens.",
          "Block size or groups changed.", "See the drift that compare names.", "two runs", verb="compare"),
    _rule("KVC407", "regression-first-token", "warning", "First tokens come later in the second run, though nobody queues longer.",
          "A prompt takes more steps, or each step longer.", "See the drift that compare names; then bisect.", "two runs",
          verb="compare"),
    _rule("KVC501", "metric-missing", "warning", "A series that kvcatch needs is not there.",
          "It was renamed or removed by an upgrade, or the page was cut.",
          "Read it as unknown, never as zero; update dashboards and routers that use the old name.", "a metrics page"),
    _rule("KVC502", "metric-stuck", "warning", "Gauges stand at zero while tokens flow.",
          "The engine does not feed its load metrics.",
          "Do not let admission or routing depend on them; upgrade the engine's metrics layer.",
          "at least two metrics pages", "stuck_tokens"),
    _rule("KVC503", "capture-loss", "warning", "Records were lost.",
          "The drainer or reader was slower than the engine, or a hook failed.",
          "Give the ring more room (KVCATCH_RING_BYTES) or the drainer a core of its own; after a hook error see the engine's log.",
          "a recording"),
    _rule("KVC504", "lifetimes-untrustworthy", "info", "The engine's block lifetimes count blocks that were never cached.",
          "vLLM (seen up to 0.33) notes an eviction whenever a block is used anew, also where it held nothing reusable.",
          "Do not size the cache by short vllm:kv_block_lifetime_seconds; the residency times of a recording "
          "(kvcatch report) count cached blocks only.",
          "the engine's residency histograms, or a log with its arguments", "lifetimes"),
    _rule("KVC601", "kv-quality-loss", "critical", "A quantised KV cache changes answers.",
          "Scales are missing or wrong, or the format is too coarse.", "Go back to the unquantised cache; see kvcatch quality.",
          "a quality run", verb="quality"),
)  # fmt: skip

#: code -> rule
RULES: dict[str, Rule] = {rule.code: rule for rule in _TABLE}

ORDER = {"critical": 0, "warning": 1, "info": 2}


def found(
    code: str,
    severity: str,
    title: str,
    *evidence: Evidence,
    cause: str = "",
    remedy: str = "",
    request_id: str | None = None,
    tenant: str | None = None,
    unix_seconds: float | None = None,
) -> Finding:
    """A finding of the table, with this case's numbers; cause and remedy default to the table's."""
    rule = RULES[code]
    return Finding(
        code=code, severity=severity, title=title, evidence=evidence, cause=cause or rule.cause,
        remedy=remedy or rule.remedy, anchor=rule.anchor, request_id=request_id, tenant=tenant,
        unix_seconds=unix_seconds,
    )  # fmt: skip


def fact(
    text: str, value: float | None = None, unit: str | None = None, source: str | None = None
) -> Evidence:
    """One piece of evidence."""
    return Evidence(text=text, value=None if value is None else float(value), unit=unit, source=source)


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """The most severe first, then by code."""
    return tuple(sorted(findings, key=lambda one: (ORDER[one.severity], one.code)))

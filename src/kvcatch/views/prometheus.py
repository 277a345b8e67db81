"""Observations as Prometheus metrics: every row of the catalogue, nothing that is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from kvcatch import __version__
from kvcatch.metrics import CATALOGUE, Metric
from kvcatch.results import RankView, Snapshot, TenantView
from kvcatch.sources.cards import binding_rank
from kvcatch.sources.scrape import NEVER_KNOWN
from kvcatch.views.targets import Observation

#: tenants with a series of their own per engine; the rest is added up as "other"
TOP_TENANTS = 10
TIER = "device"

Value = tuple[tuple[str, ...], float]
Rows = Iterator[Value]
#: metric name -> the label values and numbers of one engine
_RULES: dict[str, Callable[[Observation], Rows]] = {}


def _rule(name: str) -> Callable[[Callable[[Observation], Rows]], Callable[[Observation], Rows]]:
    def register(function: Callable[[Observation], Rows]) -> Callable[[Observation], Rows]:
        _RULES[name] = function
        return function

    return register


def _known(*rows: tuple[tuple[str, ...], float | int | None]) -> Rows:
    """Rows whose value is known. Unknown is an absent series, never 0."""
    return ((labels, float(value)) for labels, value in rows if value is not None)


# -- the pool ----------------------------------------------------------------------------------------------
@_rule("kvcatch_kv_cache_blocks")
def _blocks(seen: Observation) -> Rows:
    pool = seen.snapshot.pool
    return _known(
        ((TIER, "active"), pool.active_blocks),
        ((TIER, "cached"), pool.cached_blocks),
        ((TIER, "free"), pool.free_blocks),
    )


@_rule("kvcatch_kv_cache_peak_blocks")
def _peaks(seen: Observation) -> Rows:
    pool = seen.snapshot.pool
    return _known(((TIER, "active"), pool.active_blocks_max), ((TIER, "cached"), pool.cached_blocks_max))


@_rule("kvcatch_kv_cache_capacity_blocks")
def _capacity(seen: Observation) -> Rows:
    return _known(((TIER,), seen.snapshot.pool.num_blocks))


@_rule("kvcatch_kv_cache_block_size_tokens")
def _block_size(seen: Observation) -> Rows:
    return _known(((), seen.snapshot.pool.block_size))


@_rule("kvcatch_kv_cache_bytes")
def _bytes(seen: Observation) -> Rows:
    size = seen.snapshot.pool.block_bytes
    if size is not None:
        for labels, blocks in _blocks(seen):
            yield labels, blocks * size


@_rule("kvcatch_kv_cache_tokens")
def _tokens(seen: Observation) -> Rows:
    return _known(((TIER, "active"), seen.snapshot.pool.active_tokens))


@_rule("kvcatch_internal_fragmentation_ratio")
def _fragmentation(seen: Observation) -> Rows:
    return _known(((), seen.snapshot.efficiency.internal_fragmentation_ratio))


# -- demand and limits -------------------------------------------------------------------------------------
@_rule("kvcatch_committed_ratio")
def _committed(seen: Observation) -> Rows:
    return _known(((), seen.committed_ratio))


@_rule("kvcatch_watermark_ratio")
def _watermark(seen: Observation) -> Rows:
    return _known(((seen.watermark_source,), seen.watermark_ratio))


@_rule("kvcatch_headroom_requests")
def _headroom(seen: Observation) -> Rows:
    return _known(((), seen.headroom.requests))


@_rule("kvcatch_headroom_limit")
def _limit(seen: Observation) -> Rows:
    if seen.headroom.limit is not None:
        yield (seen.headroom.limit,), 1.0


@_rule("kvcatch_requests_waiting")
def _waiting(seen: Observation) -> Rows:
    queues = seen.snapshot.queues
    return _known((("blocks",), queues.waiting_for_blocks), (("other",), queues.waiting_other))


@_rule("kvcatch_requests_held")
def _held(seen: Observation) -> Rows:
    return _known(((), seen.snapshot.queues.held))


# -- counters over the recorded steps ----------------------------------------------------------------------
@_rule("kvcatch_steps_total")
def _steps(seen: Observation) -> Rows:
    return iter([((name,), float(count)) for name, count in seen.bounds.items()])


def _total(column: str, labels: tuple[str, ...] = (), scale: float = 1.0) -> Callable[[Observation], Rows]:
    def rows(seen: Observation) -> Rows:
        value = seen.totals.get(column)
        return _known((labels, None if value is None else value * scale))

    return rows


_RULES["kvcatch_step_seconds_total"] = _total("step_ns", scale=1e-9)
_RULES["kvcatch_schedule_seconds_total"] = _total("schedule_ns", scale=1e-9)


@_rule("kvcatch_scheduled_tokens_total")
def _scheduled(seen: Observation) -> Rows:
    totals = seen.totals
    return _known((("prefill",), totals.get("prefill_tokens")), (("decode",), totals.get("decode_tokens")))


_RULES["kvcatch_kv_block_evictions_total"] = _total("evicted_blocks", (TIER, "capacity"))
_RULES["kvcatch_prefix_cache_queried_tokens_total"] = _total("queried_tokens")
_RULES["kvcatch_prefix_cache_hit_tokens_total"] = _total("hit_tokens")
#: (tier, direction) of transfers; remote ones are pulled by the engine that needs them
_TRANSFERS = (("offload", "load"), ("offload", "store"), ("remote", "load"))


def _transfers(unit: str) -> Callable[[Observation], Rows]:
    def rows(seen: Observation) -> Rows:
        return _known(
            *((pair, seen.totals.get(f"transfer_{pair[0]}_{pair[1]}_{unit}")) for pair in _TRANSFERS)
        )

    return rows


_RULES["kvcatch_kv_transfer_bytes_total"] = _transfers("bytes")
_RULES["kvcatch_kv_transfer_seconds_total"] = _transfers("seconds")
_RULES["kvcatch_capture_events_total"] = _total("records")


@_rule("kvcatch_prefix_cache_missed_tokens_total")
def _missed(seen: Observation) -> Rows:
    causes = ("compulsory", "capacity")
    return _known(*(((cause,), seen.totals.get(f"missed_{cause}_tokens")) for cause in causes))


_RULES["kvcatch_preemptions_total"] = _total("preemptions")
_RULES["kvcatch_preemption_recomputed_tokens_total"] = _total("recomputed_tokens")


# -- tenants -----------------------------------------------------------------------------------------------
def bounded(tenants: Sequence[TenantView], top: int = TOP_TENANTS) -> list[TenantView]:
    """The tenants with most blocks, and all others as one: a bounded number of series whoever calls."""
    ranked = sorted(tenants, key=lambda row: (-(row.num_blocks or 0), row.tenant))
    first, rest = ranked[:top], ranked[top:]
    rest += [row for row in first if row.tenant == "other"]
    first = [row for row in first if row.tenant != "other"]
    if not rest:
        return first
    other = TenantView(
        tenant="other",
        num_blocks=sum(row.num_blocks or 0 for row in rest),
        running=sum(row.running or 0 for row in rest),
        waiting=sum(row.waiting or 0 for row in rest),
    )
    return [*first, other]


@_rule("kvcatch_tenant_blocks")
def _tenant_blocks(seen: Observation) -> Rows:
    return _known(*(((row.tenant,), row.num_blocks) for row in bounded(seen.snapshot.tenants)))


@_rule("kvcatch_tenant_requests")
def _tenant_requests(seen: Observation) -> Rows:
    for row in bounded(seen.snapshot.tenants):
        yield from _known(((row.tenant, "running"), row.running), ((row.tenant, "waiting"), row.waiting))


# -- cards and ranks ---------------------------------------------------------------------------------------
def _where(rank: RankView) -> tuple[str, str, str, str]:
    numbers = (rank.tp_rank, rank.pp_rank, rank.dp_rank)
    tp, pp, dp = ("" if number is None else str(number) for number in numbers)
    return rank.device or "", tp, pp, dp


def memory_owners(rank: RankView) -> dict[str, int]:
    """Bytes of a rank's card by owner; only what is known. They add up to the card when all four are."""
    owners: dict[str, int] = {}
    used, kv, others = rank.memory_used_bytes, rank.kv_cache_bytes, rank.other_processes_bytes
    if kv is not None:
        owners["kv_cache"] = kv
    if used is not None and kv is not None:
        owners["engine_other"] = max(0, used - kv)
    if others is not None:
        owners["other_processes"] = others
    if rank.memory_total_bytes is not None and used is not None and others is not None:
        owners["free"] = max(0, rank.memory_total_bytes - used - others)
    return owners


@_rule("kvcatch_device_memory_bytes")
def _device_memory(seen: Observation) -> Rows:
    for rank in seen.snapshot.ranks:
        for owner, size in memory_owners(rank).items():
            yield (*_where(rank), owner), float(size)


@_rule("kvcatch_device_memory_peak_bytes")
def _device_peak(seen: Observation) -> Rows:
    return _known(*((_where(rank), rank.memory_peak_bytes) for rank in seen.snapshot.ranks))


@_rule("kvcatch_binding_device")
def _binding(seen: Observation) -> Rows:
    rank = binding_rank(seen.snapshot.ranks)
    if rank is not None:
        yield _where(rank), 1.0


@_rule("kvcatch_rank_step_seconds")
def _rank_steps(seen: Observation) -> Rows:
    return _known(*((_where(rank), rank.step_seconds) for rank in seen.snapshot.ranks))


# -- findings, and kvcatch itself --------------------------------------------------------------------------
@_rule("kvcatch_findings")
def _findings(seen: Observation) -> Rows:
    counts: dict[tuple[str, ...], float] = {}
    for finding in seen.snapshot.findings:
        key = (finding.code, finding.severity)
        counts[key] = counts.get(key, 0.0) + 1.0
    return iter(counts.items())


@_rule("kvcatch_up")
def _up(seen: Observation) -> Rows:
    yield (), float(seen.up)


@_rule("kvcatch_last_sample_timestamp_seconds")
def _stamp(seen: Observation) -> Rows:
    return _known(((), seen.snapshot.unix_seconds))


@_rule("kvcatch_scrape_duration_seconds")
def _read_seconds(seen: Observation) -> Rows:
    return _known(((), seen.read_seconds))


@_rule("kvcatch_unknown_series")
def _unknown(seen: Observation) -> Rows:
    loss = seen.snapshot.loss
    # What no page can tell is no news.
    unknown = set(loss.unknown) - set(NEVER_KNOWN if seen.snapshot.source == "scrape" else ())
    yield (), float(len(unknown) + len(loss.warnings))


@_rule("kvcatch_capture_dropped_records_total")
def _dropped(seen: Observation) -> Rows:
    if seen.snapshot.source != "scrape" and seen.up:
        yield (), float(seen.snapshot.loss.dropped_records)


@_rule("kvcatch_capture_hook_errors_total")
def _hook_errors(seen: Observation) -> Rows:
    if seen.snapshot.source != "scrape" and seen.up:
        yield (), float(seen.snapshot.loss.hook_errors)


@_rule("kvcatch_engine_info")
def _info(seen: Observation) -> Rows:
    snapshot = seen.snapshot
    yield (snapshot.engine or "", snapshot.engine_version or "", snapshot.source, snapshot.state), 1.0


#: what must not be shown for a target that no longer answers: the state is gone, the counters stay
_GAUGES_OF_THE_DEAD = frozenset(
    {"kvcatch_up", "kvcatch_last_sample_timestamp_seconds", "kvcatch_scrape_duration_seconds",
     "kvcatch_engine_info", "kvcatch_unknown_series"}
)  # fmt: skip


class EngineCollector(Collector):
    """Builds every family anew at each scrape from the latest observations."""

    def __init__(self, observations: Callable[[], Iterable[Observation]]) -> None:
        self._observations = observations

    def describe(self) -> list[Any]:
        """Nothing: registering must not read any target."""
        return []

    def collect(self) -> Iterator[Any]:
        """One family per catalogue row that has data, plus what this exporter is."""
        observations = _distinct(self._observations())
        for metric in CATALOGUE:
            if metric.exporter != "serve":
                continue
            family = _family(metric)
            if metric.per_engine:
                for seen, engine_labels in observations:
                    if not seen.up and metric.kind == "gauge" and metric.name not in _GAUGES_OF_THE_DEAD:
                        continue
                    for labels, value in _RULES[metric.name](seen):
                        family.add_metric([*engine_labels, *labels], value)
            else:
                family.add_metric([__version__], 1.0)
            if family.samples:
                yield family


def _family(metric: Metric) -> Any:
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(metric.family, metric.help, labels=list(metric.all_labels))


def _distinct(observations: Iterable[Observation]) -> list[tuple[Observation, tuple[str, str, str]]]:
    """Observations with labels that differ, whatever was passed twice on the command line."""
    taken: set[tuple[str, str, str]] = set()
    rows = []
    for seen in observations:
        model = _model(seen.snapshot)
        labels = (seen.target, model, seen.engine)
        if labels not in taken:
            taken.add(labels)
            rows.append((seen, labels))
    return rows


def _model(snapshot: Snapshot) -> str:
    return snapshot.model or ""


def registry(observations: Callable[[], Iterable[Observation]]) -> CollectorRegistry:
    """A registry that holds nothing but the engines."""
    made = CollectorRegistry(auto_describe=False)
    made.register(EngineCollector(observations))
    return made

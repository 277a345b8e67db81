"""Metrics of the gateway itself, under the names of the catalogue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvcatch.metrics import BY_NAME

if TYPE_CHECKING:
    from kvcatch.gateway.gate import Gate


class Meters:
    """What was decided and why, and the state that decisions rest on."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        metric = BY_NAME["kvcatch_gateway_decisions_total"]
        self._decisions = Counter(metric.family, metric.help, metric.all_labels, registry=self.registry)
        self._waiting = self._gauge("kvcatch_gateway_requests_waiting")
        self._in_flight = self._gauge("kvcatch_gateway_requests_in_flight")
        self._planned = self._gauge("kvcatch_gateway_planned_blocks")
        self._limit = self._gauge("kvcatch_gateway_limit_blocks")
        self._up = self._gauge("kvcatch_gateway_upstream_up")
        self._degraded = self._gauge("kvcatch_gateway_degraded")

        copies = BY_NAME["kvcatch_gateway_mirror_requests_total"]
        self._mirrored = Counter(copies.family, copies.help, copies.all_labels, registry=self.registry)
        self._mirror_up = self._gauge("kvcatch_gateway_mirror_active")
        self._mirror_up.set(0)
        self._mirror_stopped = self._gauge("kvcatch_gateway_mirror_stopped")

    def _gauge(self, name: str) -> Gauge:
        metric = BY_NAME[name]
        return Gauge(metric.family, metric.help, metric.all_labels, registry=self.registry)

    def decided(self, outcome: str, reason: str) -> None:
        """A request is over: relayed | refused | cancelled | failed, and why."""
        self._decisions.labels(outcome=outcome, reason=reason).inc()

    def would_hold(self, reason: str) -> None:
        """A request went on although it would have been held in another mode."""
        self._decisions.labels(outcome="would-hold", reason=reason).inc()

    def mirrored(self, outcome: str) -> None:
        """What became of a request that was chosen for the mirror; ``stopped-REASON`` ends it."""
        if outcome == "started":
            self._mirror_up.set(1)
        elif outcome.startswith("stopped-"):
            self._mirror_up.set(0)
            self._mirror_stopped.labels(reason=outcome.removeprefix("stopped-")).set(1)
        else:
            self._mirrored.labels(outcome=outcome).inc()

    def page(self, gate: Gate, accept: str) -> tuple[bytes, str]:
        """All of it, as a scraper wants it: (text, content type)."""
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        self.look(gate)
        return encode(self.registry), content_type

    def look(self, gate: Gate) -> None:
        """Bring the gauges up to date."""
        now = time.monotonic()
        self._waiting.set(gate.door.waiting)
        for engine in gate.engines:
            self._in_flight.labels(upstream=engine.label).set(engine.in_flight)
            self._up.labels(upstream=engine.label).set(engine.healthy)
            self._degraded.labels(upstream=engine.label).set(engine.degraded(now))
            if engine.ledger is not None:
                self._planned.labels(upstream=engine.label).set(engine.ledger.planned_blocks())
                self._limit.labels(upstream=engine.label).set(engine.ledger.limit)

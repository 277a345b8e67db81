"""The same metrics over OTLP: names with dots, units in UCUM, read at every export from the exporter's registry."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from kvcatch import __version__
from kvcatch.errors import KVCatchError, missing_extra
from kvcatch.metrics import CATALOGUE, Metric
from kvcatch.views.prometheus import EngineCollector
from kvcatch.views.targets import Observation

#: what tells two quantities of one thing apart once their units are gone
_NOUNS = {"bytes": ".size", "seconds": ".duration"}
_UCUM = {"bytes": "By", "seconds": "s", "ratio": "1", "": "1"}


def otel_name(metric: Metric) -> str:
    """``kvcatch_kv_cache_blocks`` -> ``kvcatch.kv_cache_blocks``; units belong into the unit, not the name."""
    name = _unitless(metric)
    if sum(_unitless(other) == name for other in CATALOGUE) > 1:
        name += _NOUNS.get(metric.unit, "")
    return name.replace("_", ".", 1)


def _unitless(metric: Metric) -> str:
    name = metric.name.removesuffix("_total")
    return name.removesuffix(f"_{metric.unit}") if metric.unit in ("bytes", "seconds", "ratio") else name


def otel_unit(metric: Metric) -> str:
    """The unit in UCUM: ``By``, ``s``, ``1``, or a counted thing in braces."""
    return _UCUM.get(metric.unit, f"{{{metric.unit.removesuffix('s')}}}")


class OtelExport:
    """Exports the fleet until ``close``. ``reader`` is an OpenTelemetry metric reader.

    Raises KVCatchError when the OpenTelemetry SDK is not installed.
    """

    def __init__(self, observations: Callable[[], Iterable[Observation]], reader: Any) -> None:
        sdk, resources = _sdk("opentelemetry.sdk.metrics"), _sdk("opentelemetry.sdk.resources")
        self._api = _sdk("opentelemetry.metrics")
        self._collector = EngineCollector(observations)
        resource = resources.Resource.create({"service.name": "kvcatch", "service.version": __version__})
        self._provider = sdk.MeterProvider(metric_readers=[reader], resource=resource)
        meter = self._provider.get_meter("kvcatch", __version__)
        for metric in CATALOGUE:
            if metric.exporter == "serve":
                counter = metric.kind == "counter"
                make = meter.create_observable_counter if counter else meter.create_observable_gauge
                make(
                    otel_name(metric), callbacks=[self._reader_of(metric)], unit=otel_unit(metric),
                    description=metric.help,
                )  # fmt: skip

    def _reader_of(self, metric: Metric) -> Callable[[Any], list[Any]]:
        def read(options: Any) -> list[Any]:
            families = {family.name: family for family in self._collector.collect()}
            family = families.get(metric.family)
            return [
                self._api.Observation(sample.value, dict(sample.labels))
                for sample in (family.samples if family is not None else ())
            ]

        return read

    def close(self) -> None:
        """Send what is left and stop."""
        self._provider.shutdown()


def otlp_reader(endpoint: str, interval_seconds: float) -> Any:
    """A reader that sends to an OTLP/HTTP endpoint such as ``http://collector:4318``."""
    if not endpoint.startswith(("http://", "https://")):
        raise KVCatchError(f"--otlp {endpoint}: not an http:// address.", "Write http://collector:4318")
    export = _sdk("opentelemetry.sdk.metrics.export")
    http = _sdk("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    url = endpoint.rstrip("/")
    exporter = http.OTLPMetricExporter(endpoint=url if url.endswith("/v1/metrics") else f"{url}/v1/metrics")
    return export.PeriodicExportingMetricReader(exporter, export_interval_millis=interval_seconds * 1000)


def _sdk(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise missing_extra("opentelemetry-sdk", "otel") from None

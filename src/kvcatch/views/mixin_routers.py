"""Configuration of routers and autoscalers from measured watermarks.

Field names are those of the llm-d router's documentation (API ``llm-d.ai/v1alpha1``), of the Gateway API Inference
Extension (``inference.networking.x-k8s.io/v1alpha1``) and of AIBrix 0.7 (``autoscaling.aibrix.ai/v1alpha1``). What no
measurement of ours gives (depth of queues, staleness, weights) is left to their defaults.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcatch.views.yaml import dump

_SCORERS = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer")
_DETECTOR = "utilization-detector"


@dataclass(frozen=True)
class Measured:
    """One engine's watermark. where: the file; ratio: safe used fraction of its usable blocks, above 0 and up to 1."""

    where: str
    ratio: float
    unix_seconds: float
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        day = (
            time.strftime("%Y-%m-%d", time.gmtime(self.unix_seconds))
            if self.unix_seconds
            else "at an unknown time"
        )
        known = ", ".join(f"{name} {value}" for name, value in self.config.items())
        told = f"{self.ratio:.3f} of the usable blocks, measured {day}, {self.where}" + (
            f" ({known})" if known else ""
        )
        return " ".join(told.split())  # it becomes a comment: one line, whatever the file holds


def routers(measured: Sequence[Measured]) -> dict[str, str]:
    """Relative path -> text. One pool has one threshold: the lowest of its engines."""
    lowest = min(measured, key=lambda one: one.ratio)
    # Rounded down: the line is where latency starts to bend.
    ratio = int(lowest.ratio * 1000) / 1000
    head = "".join(f"# {one}\n" for one in measured)
    if len(measured) > 1:
        head += "# A pool has one threshold: the lowest.\n"
    detector = {"type": _DETECTOR, "parameters": {"kvCacheUtilThreshold": ratio}}
    plugins = [detector, *({"type": name} for name in _SCORERS)]
    profiles = [{"name": "default", "plugins": [{"pluginRef": name} for name in _SCORERS]}]
    llm_d = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "featureGates": ["flowControl"],
        "plugins": plugins,
        "flowControl": {"saturationDetector": {"pluginRef": _DETECTOR}},
        "schedulingProfiles": profiles,
    }
    extension = {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "saturationDetector": {"pluginRef": _DETECTOR},
        "schedulingProfiles": profiles,
    }
    autoscaler = {
        "apiVersion": "autoscaling.aibrix.ai/v1alpha1",
        "kind": "PodAutoscaler",
        "metadata": {"name": "vllm"},
        "spec": {
            "scalingStrategy": "APA",
            "minReplicas": 1,
            "maxReplicas": 8,
            "metricsSources": [
                {
                    "metricSourceType": "pod",
                    "protocolType": "http",
                    "port": "8000",
                    "path": "metrics",
                    "targetMetric": "kv_cache_usage_perc",
                    "targetValue": str(ratio),
                }
            ],
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm"},
        },
    }
    yours = "# Name, port and numbers of replicas are yours to set.\n"
    return {
        "routers/llm-d.yaml": head + dump(llm_d),
        "routers/gateway-api-inference-extension.yaml": head + dump(extension),
        "routers/aibrix-autoscaler.yaml": head + yours + dump(autoscaler),
    }

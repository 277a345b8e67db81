"""kvcatch's own exporter in a Prometheus: who held the blocks of an engine whose series are there too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from kvcatch.metrics import BY_NAME
from kvcatch.sources.readings import EngineKey

Floats = npt.NDArray[np.float64]

_BLOCKS, _REQUESTS = "kvcatch_tenant_blocks", "kvcatch_tenant_requests"
_CAPACITY = "kvcatch_kv_cache_capacity_blocks"
NAMES = tuple(BY_NAME[name].name for name in (_BLOCKS, _REQUESTS, _CAPACITY))
#: labels that a scrape adds: the exporter's own are not the engine's
_SCRAPED = ("job", "instance", "pod", "service", "container", "endpoint", "node")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\')\s*(?:,|$)')

#: value by unix seconds
_Points = dict[float, float]


@dataclass(eq=False)
class Holdings:
    """One engine's tenants over time. target: as the exporter names the engine. instance: the exporter's own."""

    target: str
    model: str
    engine: str
    instance: str
    capacity: _Points = field(default_factory=dict)
    blocks: dict[str, _Points] = field(default_factory=dict)
    running: dict[str, _Points] = field(default_factory=dict)

    def at(self, moments: Floats) -> tuple[dict[str, Floats], dict[str, Floats], Floats]:
        """Blocks and running requests by tenant, and usable blocks, at these unix seconds; NaN where not known."""
        held = {name: _along(points, moments) for name, points in self.blocks.items()}
        running = {name: _along(points, moments) for name, points in self.running.items()}
        return held, running, _along(self.capacity, moments)


def _along(points: _Points, moments: Floats) -> Floats:
    # Both come from range queries over the same points in time; those are written with three decimals.
    rounded = {round(stamp, 2): value for stamp, value in points.items()}
    return np.array([rounded.get(round(float(moment), 2), np.nan) for moment in moments])


def matchers_for(matchers: str) -> str:
    """The label matchers that mean the same for the exporter: those of the scrape itself are left out."""
    kept = [f"{name}{how}{value}" for name, how, value in _MATCHER.findall(matchers) if name not in _SCRAPED]
    return ",".join(kept)


def holdings(rows: Iterable[Mapping[str, Any]]) -> list[Holdings]:
    """The engines in the result of a range query for ``NAMES``."""
    found: dict[tuple[str, str, str, str], Holdings] = {}
    for row in rows:
        labels, values = row.get("metric"), row.get("values")
        if not isinstance(labels, dict) or not isinstance(values, list):
            continue
        text = {name: str(value) for name, value in labels.items()}
        key = (
            text.get("target", ""),
            text.get("model_name", ""),
            text.get("engine", "0"),
            text.get("instance", ""),
        )
        one = found.setdefault(key, Holdings(*key))
        name, tenant, points = text.get("__name__"), text.get("tenant", "-"), _points(values)
        if name == _CAPACITY:
            one.capacity |= points
        elif name == _BLOCKS:
            one.blocks.setdefault(tenant, {}).update(points)
        elif name == _REQUESTS and text.get("status") == "running":
            one.running.setdefault(tenant, {}).update(points)
    return [one for one in found.values() if one.blocks and one.capacity]


def _points(values: Sequence[Any]) -> _Points:
    points = {}
    for pair in values:
        try:
            stamp, value = float(pair[0]), float(pair[1])
        except (TypeError, ValueError, IndexError, KeyError):
            continue
        if np.isfinite(value) and value >= 0:
            points[stamp] = value
    return points


def assign(found: Sequence[Holdings], keys: Sequence[EngineKey]) -> dict[EngineKey, Holdings]:
    """Which holdings belong to which engine; an engine whose own cannot be told from others' gets none."""
    result: dict[EngineKey, Holdings] = {}
    for key in keys:
        mine = [one for one in found if _may_be(one, key)]
        rivals = [other for other in keys if other != key and any(_may_be(one, other) for one in mine)]
        if len(mine) > 1 or rivals:
            mine = [one for one in mine if _same_host(one, key)]
            rivals = [other for other in rivals if any(_same_host(one, other) for one in mine)]
        if len(mine) == 1 and not rivals:
            result[key] = mine[0]
    return result


def _may_be(one: Holdings, key: EngineKey) -> bool:
    # A recorder knows the last part of a model's name only.
    same_model = not one.model or not key.model or _last(one.model) == _last(key.model)
    return same_model and one.engine == key.engine


def _last(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _same_host(one: Holdings, key: EngineKey) -> bool:
    """The target is this engine's address; or, where it is a recorder's name, both are scraped from one host."""
    if one.target.startswith(("http://", "https://")):
        return urlsplit(one.target).netloc == key.instance
    return bool(one.instance) and one.instance.rpartition(":")[0] == key.instance.rpartition(":")[0]

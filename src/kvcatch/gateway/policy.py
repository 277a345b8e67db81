"""What the gateway does with requests: one frozen object, built from a checked document, swapped on reload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcatch.capture.middleware import TagConfig
from kvcatch.errors import KVCatchError
from kvcatch.gateway.door import OBSERVE, Rules
from kvcatch.gateway.limits import Want
from kvcatch.gateway.truncate import REJECT

#: body cap in bytes
MAX_BODY = 8 << 20


@dataclass(frozen=True)
class Length:
    """Limits on one request, in tokens; None = none."""

    max_input: int | None = None
    over_long: str = REJECT
    max_output: int | None = None
    max_logprobs: int | None = None


@dataclass(frozen=True)
class Rates:
    """Limits of one tenant; None = none. Rates are per minute."""

    requests: int | None = None
    tokens: int | None = None
    longs: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True)
class Policy:
    """Everything that may change without a restart."""

    rules: Rules = field(default_factory=Rules)
    length: Length = Length()
    routes: dict[str, Length] = field(default_factory=dict)
    default_rates: Rates = Rates()
    tenant_rates: dict[str, Rates] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)
    tags: TagConfig = field(default_factory=TagConfig)
    trust_header: bool = True
    isolate: bool = False
    charge_unknown: str = "reserved"
    overload_status: int = 503
    max_body: int = MAX_BODY
    reserve_ratio: float | None = None  # None: by the measured watermark

    def length_of(self, route: str) -> Length:
        """The length limits of a route."""
        return self.routes.get(route, self.length)

    def wants(self, tenant: str, tokens: int, long: bool) -> list[Want]:
        """What one request reserves. tokens: all it can use, prompt and output."""
        rates = self.tenant_rates.get(tenant, self.default_rates)
        found = []
        for name, limit, window, amount in (
            ("requests", rates.requests, 60, 1),
            ("tokens", rates.tokens, 60, tokens),
            ("long", rates.longs if long else None, 60, 1),
            ("concurrency", rates.concurrency, 0, 1),
        ):
            if limit is not None:
                found.append(Want(f"{name}:{tenant or '-'}", limit, window, amount))
        return found


def from_document(document: dict[str, Any]) -> Policy:
    """The policy of a checked document. Raises KVCatchError for what only shows when fields come together."""
    gateway, long = document.get("gateway", {}), document.get("long", {})
    length = _length(document.get("length", {}), Length())
    tenants = document.get("tenants", {})
    limits = document.get("limits", {})
    base = _rates(limits, Rates())
    keys = document.get("tenant", {}).get("keys", {})
    try:
        tags = TagConfig(tables={name: document[name] for name in ("tenant", "user") if name in document})
    except ValueError as error:
        raise KVCatchError(f"{error}.") from None
    # The long class is enforced as soon as somebody gave it a number.
    enforce = long.get("enforce", bool(long.keys() & {"share", "concurrency"}))
    shares = tuple((name, float(row["share"])) for name, row in tenants.items() if "share" in row)
    rules = Rules(
        mode=gateway.get("mode", OBSERVE),
        long_tokens=long.get("tokens"),
        long_share=float(long.get("share", 0.5)),
        long_concurrency=long.get("concurrency", 0),
        long_enforced=enforce,
        tenant_shares=shares,
        max_wait=float(gateway.get("max_wait", 30.0)),
        max_queue=gateway.get("max_queue", 1024),
    )
    return Policy(
        rules=rules,
        length=length,
        routes={
            route: _length(row, length) for route, row in document.get("length", {}).get("routes", {}).items()
        },
        default_rates=base,
        tenant_rates={name: _rates(row, base) for name, row in tenants.items()},
        priorities={name: row["priority"] for name, row in tenants.items() if "priority" in row},
        tags=tags,
        trust_header=document.get("tenant", {}).get("trust_header", not keys),
        isolate=gateway.get("isolate_prefix_cache", False),
        charge_unknown=limits.get("unknown_usage", "reserved"),
        overload_status=gateway.get("overload_status", 503),
        max_body=gateway.get("max_body_bytes", MAX_BODY),
        reserve_ratio=gateway.get("reserve"),
    )


def merge(document: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``document`` with the fields of ``over`` on top, table by table."""
    merged = dict(document)
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = merge(merged[name], value)
        else:
            merged[name] = value
    return merged


def _length(row: dict[str, Any], base: Length) -> Length:
    return Length(
        max_input=row.get("max_input_tokens", base.max_input),
        over_long=row.get("over_long", base.over_long),
        max_output=row.get("max_output_tokens", base.max_output),
        max_logprobs=row.get("max_logprobs_tokens", base.max_logprobs),
    )


def _rates(row: dict[str, Any], base: Rates) -> Rates:
    return Rates(
        requests=row.get("requests_per_minute", base.requests),
        tokens=row.get("tokens_per_minute", base.tokens),
        longs=row.get("long_per_minute", base.longs),
        concurrency=row.get("concurrency", base.concurrency),
    )

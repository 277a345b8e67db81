"""What operators ask of running gateways: abort a request, hold a tenant."""

from __future__ import annotations

from typing import Any

from kvcatch import api
from kvcatch.errors import KVCatchError
from kvcatch.gateway.admin import call, gateways
from kvcatch.units import human_seconds


def _running() -> list[str]:
    paths = gateways(api.recorder_directory())
    if not paths:
        raise KVCatchError(
            "no gateway runs on this machine as this user.",
            "Start one in front of the engine (kvcatch gateway), or the engine with "
            "--middleware kvcatch.gateway.inside.GatewayMiddleware.",
        )
    return paths


def abort(request_id: str) -> list[dict[str, Any]]:
    """End a request on every gateway of this user; what was ended. Raises KVCatchError when none runs."""
    return [
        row
        for path in _running()
        for row in call(path, "POST", "/abort", {"request_id": request_id})["aborted"]
    ]


def aborted_lines(request_id: str, ended: list[dict[str, Any]]) -> list[str]:
    """What ``abort`` ended, one sentence per request. Raises KVCatchError when that is nothing."""
    if not ended:
        raise KVCatchError(f"{request_id}: no such request in flight.", "'kvcatch top' lists them.")
    return [
        f"aborted {row['request_id']} ({row['state']}"
        + (f", tenant {row['tenant']})" if row.get("tenant") else ")")
        for row in ended
    ]


def hold(tenant: str, seconds: float) -> list[dict[str, Any]]:
    """Hold a tenant on every gateway of this user, 0 ends it. Raises KVCatchError when none runs."""
    return [call(path, "POST", "/hold", {"tenant": tenant, "seconds": seconds}) for path in _running()]


def held_line(tenant: str, seconds: float, answers: list[dict[str, Any]]) -> str:
    """What ``hold`` did, in one sentence."""
    if not seconds:
        return f"{tenant}: no longer on hold"
    running = sum(answer["in_flight"] for answer in answers)
    return f"{tenant}: new requests get 429 for {human_seconds(seconds)}; {running} in flight go on"

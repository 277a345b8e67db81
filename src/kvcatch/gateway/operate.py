"""What operators ask of running gateways: abort a request, hold a tenant."""

from __future__ import annotations

from typing import Any

from kvcatch import api
from kvcatch.errors import KVCatchError
from kvcatch.gateway.admin import call, gateways


def _running() -> list[str]:
    paths = gateways(api.recorder_directory())
    if not paths:
        raise KVCatchError(
            "no gateway runs on this machine as this user.",
            "Start one in front of the engine: kvcatch gateway",
        )
    return paths


def abort(request_id: str) -> list[dict[str, Any]]:
    """End a request on every gateway of this user; what was ended. Raises KVCatchError when none runs."""
    return [
        row
        for path in _running()
        for row in call(path, "POST", "/abort", {"request_id": request_id})["aborted"]
    ]


def hold(tenant: str, seconds: float) -> list[dict[str, Any]]:
    """Hold a tenant on every gateway of this user, 0 ends it. Raises KVCatchError when none runs."""
    return [call(path, "POST", "/hold", {"tenant": tenant, "seconds": seconds}) for path in _running()]

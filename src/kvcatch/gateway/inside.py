"""The gateway as ASGI middleware inside the engine's own API server.

    vllm serve MODEL --middleware kvcatch.gateway.inside.GatewayMiddleware

``KVCATCH_GATEWAY_CONFIG`` names a policy file, as for ``kvcatch gateway --config``; without it, the gateway's defaults.
This module imports nothing that could be missing: whatever fails at start, the engine serves without us.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

#: environment variable with the policy file
CONFIG_VARIABLE = "KVCATCH_GATEWAY_CONFIG"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]


class GatewayMiddleware:
    """Governs the routes of the gateway; everything else passes as it is. environ: ``os.environ`` when None."""

    def __init__(self, app: App, environ: Mapping[str, str] | None = None) -> None:
        self.app = app
        self._served = app
        try:
            from kvcatch.gateway.asgi import Inside

            self._served = Inside(app, os.environ if environ is None else environ, self._give_up)
        except Exception as error:  # noqa: BLE001 (whatever it is, the engine serves)
            self._give_up(error)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """One ASGI call."""
        await self._served(scope, receive, send)

    def _give_up(self, error: BaseException) -> None:
        self._served = self.app
        print(
            f"WARNING kvcatch: requests are not governed, the gateway's middleware did not start: {error}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

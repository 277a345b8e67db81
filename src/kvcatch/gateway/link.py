"""The way to Redis that limits and the shared ledger have in common: scripts, time-outs, and whether it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from kvcatch.errors import KVCatchError, missing_extra

logger = logging.getLogger("kvcatch.gateway")

LEASE_SECONDS = 10
HEARTBEAT_SECONDS = 3.0
#: one command may take this long before Redis counts as lost
TIMEOUT_SECONDS = 1.0
#: commands under way at once; the rest wait their turn, which is not the server's fault
PIPELINE = 16
LOCAL, CLOSED, OPEN = "local", "closed", "open"
WHEN_LOST = (LOCAL, CLOSED, OPEN)


class Link:
    """One script at one Redis. Raises KVCatchError when the package is missing or the URL is wrong.

    what: who depends on it, for the log. when_lost: what happens meanwhile, for the log.
    """

    def __init__(self, url: str, script: str, what: str, when_lost: str) -> None:
        try:
            import redis.asyncio as client
            from redis.exceptions import RedisError
        except ImportError:
            raise missing_extra("redis", "gateway") from None
        try:
            self._redis: Any = client.Redis.from_url(
                url,
                socket_timeout=TIMEOUT_SECONDS,
                socket_connect_timeout=TIMEOUT_SECONDS,
                decode_responses=True,
            )
        except ValueError as error:
            raise KVCatchError(f"redis: {error}.", "Write for example redis://127.0.0.1:6379/0.") from None
        self.errors: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)
        self._script = self._redis.register_script(script)
        self._what, self._when_lost = what, when_lost
        self._turn = asyncio.Semaphore(PIPELINE)
        self.lost = False

    async def run(self, keys: Sequence[str], arguments: Sequence[Any]) -> list[str]:
        """One round trip. Raises one of ``errors``; then ``lost`` is True until an answer comes."""
        try:
            async with self._turn, asyncio.timeout(TIMEOUT_SECONDS * 2):
                answer: list[str] = await self._script(keys=list(keys), args=list(arguments))
        except self.errors as error:
            if not self.lost:
                logger.warning(
                    "redis does not answer (%s): %s are %s until it does",
                    type(error).__name__, self._what, self._when_lost,
                )  # fmt: skip
            self.lost = True
            raise
        if self.lost:
            logger.warning("redis answers again")
        self.lost = False
        return answer

    async def close(self) -> None:
        """Disconnect."""
        await self._redis.aclose()


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end.

    Asked again each second: a cancellation that meets a time-out inside the client's own waiting has been seen lost.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)


def options_of(table: dict[str, Any]) -> dict[str, Any]:
    """What the ``[redis]`` table of a checked document says beside the URL."""
    return {name: table[name] for name in ("prefix", "when_lost", "replicas") if name in table}

"""One request on its way through the gateway, from its first byte to its last."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvcatch.gateway.body import Ask
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.ledger import Entry

READING, COUNTING, WAITING, RELAYING = "reading", "counting", "waiting", "relaying"


@dataclass(eq=False)
class Flight:
    """What operators see of a request; no text of it is kept here.

    key: unique in this process. request_id: the client's, cleaned, or ours. output: tokens used in the end,
    None while unknown. decision: what happened and why, for metrics.
    """

    key: str
    request_id: str
    route: str
    tenant: str = ""
    state: str = READING
    started: float = field(default_factory=time.monotonic)
    task: asyncio.Task[object] | None = None
    ask: Ask | None = None
    entry: Entry | None = None
    engine: Engine | None = None
    reserved: bool = False
    answered: bool = False  # the client has seen the first byte
    aborted: str = ""  # who ended it, "" = nobody
    output: int | None = None
    events: int = 0
    sent: bool = False  # the engine may have seen it
    sent_at: float = 0.0  # time.monotonic
    first_at: float | None = None  # of the first byte from the engine

    def mark_sent(self) -> None:
        """From here on the engine may work on it, also when its client leaves before it answers."""
        self.sent_at = time.monotonic()
        self.sent = True

    def abort(self, by: str) -> bool:
        """End this request now. False when it is over already."""
        if self.task is None or self.task.done():
            return False
        self.aborted = by
        self.task.cancel()
        return True

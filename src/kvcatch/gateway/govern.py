"""The life of one request, the same behind every server: read, judge, admit, send, and give everything back once."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from kvcatch.gateway.engine import Engine
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.intake import ClientGone
from kvcatch.gateway.refusal import Refusal

logger = logging.getLogger("kvcatch.gateway")


class Answered(Protocol):
    """An answer that has been sent."""

    @property
    def status(self) -> int:
        """HTTP status."""


A = TypeVar("A", bound=Answered)
A_co = TypeVar("A_co", bound=Answered, covariant=True)


class Client(Protocol[A_co]):
    """One client's side of a request, and the way to its engine."""

    def headers(self) -> Iterable[tuple[str, str]]:
        """The request's headers."""

    async def body(self, limit: int) -> bytes:
        """The request's body. Raises Refusal."""

    async def send(self, flight: Flight, engine: Engine, payload: bytes, extra: dict[str, str]) -> A_co:
        """Ask the engine and pass its answer on, with ``extra`` headers. Raises Refusal or ClientGone."""

    async def refuse(self, flight: Flight, refusal: Refusal) -> A_co:
        """Answer without the engine."""

    def cut(self) -> None:
        """End the connection without the end of the message."""


async def governed(
    gate: Gate,
    route: str,
    request_id: str | None,
    client: Client[A],
    copy: Callable[[Flight, bytes, A], None] | None = None,
) -> A:
    """One request from its first byte to its last, in the task that is cancelled when its client leaves.

    copy: told of every answered request. Raises ClientGone, CancelledError, and what ``send`` raises beside Refusal.
    """
    flight = gate.begin(route, request_id)
    outcome, reason = "failed", "internal"
    try:
        raw = await client.body(gate.policy.max_body)
        ask = await gate.judge(flight, client.headers(), raw)
        engine = await gate.admit(flight)
        extra = {**ask.changed, "x-kvcatch-engine": engine.label} if len(gate.engines) > 1 else ask.changed
        if flight.entry is not None and flight.entry.observed:
            extra = {**extra, "x-kvcatch-would-hold": ",".join(flight.entry.observed)}
        payload = ask.encode()
        answer = await client.send(flight, engine, payload, extra)
        if answer.status in (401, 403):
            flight.sent = False  # turned away by the server's own key check: no work, no charge
        outcome = "relayed"
        reason = "ok" if answer.status < 400 else f"status-{answer.status // 100}xx"
        if copy is not None:
            copy(flight, payload, answer)
        return answer
    except Refusal as refusal:
        outcome, reason = "refused", refusal.reason
        return await client.refuse(flight, overloaded(gate, refusal))
    except ClientGone:
        outcome, reason = "cancelled", "slow-client"
        client.cut()
        raise
    except asyncio.CancelledError:
        outcome, reason = "cancelled", "client"
        if not flight.aborted:
            raise
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        outcome, reason = "cancelled", flight.aborted
        if flight.answered:
            client.cut()
            raise
        ended = Refusal(409, "aborted", "This request was aborted by an operator.", code="aborted")
        return await client.refuse(flight, ended)
    finally:
        gate.end(flight, outcome, reason)


def overloaded(gate: Gate, refusal: Refusal) -> Refusal:
    """The same refusal with the status that the policy wants for 503."""
    if refusal.status == 503:
        refusal.status = gate.policy.overload_status
    return refusal


def internal(error: Exception) -> Refusal:
    """The answer to a fault of ours. Logs where it was, without the exception's own words: they may quote the request."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("internal error: %s\n%s", type(error).__name__, where)
    return Refusal(500, "internal", "The gateway failed on this request.")

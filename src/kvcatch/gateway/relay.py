"""Pass an answer on as it comes: the same bytes, cut wherever the network cut them."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from aiohttp import web

from kvcatch.gateway import headers
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.refusal import Refusal
from kvcatch.gateway.usage import StreamMeter, output_of

#: answers up to this size with a known length are read whole before they are passed on
WHOLE = 4 << 20
#: a client that takes no byte for so long is gone, seconds
CLIENT_SECONDS = 60.0


class ClientGone(Exception):
    """The client does not read any more."""


async def relay(
    request: web.Request,
    flight: Flight,
    answer: aiohttp.ClientResponse,
    extra: dict[str, str],
) -> web.StreamResponse:
    """Send the engine's answer to the client; ``flight`` learns the tokens.

    Raises aiohttp.ClientError when the engine breaks off, ClientGone when the client does.
    """
    kept = headers.to_client(answer.headers, flight.request_id)
    kept.update(extra)
    length = answer.content_length
    plain = answer.headers.get("Content-Encoding", "identity") == "identity"
    if length is not None and length <= WHOLE:
        body = await answer.read()
        flight.answered = True
        flight.first_at = time.monotonic()
        if plain and answer.status == 200:
            flight.output = output_of(body)
        kept.popall("Content-Length", None)
        return web.Response(status=answer.status, reason=answer.reason, headers=kept, body=body)
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
    await response.prepare(request)
    flight.answered = True
    meter = StreamMeter() if plain and answer.content_type == "text/event-stream" else None
    entry = flight.entry
    async for chunk in answer.content.iter_any():
        if flight.first_at is None:
            flight.first_at = time.monotonic()
        if meter is not None:
            meter.feed(chunk)
            flight.events = meter.events
            if meter.output_tokens is not None:
                flight.output = meter.output_tokens
            if entry is not None and entry.produced is not None:
                entry.produced = max(
                    entry.produced, meter.events // max(1, entry.weight * len(entry.prompts))
                )
        await _write(response, chunk)
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, chunk: bytes) -> None:
    try:
        async with asyncio.timeout(CLIENT_SECONDS):
            await response.write(chunk)
    except TimeoutError:
        raise ClientGone from None
    except (ConnectionError, aiohttp.ClientConnectionError):
        raise ClientGone from None


async def read_body(request: web.Request, limit: int, seconds: float = 60.0) -> bytes:
    """The whole body. Raises Refusal: 413 above ``limit`` bytes, 415 when compressed, 408 when it does not come."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("", "identity"):
        raise Refusal(415, "encoding", "Send the body uncompressed.", code="unsupported_encoding")
    length = request.content_length
    if length is not None and length > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                parts.append(chunk)
    except TimeoutError:
        raise Refusal(408, "slow-body", "The body did not arrive in time.", code="timeout") from None
    except (aiohttp.ClientPayloadError, web.RequestPayloadError, aiohttp.http_exceptions.HttpProcessingError):
        raise Refusal(400, "malformed", "The body ended early or was not framed well.") from None
    return b"".join(parts)


def _too_large(limit: int) -> Refusal:
    return Refusal(
        413, "body-size", f"The body is larger than {limit} bytes.", code="request_too_large",
        details={"limit_bytes": limit},
    )  # fmt: skip

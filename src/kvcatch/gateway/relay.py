"""Pass an answer on as it comes: the same bytes, cut wherever the network cut them."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web

from kvcatch.gateway import headers
from kvcatch.gateway.answer import AnswerMeter
from kvcatch.gateway.flight import Flight
from kvcatch.gateway.intake import ClientGone, read_whole
from kvcatch.gateway.refusal import Refusal

#: a client that takes no byte for so long is gone, seconds
CLIENT_SECONDS = 60.0


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
    meter = AnswerMeter(
        flight, answer.status, answer.content_type, answer.headers.get("Content-Encoding"), answer.content_length
    )  # fmt: skip
    if meter.whole:
        body = await answer.read()
        flight.answered = True
        meter.feed(body)
        meter.end()
        kept.popall("Content-Length", None)
        return web.Response(status=answer.status, reason=answer.reason, headers=kept, body=body)
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
    await response.prepare(request)
    flight.answered = True
    async for chunk in answer.content.iter_any():
        meter.feed(chunk)
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


async def read_body(request: web.Request, limit: int) -> bytes:
    """The whole body. Raises Refusal: as ``read_whole``, and 400 when it is not framed well."""
    try:
        return await read_whole(
            request.content.iter_any(), request.headers.get("Content-Encoding"), request.content_length, limit
        )
    except (aiohttp.ClientPayloadError, web.RequestPayloadError, aiohttp.http_exceptions.HttpProcessingError):
        raise Refusal(400, "malformed", "The body ended early or was not framed well.") from None

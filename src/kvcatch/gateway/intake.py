"""A request's body, read whole and bounded, from whichever server received it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

from kvcatch.gateway.refusal import Refusal

#: a body that takes longer than this is given up, seconds
BODY_SECONDS = 60.0


class ClientGone(Exception):
    """The client does not read any more, or left before its request was whole."""


async def read_whole(
    chunks: AsyncIterable[bytes], encoding: str | None, length: int | None, limit: int, seconds: float = BODY_SECONDS
) -> bytes:  # fmt: skip
    """All chunks as one. Raises Refusal: 413 above ``limit`` bytes, 415 when compressed, 408 when it does not come.

    encoding, length: what the headers say, None when they do not.
    """
    if (encoding or "identity").lower() != "identity":
        raise Refusal(415, "encoding", "Send the body uncompressed.", code="unsupported_encoding")
    if length is not None and length > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                parts.append(chunk)
    except TimeoutError:
        raise Refusal(408, "slow-body", "The body did not arrive in time.", code="timeout") from None
    return b"".join(parts)


def _too_large(limit: int) -> Refusal:
    return Refusal(
        413, "body-size", f"The body is larger than {limit} bytes.", code="request_too_large",
        details={"limit_bytes": limit},
    )  # fmt: skip

"""Which headers pass, in both directions (RFC 9110 section 7.6.1), and what the gateway adds."""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict, CIMultiDictProxy

_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
#: the client's: consumed here, or of no use to an engine
_FROM_CLIENT = _HOP | {
    "host", "content-length", "authorization", "cookie", "x-request-id", "expect", "content-type", "api-key",
    "x-api-key", "forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip",
}  # fmt: skip
_FROM_ENGINE = _HOP | {"server", "date", "set-cookie", "x-request-id"}
#: ours, both ways: nobody else may set them
OURS = "x-kvcatch-"


def to_engine(
    client: CIMultiDictProxy[str], request_id: str, key: str | None, consumed: Iterable[str] = ()
) -> CIMultiDict[str]:
    """Headers of the request to an engine.

    key: its API key; the client's never passes. consumed: names (lower case) that said who the client is.
    """
    dropped = _FROM_CLIENT | _named(client.getall("Connection", ())) | set(consumed)
    kept: CIMultiDict[str] = CIMultiDict(
        (name, value)
        for name, value in client.items()
        if name.lower() not in dropped and not name.lower().startswith(OURS)
    )
    kept["Content-Type"] = "application/json"
    kept["X-Request-Id"] = request_id
    if key:
        kept["Authorization"] = f"Bearer {key}"
    return kept


def to_client(engine: CIMultiDictProxy[str], request_id: str) -> CIMultiDict[str]:
    """Headers of the answer to the client."""
    dropped = _FROM_ENGINE | _named(engine.getall("Connection", ()))
    kept: CIMultiDict[str] = CIMultiDict(
        (name, value)
        for name, value in engine.items()
        if name.lower() not in dropped and not name.lower().startswith(OURS)
    )
    kept["X-Request-Id"] = request_id
    return kept


def _named(connection: Iterable[str]) -> set[str]:
    """Headers that ``Connection`` names: they end at this hop."""
    return {word.strip().lower() for value in connection for word in value.split(",")}

"""What a client gets instead of an answer: OpenAI's error shape, a reason, and when to come back."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import msgspec

#: retry-after bounds in seconds, and the share added at random so that clients do not come back together
RETRY_LOW, RETRY_HIGH, JITTER = 1.0, 60.0, 0.2

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "aborted",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    502: "upstream_error",
    503: "overloaded_error",
    504: "upstream_error",
    529: "overloaded_error",
}


class Refusal(Exception):
    """The gateway answers this request itself.

    Args:
        status: 400 malformed, 413 can never fit, 429 a limit of the tenant, 503 capacity, 502 no engine.
        reason: short stable word for headers and metrics.
        message: one or two sentences for a person; never holds text of the request.
        code: OpenAI's ``error.code``.
        retry_seconds: when the same request would be taken; None = a retry is useless.
        details: numbers for ``error.details`` (limits and counts).
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        code: str | None = None,
        retry_seconds: float | None = None,
        details: Mapping[str, int | float | str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.code = code or reason
        self.retry_seconds = retry_seconds
        self.details = dict(details or {})

    def body(self) -> bytes:
        """The JSON document."""
        error: dict[str, object] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": None,
            "code": self.code,
        }
        if self.details:
            error["details"] = self.details
        return msgspec.json.encode({"error": error})

    def headers(self, jitter: float | None = None) -> dict[str, str]:
        """``x-kvcatch-reason`` and, where a retry makes sense, ``Retry-After`` and ``retry-after-ms``.

        jitter: 0 to 1, drawn when None. The wait is never shorter than ``retry_seconds``, except above a minute.
        """
        found = {"Content-Type": "application/json", "x-kvcatch-reason": self.reason}
        if self.retry_seconds is not None:
            wait = retry_after(self.retry_seconds, random.random() if jitter is None else jitter)
            found["Retry-After"] = str(math.ceil(wait))
            found["retry-after-ms"] = str(math.ceil(wait * 1000))
        return found


def retry_after(seconds: float, jitter: float) -> float:
    """Seconds to wait: at least ``seconds``, spread by up to 20 %, between 1 and 60."""
    return min(RETRY_HIGH, max(RETRY_LOW, seconds) * (1 + JITTER * jitter))

"""What a passing answer tells its flight: tokens, progress, the first byte. The bytes themselves are not touched."""

from __future__ import annotations

import time

from kvcatch.gateway.flight import Flight
from kvcatch.gateway.usage import StreamMeter, output_of

#: answers up to this size with a known length are read as one document
WHOLE = 4 << 20


class AnswerMeter:
    """Reads along with one answer.

    kind: its content type. encoding: its Content-Encoding, None without one. length: bytes, None when not stated.
    """

    def __init__(
        self, flight: Flight, status: int, kind: str | None, encoding: str | None, length: int | None
    ) -> None:
        self._flight = flight
        plain = encoding in (None, "", "identity")
        stream = plain and (kind or "").partition(";")[0].strip().lower() == "text/event-stream"
        self.whole = length is not None and length <= WHOLE
        self._stream = StreamMeter() if stream and not self.whole else None
        self._keep = plain and status == 200 and self.whole
        self._parts: list[bytes] = []

    def feed(self, chunk: bytes) -> None:
        """Some bytes have come."""
        flight, meter = self._flight, self._stream
        if flight.first_at is None:
            flight.first_at = time.monotonic()
        if self._keep:
            self._parts.append(chunk)
        if meter is None:
            return
        meter.feed(chunk)
        flight.events = meter.events
        if meter.output_tokens is not None:
            flight.output = meter.output_tokens
        entry = flight.entry
        if entry is not None and entry.produced is not None:
            entry.produced = max(entry.produced, meter.events // max(1, entry.weight * len(entry.prompts)))

    def end(self) -> None:
        """The answer is whole."""
        if self._keep:
            self._flight.output = output_of(b"".join(self._parts))
            self._parts.clear()

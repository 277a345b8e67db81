"""A recording as it was at one moment of its past."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np

from kvcatch.cli.spans import parse_time
from kvcatch.errors import KVCatchError
from kvcatch.results import LossView, RequestView, Snapshot
from kvcatch.store.base import Capture, Columns
from kvcatch.store.capture import ReplayCapture
from kvcatch.store.feeds import Feed, open_feed


class _Past:
    """A feed whose writer counts as gone: ages and windows end at the last record read."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def is_live(self) -> bool:
        return False


class Moment(Capture):
    """The state after the first recorded step that ends at or after ``unix_ns``; it does not move on."""

    def __init__(self, capture: ReplayCapture, unix_ns: int) -> None:
        self.target = capture.target
        self.info = capture.info
        self.unix_ns = unix_ns
        self._replay = type(capture)(capture.target, cast(Feed, _Past(open_feed(capture.target))))
        for state in self._replay.steps():
            if self._replay.unix_ns(state.row[1] | state.row[2] << 32) >= unix_ns:
                break

    def refresh(self) -> None:
        """Nothing is new in the past."""

    def snapshot(self, window_seconds: float = 60.0) -> Snapshot:
        return msgspec.structs.replace(self._replay.snapshot(window_seconds), state="past")

    def samples(self, start: int | None = None, stop: int | None = None) -> Columns:
        return self._replay.samples(start, stop)

    def requests(self) -> list[RequestView]:
        return self._replay.requests()

    def events(self, start: int | None = None, stop: int | None = None) -> Iterator[dict[str, Any]]:
        return self._replay.events(start, min(self.unix_ns, stop or self.unix_ns))

    @property
    def loss(self) -> LossView:
        return self._replay.loss

    def close(self) -> None:
        self._replay.close()


def capture_at(capture: Capture, text: str) -> Capture:
    """The capture as it was at ``text``: a time, or ``peak`` for the step with the most active blocks.

    Raises KVCatchError for a source that records no past, and for a time outside the record.
    """
    if not isinstance(capture, ReplayCapture):
        raise KVCatchError(f"{capture.target} keeps no past.", "--at needs a recorder or a .kvcap file.")
    rows = capture.samples()
    times = rows["unix_ns"]
    if not len(times):
        raise KVCatchError(f"{capture.target} has no recorded step yet.")
    if text == "peak":
        when = int(times[int(np.argmax(rows["active_blocks"]))])
    else:
        when = int(parse_time(text, float(times[-1]) / 1e9) * 1e9)
    if not times[0] <= when <= times[-1] + 1_000_000_000:
        span = f"{_clock(int(times[0]))} to {_clock(int(times[-1]))}"
        raise KVCatchError(f"{text} is outside the record.", f"It goes from {span}.")
    return Moment(capture, when)


def _clock(unix_ns: int) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(unix_ns / 1e9).astimezone().isoformat(timespec="seconds")

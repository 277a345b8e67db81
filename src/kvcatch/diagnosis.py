"""From targets to cases to findings: what ``kvcatch doctor`` does, for Python programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvcatch.errors import KVCatchError

if TYPE_CHECKING:
    from kvcatch.analysis.doctor import Diagnosis
    from kvcatch.analysis.evidence import Case

#: unix seconds where the record ends -> (start, stop) in ns, None where open
Span = Callable[[float | None], tuple[int | None, int | None]]

_HEAD = 1 << 16


def whole(_end: float | None) -> tuple[int | None, int | None]:
    """The span that leaves nothing out."""
    return None, None


def find(*targets: str | None) -> Diagnosis:
    """The findings of these targets together, as ``kvcatch doctor`` prints them. Raises KVCatchError."""
    from kvcatch.analysis.doctor import diagnose

    cases = [case for target in targets or (None,) for case in open_cases(target)]
    return diagnose(cases)


def recording_path(target: str | None) -> str | None:
    """The file of a recorded target (file, recorder name, pid, ``live``, None = newest); None when it is no recording.

    Raises KVCatchError when no recorder is there at all and none was named.
    """
    from kvcatch import api

    if target is not None and os.path.isfile(target):
        with open(target, "rb") as file:
            magic = file.read(8)
        return target if magic[:5] == b"KVCAP" or magic == b"KVRING01" else None
    if target is not None and target.startswith(("http://", "https://", "prometheus:")):
        return None
    found = api.recorders()
    if target in (None, "live"):
        if target == "live":
            found = [info for info in found if info.state != "ended"]
        if not found:
            raise KVCatchError(
                f"no {'live ' if target else ''}recorder in {api.recorder_directory()}.",
                "Give a capture, a log, a /metrics URL, or start an engine with: kvcatch run -- vllm serve MODEL",
            )
        return found[0].path
    for info in found:
        if target in (info.name, str(info.pid)):
            return info.path
    return None


def open_cases(target: str | None, span: Span = whole, *, chains: bool = False) -> list[Case]:
    """What is known of a target, one case per engine.

    Args:
        target: a capture, a recorder, a log, a ``/metrics`` URL or saved pages, or ``prometheus:URL[?selector]``.
        span: the part of the record asked for.
        chains: read the hash chains of a recording too.

    Raises:
        KVCatchError: nothing is there, or nothing in it is known.
    """
    from kvcatch.analysis import evidence

    path = recording_path(target)
    if path is not None:
        from kvcatch.store.columns import read_recording

        recording = read_recording(path, chains=chains)
        unix = recording.samples["unix_ns"]
        first_ns, last_ns = span(float(unix[-1]) / 1e9 if len(unix) else None)
        case = evidence.from_recording(recording, first_ns, last_ns)
        if not len(unix):
            case.notes.append(f"{path}: no step was recorded yet")
        elif case.series is None:
            raise KVCatchError(f"{path}: nothing was recorded in that span.", "See the span with: kvcatch ls")
        return [case]
    assert target is not None
    if target.startswith("prometheus:"):
        from kvcatch.sources.prometheus import open_prometheus

        start, stop = span(None)
        # A short span is asked for in fine steps: peaks are the subject.
        until = time.time() if stop is None else stop / 1e9
        step = None if start is None else max(1.0, (until - start / 1e9) / 500)
        capture = open_prometheus(target, _seconds(start), _seconds(stop), step)
        return evidence.from_scrape(capture, start, stop)
    if os.path.isfile(target) and _is_log(target):
        return _log_cases(target, span)
    from kvcatch import api
    from kvcatch.sources.scrape import ScrapeCapture

    scraped = api.open(target)
    if not isinstance(scraped, ScrapeCapture):
        raise KVCatchError(
            f"{target}: no recording and no metrics.", "Give a capture, a log or a /metrics URL."
        )
    end = scraped.snapshot().unix_seconds
    return evidence.from_scrape(scraped, *span(end))


def _log_cases(target: str, span: Span) -> list[Case]:
    from kvcatch.analysis.evidence_log import from_log
    from kvcatch.sources.failures import read_failures
    from kvcatch.sources.logs import LogCapture

    with open(target, encoding="utf-8", errors="replace") as file:
        capture = LogCapture(target, file, os.path.getmtime(target))
    stamps = [row.unix_seconds for row in capture.rows if row.unix_seconds is not None]
    start, stop = span(stamps[-1] if stamps else None)
    return from_log(capture, read_failures(target), start, stop)


def _is_log(path: str) -> bool:
    from kvcatch.sources import failures, logs

    with open(path, encoding="utf-8", errors="replace") as file:
        head = file.read(_HEAD)
    if "# HELP " in head or "# TYPE " in head:
        return False
    return logs.looks_like_log(head) or failures.looks_like_failure(head)


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def closing(cases: Sequence[Case]) -> str:
    """What was looked at, in a few words."""
    kinds = sorted({case.kind for case in cases})
    return f"{len(cases)} engine{'s' if len(cases) != 1 else ''} ({', '.join(kinds)})"

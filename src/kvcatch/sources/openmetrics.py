"""Prometheus and OpenMetrics text, read defensively: every line stands alone, every refusal has a reason.

Only series of inference engines are kept; a 50 MB page of other series costs one pass and no memory.
Names are made comparable: ``ray_`` and ``_total`` dropped, ``:`` turned into ``_``; ``_created`` is ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvcatch.engine_series import ENGINE_SERIES
from kvcatch.errors import KVCatchError

#: reasons kept per page; the rest is only counted
MAX_REASONS = 100
MAX_LINE_BYTES = 1 << 16
#: series remembered from page to page: 200 engines of 140 series each, and some room
MAX_SEEN, MAX_SEEN_CHARS = 50_000, 512

_ANY_SERIES = re.compile(rb"^[ \t]*[a-zA-Z_:][\w:]*(?:\{[^\n]*\})?[ \t]+[-+0-9.NI]", re.MULTILINE)
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_LINE = re.compile(
    r'\s*([a-zA-Z_:][\w:]*)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+([-+0-9.eE]+))?\s*(?:#.*)?'
)
_LABELS = re.compile(r'\s*([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:Inf|inf)|[Nn]a[Nn]")
_ESCAPE = re.compile(r"\\(.)")
_SCRAPE_TIME = re.compile(r"#\s*scrape_unix_ms\s+(\d+(?:\.\d+)?)\s*")
_TYPE = re.compile(r"#\s*TYPE\s+(\S+)\s+(\w+)\s*")
_HELP = re.compile(r"#\s*HELP\s+(\S+)\s+(.*)")


class Sample(NamedTuple):
    """One series of a page."""

    labels: dict[str, str]
    value: float


class Series(NamedTuple):
    """The part of a line before its value. ``exposed``: the name as written; ``key`` tells series apart."""

    exposed: str
    name: str
    labels: dict[str, str]
    key: tuple[str, tuple[tuple[str, str], ...]]


class Rejected(NamedTuple):
    """One line or series that was not taken, and why."""

    series: str
    reason: str


def canonical(name: str) -> str:
    """The comparable form of a metric name."""
    return name.removeprefix("ray_").replace(":", "_").removesuffix("_total")


#: every family the tables know, as ``canonical`` writes it
FAMILIES = frozenset(name for row in ENGINE_SERIES for name in row.names)
_KNOWN = FAMILIES | frozenset(
    name + end
    for row in ENGINE_SERIES
    if row.kind == "histogram"
    for name in row.names
    for end in ("_bucket", "_sum", "_count")
)


#: of the process that serves the page, by every client library
_STARTED = "process_start_time_seconds"


def _interesting() -> re.Pattern[bytes]:
    """Lines worth looking at: our names in either spelling, what declares them, and marks between pages."""
    rests: dict[str, set[str]] = {}
    for name in _KNOWN:
        engine, _, rest = name.partition("_")
        rests.setdefault(engine, set()).add(rest)
    names = "|".join(f"{engine}[:_](?:{'|'.join(sorted(rest))})" for engine, rest in sorted(rests.items()))
    name = rf"(?:ray_)?(?:{names})(?:_total)?(?![\w:])[^\n]*"
    marks = rf"#[ \t]*(?:EOF|scrape_unix_ms)[^\n]*|{_STARTED}[^\n]*"
    declared = rf"#[ \t]*(?:TYPE|HELP)[ \t]+{name}"
    return re.compile(rf"^[ \t]*(?:{name}|{marks}|{declared})$".encode(), re.MULTILINE)


_INTERESTING = _interesting()
#: text before the value -> the series; emptied when full
_SEEN: dict[str, Series] = {}


class Page:
    """What one scrape said. ``samples``: canonical name -> series; ``types`` and ``helps`` likewise.

    process_start: Unix seconds, of the process that serves the page.
    """

    def __init__(self) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self.types: dict[str, str] = {}
        self.helps: dict[str, str] = {}
        self.rejected: list[Rejected] = []
        self.num_rejected = 0
        self.unix_seconds: float | None = None
        self.process_start: float | None = None
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._conflicts: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def reject(self, series: str, reason: str) -> None:
        """Note a refusal; only the first ``MAX_REASONS`` are kept word for word."""
        self.num_rejected += 1
        if len(self.rejected) < MAX_REASONS:
            self.rejected.append(Rejected(series[:120], reason))

    def add(self, series: Series, value: float) -> None:
        """Take one series in. The same series twice counts once when equal and not at all when not."""
        name, labels, key = series.name, series.labels, series.key
        if key in self._conflicts:
            return
        seen = self._values.get(key)
        if seen is None:
            self._values[key] = value
            self.samples.setdefault(name, []).append(Sample(labels, value))
        elif seen != value:
            self._conflicts.add(key)
            self.samples[name] = [sample for sample in self.samples[name] if sample.labels != labels]
            self.reject(name, f"given twice with different values ({seen:g} and {value:g})")


def parse(chunks: Iterable[bytes], where: str = "page") -> list[Page]:
    """Pages from text that arrives in pieces; several when ``# scrape_unix_ms`` comments or EOF divide it.

    Raises KVCatchError when the text is no metrics page at all (HTML, JSON, empty, no series).
    """
    reader = _Reader()
    others = 0
    first: bytes | None = None
    for block in _whole_lines(chunks, reader):
        if first is None and block.strip():
            first = block.lstrip()[:64]
            _refuse_documents(first, where)
        others = others or len(_ANY_SERIES.findall(block[:65536]))
        for match in _INTERESTING.finditer(block):
            reader.line(match.group().decode("utf-8", "replace"))
    pages = [page for page in reader.pages if page.samples]
    if pages:
        return pages
    if first is None and not reader.pages[-1].num_rejected:
        raise KVCatchError(f"{where}: empty.", "A metrics page of a running engine is never empty.")
    if reader.pages[-1].num_rejected:
        reason = reader.pages[-1].rejected[0]
        raise KVCatchError(f"{where}: no usable series; the first refused: {reason.series}: {reason.reason}.")
    if others:
        raise KVCatchError(
            f"{where}: a metrics page, but without series of vLLM, SGLang or TensorRT-LLM.",
            "Point at the engine's own /metrics, not at another exporter.",
        )
    raise KVCatchError(f"{where}: not a metrics page (starts with {first!r}).")


def _refuse_documents(first: bytes, where: str) -> None:
    if first[:1] == b"<":
        raise KVCatchError(
            f"{where}: an HTML page, not metrics.",
            "The path is usually /metrics; check the port and any proxy.",
        )
    if first[:1] in (b"{", b"["):
        raise KVCatchError(f"{where}: JSON, not a metrics page.", "The path is usually /metrics.")


def _whole_lines(chunks: Iterable[bytes], reader: _Reader) -> Iterator[bytes]:
    """Blocks that end at a line end. A last line without one may be cut off, so it is refused."""
    carry = b""
    for chunk in chunks:
        block = carry + chunk if carry else chunk
        cut = block.rfind(b"\n") + 1
        if cut:
            yield block[:cut].replace(b"\r\n", b"\n")
        carry = block[cut:]
        if len(carry) > MAX_LINE_BYTES:
            reader.page.reject(
                carry[:60].decode("utf-8", "replace"), f"line longer than {MAX_LINE_BYTES} bytes"
            )
            carry = b"#"  # what follows up to the next line end reads as a comment
    if carry.lstrip().startswith((b"<", b"{", b"[")):
        yield carry
    elif carry.strip() and not carry.lstrip().startswith(b"#"):
        reader.page.reject(
            carry.decode("utf-8", "replace"), "no line end: the page stops here, the value may be cut"
        )
    elif carry.strip():
        yield carry + b"\n"


class _Reader:
    """State of the parse: the page being filled, and the finished ones."""

    def __init__(self) -> None:
        self.pages = [Page()]
        self.closed = False

    @property
    def page(self) -> Page:
        return self.pages[-1]

    def _next(self) -> None:
        self.pages.append(Page())
        self.closed = False

    def line(self, text: str) -> None:
        text = text.strip()
        if text.startswith("#"):
            self._comment(text)
            return
        if self.closed:
            self._next()
        self._series(text)

    def _comment(self, text: str) -> None:
        stamp = _SCRAPE_TIME.fullmatch(text)
        if stamp:
            if self.page.samples and self.page.unix_seconds is not None:
                self._next()
            # The comment may stand before or after its page; after it, the page is complete.
            self.closed = bool(self.page.samples)
            self.page.unix_seconds = float(stamp.group(1)) / 1000
        elif text == "# EOF":
            self.closed = bool(self.page.samples)
        elif (kind := _TYPE.fullmatch(text)) and canonical(kind.group(1)) in FAMILIES:
            self._declare(self.page.types, kind.group(1), kind.group(2).lower())
        elif (words := _HELP.fullmatch(text)) and canonical(words.group(1)) in FAMILIES:
            self._declare(self.page.helps, words.group(1), words.group(2))

    def _declare(self, table: dict[str, str], name: str, value: str) -> None:
        if self.closed:
            self._next()
            table = self.page.types if table is self.pages[-2].types else self.page.helps
        table[canonical(name)] = value

    def _series(self, text: str) -> None:
        # The same series comes back at every scrape; only its value is new.
        head, _, number = text.rpartition(" ")
        if head == _STARTED:
            if _NUMBER.fullmatch(number):
                self.page.process_start = float(number)
            return
        known = _SEEN.get(head)
        if known is None:
            parsed = self._first_sight(text)
            if parsed is None:
                return
            head, number, known = parsed
            if len(_SEEN) >= MAX_SEEN:
                _SEEN.clear()
            if len(head) <= MAX_SEEN_CHARS:
                _SEEN[head] = known
        if not _NUMBER.fullmatch(number):
            self.page.reject(known.exposed, f"value {number[:40]!r} is not a number")
            return
        value = float(number)
        if math.isnan(value) or math.isinf(value):
            self.page.reject(known.exposed, f"value is {number}")
            return
        self.page.add(known, value)

    def _first_sight(self, text: str) -> tuple[str, str, Series] | None:
        """What stands before the value, the value, and the series; None when the line is refused or not ours."""
        start = _NAME.match(text)
        if start is not None and canonical(start.group()) not in _KNOWN:
            return None
        match = _LINE.fullmatch(text)
        if match is None:
            self.page.reject(text, "not a metric line")
            return None
        exposed, label_text, number, _ = match.groups()
        labels = _labels(label_text)
        if labels is None:
            self.page.reject(text, "labels cannot be read")
            return None
        name = canonical(exposed)
        head = text[: match.start(3)].rstrip()
        return head, number, Series(exposed, name, labels, (name, tuple(sorted(labels.items()))))


def _labels(text: str | None) -> dict[str, str] | None:
    """Labels of one series, None when they are malformed or one is named twice."""
    if not text or not text.strip():
        return {}
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABELS.match(text, at)
        if match is None:
            return None if text[at:].strip() else labels
        name, value = match.groups()
        if name in labels:
            return None
        labels[name] = _unescape(value) if "\\" in value else value
        at = match.end()
    return labels


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match.group(1) == "n" else match.group(1), value)

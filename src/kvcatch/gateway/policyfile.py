"""The policy file: TOML, checked field by field, with the line of every error."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.gateway.body import ROUTES
from kvcatch.gateway.door import MODES
from kvcatch.gateway.link import WHEN_LOST
from kvcatch.gateway.truncate import POLICIES


@dataclass(frozen=True)
class Problem:
    """One error of a policy file. line is 1-based, 0 when the file as a whole is meant."""

    line: int
    where: str
    text: str

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.where}: {self.text}" if self.where else f"{place}{self.text}"


#: value -> what is wrong with it, "" when nothing is
Check = Callable[[Any], str]


def _whole(low: int, high: int = 1 << 40) -> Check:
    def check(value: Any) -> str:
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return "" if good else f"{value!r} is not a whole number from {low} to {high}"

    return check


def _number(low: float, high: float, above: bool = False) -> Check:
    def check(value: Any) -> str:
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if good and not (above and value == low):
            return ""
        return f"{value!r} is not a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"

    return check


def _choice(*known: str) -> Check:
    return lambda value: "" if value in known else f"{value!r} is not one of {', '.join(known)}"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and len(value) < 4096 else "must be text"


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else f"{value!r} is not true or false"


def _url(value: Any) -> str:
    good = isinstance(value, str) and re.fullmatch(r"https?://[^\s/@]+(/[^\s]*)?", value)
    return "" if good else "must be a URL such as http://127.0.0.1:8000, without a password in it"


def _urls(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return "must be a list with at least one URL"
    return next(filter(None, map(_url, value)), "")


def _redis(value: Any) -> str:
    good = isinstance(value, str) and re.fullmatch(r"(rediss?|unix)://\S+", value)
    return "" if good else "must be a URL such as redis://127.0.0.1:6379/0"


_SHARE = _number(0, 1, above=True)
_LENGTH: dict[str, Check] = {
    "max_input_tokens": _whole(1),
    "over_long": _choice(*POLICIES),
    "max_output_tokens": _whole(1),
    "max_logprobs_tokens": _whole(1),
}
_TENANT: dict[str, Check] = {
    "requests_per_minute": _whole(1),
    "tokens_per_minute": _whole(1),
    "long_per_minute": _whole(1),
    "concurrency": _whole(1),
}
#: table -> its fields; a name that ends in .* takes any table below it
TABLES: dict[str, dict[str, Check]] = {
    "gateway": {
        "listen": _text, "upstreams": _urls, "mode": _choice(*MODES), "isolate_prefix_cache": _flag,
        "reserve": _number(0, 0.9), "max_wait": _number(0, 3600), "max_queue": _whole(0, 1 << 20),
        "overload_status": lambda v: "" if v in (503, 529) else f"{v!r} is neither 503 nor 529",
        "max_body_bytes": _whole(1024, 1 << 30), "tokenizer": _text, "upstream_timeout": _number(1, 86400),
    },
    "length": _LENGTH,
    "length.routes.*": _LENGTH,
    "long": {
        "tokens": _whole(1), "share": _SHARE, "concurrency": _whole(0), "enforce": _flag,
    },
    "limits": {**_TENANT, "unknown_usage": _choice("reserved", "chunks")},
    "tenants.*": {**_TENANT, "share": _SHARE, "priority": _whole(-100, 100)},
    "tenant": {"header": _text, "default": _text, "trust_header": _flag},
    "tenant.keys": {},
    "user": {"header": _text, "body_field": _text},
    "mirror": {
        "url": _url, "share": _SHARE, "dir": _text, "max_kl": _number(0, 1, above=True),
        "max_flips": _number(0, 1, above=True),
    },
    "redis": {
        "url": _redis, "prefix": _text, "when_lost": _choice(*WHEN_LOST), "replicas": _whole(1, 10000),
    },
}  # fmt: skip
#: tables whose keys are free: every value is text
_FREE = ("tenant.keys",)


def load(path: str) -> dict[str, Any]:
    """The checked document of a policy file. Raises KVCatchError with every problem and its line."""
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 20)
    except OSError as error:
        raise KVCatchError(f"{path}: {error.strerror or error}.") from None
    document, problems = check(data)
    if problems:
        raise KVCatchError("\n".join(f"{path}: {problem}" for problem in problems))
    return document


def check(data: bytes) -> tuple[dict[str, Any], list[Problem]]:
    """The document and everything that is wrong with it, in order of lines."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return {}, [Problem(line, "", "this is not UTF-8")]
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        match = re.search(r"\(at line (\d+), column \d+\)", str(error))
        words = re.sub(r"\s*\(at .*\)$", "", str(error)) or "too deep"
        line = int(match.group(1)) if match else text.count("\n") + 1
        return {}, [Problem(line, "", words)]
    return document, sorted(problems_of(document, lines_of(text)), key=lambda problem: problem.line)


def problems_of(document: Mapping[str, Any], places: Mapping[str, int] | None = None) -> list[Problem]:
    """What is wrong with a document, wherever it comes from."""
    return _walk(document, "", places or {})


def _walk(table: Mapping[str, Any], path: str, places: Mapping[str, int]) -> list[Problem]:
    fields = _fields(path)
    found: list[Problem] = []
    for name, value in table.items():
        where = f"{path}.{name}" if path else name
        line = places.get(where) or places.get(path, 0)
        if isinstance(value, dict) and (_fields(where) is not None or _has_below(where)):
            found += _walk(value, where, places)
        elif path in _FREE:
            if not isinstance(value, str):
                found.append(Problem(line, where, "the tenant of a key must be text"))
        elif fields is None or name not in fields:
            known = sorted(fields or {}) or sorted({table.split(".")[0] for table in TABLES})
            if path == "length.routes":
                known = list(ROUTES)
            found.append(Problem(line, where, f"unknown; known here: {', '.join(known)}"))
        else:
            wrong = fields[name](value)
            if wrong:
                found.append(Problem(line, where, wrong))
    if path.startswith("length.routes.") and path.removeprefix("length.routes.") not in ROUTES:
        found.append(Problem(places.get(path, 0), path, f"no such route; routes: {', '.join(ROUTES)}"))
    return found


def _fields(path: str) -> dict[str, Check] | None:
    if path in TABLES:
        return TABLES[path]
    parent, _, name = path.partition(".")
    if parent == "tenants" and name:
        return TABLES["tenants.*"]
    if path.startswith("length.routes.") and path != "length.routes.":
        return TABLES["length.routes.*"]
    return None


def _has_below(path: str) -> bool:
    return any(name.startswith(path + ".") for name in TABLES)


_HEADER = re.compile(r"\s*\[\[?\s*(.+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=(.*)$""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")


def lines_of(text: str) -> dict[str, int]:
    """Line of every table and key of a TOML document that parses, by its dotted path."""
    found: dict[str, int] = {}
    table: list[str] = []
    closing = ""  # of a multi-line string we are in
    depth = 0  # of a multi-line array
    for number, line in enumerate(text.splitlines(), 1):
        if closing:
            if closing in line:
                closing = ""
            continue
        if depth:
            depth += _brackets(line)
            continue
        header, key = _HEADER.match(line), _KEY.match(line)
        if header and not key:
            table = _names(header.group(1))
            for size in range(1, len(table) + 1):
                found.setdefault(".".join(table[:size]), number)
        elif key:
            names = _names(key.group(1))
            for size in range(1, len(names) + 1):
                found.setdefault(".".join([*table, *names[:size]]), number)
            value = key.group(2).strip()
            for quote in ('"""', "'''"):
                if value.startswith(quote) and quote not in value[3:]:
                    closing = quote
            if not closing:
                depth = max(0, _brackets(value))
    return found


def _names(dotted: str) -> list[str]:
    return ["".join(parts) for parts in _PART.findall(dotted)]


def _brackets(text: str) -> int:
    """Opened minus closed square brackets outside of strings and comments."""
    bare = re.sub(r""""(?:[^"\\]|\\.)*"|'[^']*'|#.*""", "", text)
    return bare.count("[") - bare.count("]")

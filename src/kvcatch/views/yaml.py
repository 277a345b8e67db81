"""As much YAML as rule files need: block mappings, block lists, and strings that survive any parser."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/()-]*(?<!:)")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def dump(value: Any, indent: int = 0) -> str:
    """YAML text of dictionaries, lists, strings, numbers, booleans and None."""
    return "".join(_lines(value, indent))


def _lines(value: Any, indent: int) -> list[str]:
    pad = " " * indent
    out: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            out += _entry(f"{pad}{_scalar(str(key))}:", item, indent + 2)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict | list) and item:
                inner = _lines(item, indent + 2)
                out += [f"{pad}- {inner[0].lstrip(' ')}", *inner[1:]]
            else:
                out.append(f"{pad}- {_scalar(item)}\n")
    return out


def _entry(head: str, item: Any, indent: int) -> list[str]:
    if isinstance(item, dict | list) and item:
        return [f"{head}\n", *_lines(item, indent)]
    if isinstance(item, str) and "\n" in item:
        pad = " " * indent
        return [
            f"{head} |\n",
            *(f"{pad}{line}\n" if line else "\n" for line in item.rstrip("\n").split("\n")),
        ]
    return [f"{head} {_scalar(item)}\n"]


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else json.dumps(value)
    return json.dumps(value)

"""KV_Catch: catch, explain and govern the KV cache of LLM serving engines.

Public names are imported on first use, so that ``import kvcatch`` stays cheap inside an engine.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

#: public name -> module that defines it
_PUBLIC = {
    "open": "kvcatch.api",
    "record": "kvcatch.api",
    "collect": "kvcatch.api",
    "find": "kvcatch.diagnosis",
    "plan": "kvcatch.planner",
    "simulate": "kvcatch.simulator",
}
__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604 (the names are resolved by __getattr__)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kvcatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)

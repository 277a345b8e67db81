"""Make one named function fail: KVCATCH_TEST_FAULT="module:Class.method[:nth[:kind]]".

From its nth call on (default 1) the function raises (kind ``raise``, RuntimeError("injected fault")), or the
process kills itself with SIGKILL (kind ``kill``). The wrap happens while this module is imported: vLLM imports all
plugins before it calls the first one, so even another plugin's ``register`` can be made to fail.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
from typing import Any


def _inject(spec: str) -> None:
    module_name, path, *rest = spec.split(":")
    nth = int(rest[0]) if rest else 1
    kind = rest[1] if len(rest) > 1 else "raise"
    holder: Any = importlib.import_module(module_name)
    *owners, name = path.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    original = getattr(holder, name)
    calls = 0

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < nth:
            return original(*args, **kwargs)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("injected fault")

    setattr(holder, name, faulty)


if os.environ.get("KVCATCH_TEST_FAULT"):
    _inject(os.environ["KVCATCH_TEST_FAULT"])


def register() -> None:
    """Entry point of ``vllm.general_plugins``: everything happened on import."""

"""Where recorders, measured watermarks and keys live on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping


def default_directory(env: Mapping[str, str]) -> str:
    """``$KVCATCH_DIR``, else ``$XDG_STATE_HOME/kvcatch``, else ``~/.local/state/kvcatch``."""
    if env.get("KVCATCH_DIR"):
        return env["KVCATCH_DIR"]
    state = env.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "kvcatch")

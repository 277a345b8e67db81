"""A policy file that may change while requests run."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.gateway.gate import Gate
from kvcatch.gateway.policy import from_document

logger = logging.getLogger("kvcatch.gateway")

#: between two looks at the policy file
RELOAD_SECONDS = 1.0
#: what is only read at start
FIXED = (
    ("gateway", "listen"),
    ("gateway", "upstreams"),
    ("gateway", "tokenizer"),
    ("redis", None),
    ("mirror", None),
)

Documents = Callable[[], dict[str, Any]]


class Reloader:
    """Gives a gate the policy of its file. config: the file, None without one; ``documents`` reads it anew."""

    def __init__(
        self, gate: Gate, document: dict[str, Any], documents: Documents, config: str | None
    ) -> None:
        self._gate = gate
        self._document, self._documents, self._config = document, documents, config
        self._stamp = _stamp(config)

    async def watch(self) -> None:
        """Look at the file until cancelled."""
        while self._config is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()

    def reload(self, force: bool = False) -> bool:
        """Read the policy again when its file changed; a wrong one is logged and the old one stays."""
        stamp = _stamp(self._config)
        if stamp == self._stamp and not force:
            return False
        self._stamp = stamp
        try:
            document = self._documents()
            policy = from_document(document)
        except KVCatchError as error:
            logger.error("policy not reloaded, the old one stays:\n%s", error)
            return False
        for table, key in FIXED:
            before, after = self._document.get(table, {}), document.get(table, {})
            if (before != after) if key is None else (before.get(key) != after.get(key)):
                logger.warning(
                    "%s is only read at start; restart to change it", f"{table}.{key}" if key else table
                )
        self._document = {
            **document,
            **{t: self._document[t] for t, k in FIXED if k is None and t in self._document},
        }
        self._gate.use(policy)
        logger.warning("policy reloaded")
        return True


def _stamp(config: str | None) -> tuple[int, int, int] | None:
    if config is None:
        return None
    try:
        found = os.stat(config)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino

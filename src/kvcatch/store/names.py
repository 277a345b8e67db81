"""From the engine's request id back to the client's."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^(?:cmpl|chatcmpl|resp|embd|pool|score|rerank|classify|tokenize|generate)-")
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_INDEX = re.compile(r"-\d+$")


def client_request_id(engine_id: str) -> str:
    """The client's ``X-Request-Id`` in ``cmpl-<id>-<i>-<8 hex>`` (no hex suffix before 0.13; ``k_`` for n > 1).

    Ids of another shape (offline ``LLM``: a plain number) are returned without the random suffix only.
    """
    name = re.sub(r"^\d+_(?=cmpl-|chatcmpl-)", "", engine_id)
    name = _SUFFIX.sub("", name)
    if not _PREFIX.match(name):
        return name
    completion = name.startswith("cmpl-")
    name = _PREFIX.sub("", name)
    return _INDEX.sub("", name) if completion else name

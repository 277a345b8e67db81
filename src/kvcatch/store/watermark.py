"""The measured safe utilisation: one small file that every view, alert and scheduler of the machine reads.

``watermark.json`` in the state directory::

    {"schema_version": 1, "safe_utilization_ratio": 0.82, "config_hash": "…", "config": {"num_blocks": 160, …}, …}

It holds for the configuration it was measured with. A field that both sides know and that differs makes it expired.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.metrics import THRESHOLDS
from kvcatch.store.paths import default_directory

FILE = "watermark.json"
ASSUMED, MEASURED, EXPIRED = "assumed", "measured", "expired"
_MOST_BYTES = 1 << 20
#: what the safe utilisation depends on; not the engine's own watermark, which is set after measuring
_FIELDS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "prefix_caching")
#: path -> (what the file was, its contents)
_seen: dict[str, tuple[tuple[int, int, int], dict[str, Any] | None]] = {}


def configuration(info: EngineInfo) -> dict[str, Any]:
    """What of an engine's configuration a measured watermark holds for; unknown fields are left out."""
    known = {name: getattr(info, name) for name in _FIELDS}
    return {name: value for name, value in known.items() if value not in (None, 0)}


def config_hash(config: Mapping[str, Any]) -> str:
    """16 hex digits that change with the configuration."""
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:16]


def watermark_path(directory: str | None = None) -> str:
    """Where this machine's watermark is kept, whether there is one or not."""
    return os.path.join(directory or default_directory(os.environ), FILE)


def read_watermark(path: str) -> dict[str, Any]:
    """A watermark that was measured, from its file. Raises KVCatchError when the file holds none."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
    except OSError as error:
        raise KVCatchError(
            f"{path}: {error.strerror}.", "Name what kvcatch watermark --json printed."
        ) from None
    except ValueError:
        document = None
    if valid_ratio(document) is None:
        raise KVCatchError(
            f"{path}: holds no measured safe utilisation.", "Measure one: kvcatch watermark --drive URL."
        )
    known: dict[str, Any] = document
    return known


def watermark_for(info: EngineInfo, directory: str | None = None) -> tuple[float, str]:
    """The safe used fraction of an engine's usable blocks, and whether it is assumed, measured or expired.

    A file that is missing or says nothing usable gives the assumed value: a view must not fail over it.
    """
    document = _load(watermark_path(directory))
    if document is None:
        return THRESHOLDS.assumed_watermark_ratio, ASSUMED
    return float(document["safe_utilization_ratio"]), MEASURED if holds_for(document, info) else EXPIRED


def holds_for(document: Mapping[str, Any], info: EngineInfo) -> bool:
    """Whether nothing that both know of the configuration differs."""
    stored = document.get("config")
    mine = configuration(info)
    return not isinstance(stored, dict) or all(stored[name] == mine[name] for name in mine if name in stored)


def valid_ratio(document: object) -> float | None:
    """The safe utilisation that a document states, None when it is no number above 0 and up to 1."""
    value = document.get("safe_utilization_ratio") if isinstance(document, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        return None
    return float(value)


def _load(path: str) -> dict[str, Any] | None:
    """The file's contents, read again only when it changed; None when there is nothing usable."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = _seen.get(path)
    if known is not None and known[0] == stamp:
        return known[1]
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        document = None
    usable = document if valid_ratio(document) is not None else None
    _seen[path] = stamp, usable
    return usable


def write_watermark(document: Mapping[str, Any], directory: str | None = None) -> str:
    """Replace the file in one step; returns its path. Raises KVCatchError when it cannot be written."""
    path = watermark_path(directory)
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".watermark-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.write("\n")
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise KVCatchError(
            f"cannot write {path}: {error.strerror}.", "Set KVCATCH_DIR to a folder of yours."
        ) from error
    return path

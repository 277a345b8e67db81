"""What others measured and stored for the scheduler: the safe utilisation.

``kvcatch watermark`` writes the file, see ``kvcatch.store.watermark``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from kvcatch.errors import KVCatchError
from kvcatch.events import EngineInfo
from kvcatch.store.paths import default_directory
from kvcatch.store.watermark import FILE, holds_for, valid_ratio


def stored_watermark(env: Mapping[str, str], info: EngineInfo | None = None) -> tuple[float, str] | None:
    """(safe utilisation 0 to 1, where it comes from), None when nothing valid for this engine is stored.

    A measurement of another configuration than ``info``'s has expired and does not count; None accepts any.
    Raises KVCatchError when the file is there but says nothing usable.
    """
    path = os.path.join(default_directory(env), FILE)
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(1 << 20))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise KVCatchError(
            f"cannot read {path}: {error}.", "Remove it or measure the watermark again."
        ) from error
    value = valid_ratio(document)
    if value is None:
        stated = document.get("safe_utilization_ratio") if isinstance(document, dict) else None
        raise KVCatchError(
            f"{path}: safe_utilization_ratio is {stated!r}, not a number above 0 and up to 1.",
            "Remove it or measure the watermark again.",
        )
    if info is not None and not holds_for(document, info):
        return None
    return value, path

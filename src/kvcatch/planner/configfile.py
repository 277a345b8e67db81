"""Reading a model's ``config.json``: from a file, a folder, the local Hugging Face cache or the catalogue.

The file comes from anywhere, so it is treated as untrusted: size limit, no NaN, typed access that names the field.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvcatch.errors import KVCatchError
from kvcatch.planner.checkpoint import with_checkpoint

#: Largest config.json accepted, in bytes. The largest real ones are below 1 MiB.
MAX_CONFIG_BYTES = 4 * 1024**2
#: Largest value accepted for a size or a count: far above any model, far below overflow trouble.
MAX_VALUE = 10**12


def load_config(source: str) -> tuple[str, dict[str, Any]]:
    """(name, config) of a file, a folder, a cached Hugging Face repository or a known model name.

    Raises KVCatchError when nothing of that name is found or the file is not a usable JSON object.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise KVCatchError(
                f"no config.json in {source}.", "Give a folder with a model, or the file itself."
            )
    if path.is_file():
        name = path.parent.name if path.name == "config.json" else path.stem
        found = parse_config(path.read_bytes(), str(path)) if _small(path) else {}
        return name, with_checkpoint(path.parent, found) if path.name == "config.json" else found
    cached = _from_cache(source)
    if cached is not None:
        found = parse_config(cached.read_bytes(), str(cached)) if _small(cached) else {}
        return source, with_checkpoint(cached.parent, found)
    known = _from_catalogue(source)
    if known is not None:
        return source, known
    raise KVCatchError(
        f"no such model: {source}.{_near(source)}",
        "Give a config.json, a folder with one, or a known name (kvcatch plan --list).",
    )


def _near(name: str) -> str:
    """Known names that look alike, as a question."""
    import difflib

    from kvcatch.planner.catalogue import model_names

    short = {known.split("/")[-1].lower(): known for known in model_names()}
    wanted = name.rsplit("/", maxsplit=1)[-1].lower()
    near = difflib.get_close_matches(wanted, short, n=3, cutoff=0.7)
    return f" Near: {', '.join(short[known] for known in near)}." if near else ""


def parse_config(raw: bytes, where: str = "config.json") -> dict[str, Any]:
    """A JSON object from bytes. Raises KVCatchError for anything else, too much of it, or NaN in it."""
    if len(raw) > MAX_CONFIG_BYTES:
        raise _too_large(where, len(raw))
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise KVCatchError(f"{where}: not JSON ({error}).", "Give the config.json of a model.") from error
    if not isinstance(parsed, dict):
        raise KVCatchError(
            f"{where}: a JSON {type(parsed).__name__}, not an object.", "Give a model's config.json."
        )
    field = _first_nan(parsed, "")
    if field is not None:
        raise KVCatchError(f"{where}: field {field} is not a number (NaN or infinity).", "Correct the file.")
    return parsed


def _small(path: Path) -> bool:
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise _too_large(str(path), size)
    return True


def _too_large(where: str, size: int) -> KVCatchError:
    return KVCatchError(
        f"{where}: {size:,} bytes of JSON, more than a config.json has (limit {MAX_CONFIG_BYTES:,}).",
        "Give the model's config.json, not its weights index or tokenizer.",
    )


def _first_nan(value: Any, path: str) -> str | None:
    """The path of the first NaN or infinity, None when there is none."""
    if isinstance(value, float):
        return path if not math.isfinite(value) else None
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    for name, item in items:
        found = _first_nan(item, name)
        if found is not None:
            return found
    return None


def _from_cache(repository: str) -> Path | None:
    """config.json of the newest snapshot of a repository in the local Hugging Face cache."""
    if repository.count("/") != 1 or ".." in repository:
        return None
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    snapshots = Path(home, "models--" + repository.replace("/", "--"), "snapshots")
    found = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _from_catalogue(name: str) -> dict[str, Any] | None:
    from kvcatch.planner.catalogue import find_model

    return find_model(name)


class Fields:
    """Typed access to one configuration object; errors name the field and the value."""

    def __init__(self, raw: dict[str, Any], where: str, defaults: dict[str, Any] | None = None) -> None:
        self.raw = raw
        self.where = where
        self.defaults = defaults or {}
        self.assumed: list[str] = []

    def get(self, *names: str) -> Any:
        """The first of ``names`` that is present and not null; class defaults come last and are noted."""
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        for name in names:
            if self.defaults.get(name) is not None and name not in self.raw:
                value = self.defaults[name]
                text = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
                note = f"{name} = {text} (default of its configuration class)"
                if note not in self.assumed:
                    self.assumed.append(note)
                return value
        return None

    def number(self, *names: str, least: int = 1) -> int | None:
        """An integer field, None when absent. Raises KVCatchError when it is something else or below ``least``."""
        value = self.get(*names)
        if value is None:
            return None
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, value, "an integer is expected")
        if not least <= value <= MAX_VALUE:
            raise self.error(name, value, f"expected {least} to {MAX_VALUE:,}")
        return value

    def need(self, *names: str, least: int = 1) -> int:
        """Like ``number``, but the field must be there."""
        value = self.number(*names, least=least)
        if value is None:
            raise KVCatchError(
                f"{self.where}: field {names[0]} is missing"
                + (f" (also looked for {', '.join(names[1:])})" if names[1:] else "")
                + ".",
                "Add it, or give the config.json of the checkpoint itself.",
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean field. Raises KVCatchError when it is something else."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false is expected")
        return value

    def numbers(self, name: str, length: int | None = None) -> list[int] | None:
        """A list of integers, None when absent; of ``length`` entries when given."""
        value = self.items(name, length)
        if value is None:
            return None
        if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self.error(name, value, "a list of integers is expected")
        return value

    def items(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, None when absent; of at least ``length`` entries when given."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(name, value, "a list is expected")
        if length is not None and len(value) < length:
            raise KVCatchError(
                f"{self.where}: field {name} has {len(value)} entries for {length} layers.",
                "One entry a layer is needed: correct num_hidden_layers or the list.",
            )
        return value

    def error(self, name: str, value: Any, expected: str) -> KVCatchError:
        """The error for a bad field."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return KVCatchError(f"{self.where}: field {name} is {shown}: {expected}.", "Correct the config.json.")

"""Documents to measure on: the shipped ones, written for this purpose, or the user's own."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path

import msgspec

from kvcatch.errors import KVCatchError

_MAX_BYTES = 64 * 1024**2


class Document(msgspec.Struct, frozen=True):
    """One text. The name is all of it that any result shows."""

    name: str
    text: str


def shipped() -> list[Document]:
    """Five English and three Chinese texts, alternating, so that any beginning has both."""
    folder = files("kvcatch.quality").joinpath("corpus")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    texts = {name: Document(name[:-4], folder.joinpath(name).read_text(encoding="utf-8")) for name in names}
    english = [texts[name] for name in names if name.startswith("en_")]
    chinese = [texts[name] for name in names if name.startswith("zh_")]
    mixed = []
    while english or chinese:
        mixed += [part.pop(0) for part in (english, chinese) if part]
    return mixed


def from_file(path: str) -> list[Document]:
    """Documents of a file: JSON lines with ``text``, else plain text with documents split by lines of ``---``.

    Raises KVCatchError when it cannot be read or holds nothing.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise KVCatchError(
            f"cannot read {path}: {error.strerror}.", "Give a text or JSON lines file."
        ) from None
    if len(raw) > _MAX_BYTES:
        raise KVCatchError(f"{path}: larger than {_MAX_BYTES:,} bytes.", "Give a sample of it.")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KVCatchError(f"{path}: not UTF-8 at byte {error.start:,}.", "Convert it with iconv.") from None
    if text.lstrip().startswith("{"):
        texts = [_line(path, at, line) for at, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        texts = [part.strip() for part in f"\n{text}\n".split("\n---\n")]
    found = [Document(f"document {at}", one) for at, one in enumerate(texts, 1) if one]
    if not found:
        raise KVCatchError(f"{path}: no text in it.", 'Give JSON lines with "text", or plain text.')
    return found


def _line(path: str, at: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise KVCatchError(f'{path}: line {at} is no JSON object with "text".', "Give one object a line.")
    return text


def digest(documents: list[Document]) -> str:
    """A short hash of the texts, to tell corpora apart without keeping them."""
    return hashlib.sha256("\0".join(one.text for one in documents).encode()).hexdigest()[:16]

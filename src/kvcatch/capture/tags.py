"""Source tags: who sent a request. Raw user values never leave this module.

Tags come, in this order, from ``vllm_xargs`` (``kvcatch_tenant``, ``kvcatch_user``, ``kvcatch_tag_*``) and from
the request id: ``kvc~TENANT~USER~ANYTHING`` sent as ``X-Request-Id`` (USER may be empty).
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any

import msgspec

_HASHED = re.compile(r"u:[0-9a-f]{16}")
_IN_ID = re.compile(r"kvc~([^~]*)~([^~]*)~")
MAX_VALUE = 64
_key = b""
_encode = msgspec.json.Encoder().encode


def load_key(directory: str) -> None:
    """Read or make the key of the user hashes: ``user.key`` (0600) in the recorder directory.

    The same directory gives the same hashes over restarts; without it they cannot be linked to users.
    """
    global _key
    path = os.path.join(directory, "user.key")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(os.urandom(32))
    except FileExistsError:
        pass
    with open(path, "rb") as file:
        _key = file.read(64) or os.urandom(32)


def hash_user(user: str) -> str:
    """``u:`` and 16 hex digits of a keyed hash; a value that already has this form is left alone."""
    if _HASHED.fullmatch(user):
        return user
    return "u:" + hashlib.blake2b(user.encode(), digest_size=8, key=_key[:64]).hexdigest()


def hash_secret(value: str) -> int:
    """A keyed 64-bit hash of a cache salt or adapter name, never 0."""
    digest = hashlib.blake2b(value.encode(), digest_size=8, key=_key[:64]).digest()
    return int.from_bytes(digest, "little") or 1


def request_tags(request_id: str, extra: Any) -> tuple[str, dict[str, str]]:
    """The request id with any raw user value replaced, and the tags."""
    tags: dict[str, str] = {}
    match = _IN_ID.search(request_id) if "~" in request_id else None
    if match:
        tenant, user = match.groups()
        if tenant:
            tags["tenant"] = tenant[:MAX_VALUE]
        if user:
            tags["user"] = hash_user(user)
            request_id = request_id[: match.start(2)] + tags["user"] + request_id[match.end(2) :]
    if isinstance(extra, dict):
        for key, value in extra.items():
            if key == "kvcatch_tenant":
                tags["tenant"] = str(value)[:MAX_VALUE]
            elif key == "kvcatch_user":
                tags["user"] = hash_user(str(value))
            elif isinstance(key, str) and key.startswith("kvcatch_tag_") and len(tags) < 8:
                tags[key[12:][:MAX_VALUE]] = str(value)[:MAX_VALUE]
    return request_id, tags


def describe(request: Any) -> tuple[bytes, int, int]:
    """(JSON of [request id, tags], hash of the cache salt, hash of the adapter name); 0 where there is none."""
    params = getattr(request, "sampling_params", None) or getattr(request, "pooling_params", None)
    request_id, tags = request_tags(request.request_id, getattr(params, "extra_args", None))
    salt = getattr(request, "cache_salt", None)
    lora = getattr(request, "lora_request", None)
    text = _encode([request_id[:256], tags])
    return text, hash_secret(salt) if salt else 0, hash_secret(str(lora.lora_name)) if lora else 0

"""Engines on this machine that nobody records: their pid, and the port to scrape."""

from __future__ import annotations

import os
import re

import msgspec

_SERVER = re.compile(r"vllm\.entrypoints\.(?:openai\.api_server|cli\.main)|sglang\.launch_server")
_LISTEN = "0A"


class LocalEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine server process. port is None when it does not listen (yet)."""

    pid: int
    kind: str
    command: str
    port: int | None

    @property
    def url(self) -> str | None:
        """Its metrics page."""
        return None if self.port is None else f"http://127.0.0.1:{self.port}/metrics"


def local_engines(proc: str = "/proc") -> list[LocalEngine]:
    """Every vLLM or SGLang server of this machine, by pid. Processes we may not look into are left out."""
    found = []
    for name in os.listdir(proc):
        if name.isdigit():
            engine = _engine(proc, int(name))
            if engine is not None:
                found.append(engine)
    return sorted(found, key=lambda engine: engine.pid)


def engine_of(pid: int, proc: str = "/proc") -> LocalEngine | None:
    """The server that ``pid`` is or belongs to (an engine core's parent), None when there is none."""
    seen = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        engine = _engine(proc, pid)
        if engine is not None:
            return engine
        pid = _parent(proc, pid)
    return None


def _engine(proc: str, pid: int) -> LocalEngine | None:
    words = _words(proc, pid)
    kind = _kind(words)
    if kind is None:
        return None
    return LocalEngine(pid=pid, kind=kind, command=" ".join(words), port=_port(proc, pid, words))


def _words(proc: str, pid: int) -> list[str]:
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            return [word for word in file.read().decode("utf-8", "replace").split("\0") if word]
    except OSError:
        return []


def _kind(words: list[str]) -> str | None:
    if not words or not os.path.basename(words[0]).startswith(("python", "vllm", "VLLM::APIServer")):
        return None
    for index, word in enumerate(words[:6]):
        if _SERVER.fullmatch(word):
            return "sglang" if word.startswith("sglang") else "vllm"
        if os.path.basename(word) == "vllm" and words[index + 1 : index + 2] == ["serve"]:
            return "vllm"
    return "vllm" if words[0].startswith("VLLM::APIServer") else None


def _port(proc: str, pid: int, words: list[str]) -> int | None:
    """The port it listens on; of several, the one its command line names."""
    named = None
    for index, word in enumerate(words):
        text = word.partition("=")[2] if word.startswith("--port=") else ""
        if word == "--port" and index + 1 < len(words):
            text = words[index + 1]
        if text.isdigit():
            named = int(text)
    listening = _listening(proc, pid)
    if named in listening:
        return named
    return min(listening) if listening else None


def _listening(proc: str, pid: int) -> set[int]:
    sockets = set()
    try:
        for entry in os.listdir(f"{proc}/{pid}/fd"):
            try:
                link = os.readlink(f"{proc}/{pid}/fd/{entry}")
            except OSError:
                continue
            if link.startswith("socket:["):
                sockets.add(link[8:-1])
    except OSError:
        return set()
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/{pid}/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if len(row) > 9 and row[3] == _LISTEN and row[9] in sockets:
                ports.add(int(row[1].rpartition(":")[2], 16))
    return ports


def _parent(proc: str, pid: int) -> int:
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0

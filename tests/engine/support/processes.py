"""Process groups that leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def deadline_poll(ready: object, seconds: float, what: str, pause: float = 0.05) -> object:
    """The first true answer of ``ready()``; TimeoutError naming ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        answer = ready()  # type: ignore[operator]
        if answer:
            return answer
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(pause)


def stat(pid: int) -> tuple[str, int, int, int] | None:
    """(state, parent, process group, session) from /proc, None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[2]), int(fields[3])


def session_members(session: int) -> list[int]:
    """Living processes (zombies excluded) of one session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (row := stat(int(entry))) and row[3] == session and row[0] not in "ZX":
            found.append(int(entry))
    return found


def children(pid: int) -> list[int]:
    """All living descendants of a process, parents first."""
    table = {int(e): row for e in os.listdir("/proc") if e.isdigit() and (row := stat(int(e)))}
    found, queue = [], [pid]
    while queue:
        parent = queue.pop(0)
        for child, row in table.items():
            if row[1] == parent and row[0] not in "ZX":
                found.append(child)
                queue.append(child)
    return found


def title(pid: int) -> str:
    """A process's command line or the title that it gave itself, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def end_session(session: int, seconds: float = 20.0) -> None:
    """Kill every process of a session and wait until none is left."""
    for pid in session_members(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    deadline_poll(lambda: not session_members(session), seconds, f"end of session {session}")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, from /proc."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no VmRSS for {pid}")

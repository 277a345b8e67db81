"""Checks that need an NVIDIA GPU: NVML against nvidia-smi, memory of another process, one card full.

Run on a machine with a GPU, torch and nvidia-ml-py: ``python tools/gpu_check.py``. Takes under a minute,
changes no setting of the card, and exits 1 when a figure is off.
"""

from __future__ import annotations

import os
import subprocess
import sys

from kvcatch.sources.cards import Card, cards, owners

MIB = 1024**2
#: what nvidia-smi rounds, and what the driver adds to a context of its own
TOLERANCE = 64 * MIB
_HOLD = """
import sys, torch
x = torch.empty({size}, dtype=torch.uint8, device="cuda:0")
x.fill_(1)
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""

_failures: list[str] = []


def check(what: str, good: bool, detail: str) -> None:
    """Print one line; remember a failure."""
    print(f"{'ok  ' if good else 'FAIL'} {what}: {detail}")
    if not good:
        _failures.append(what)


def smi(*fields: str) -> list[list[str]]:
    """nvidia-smi's own table."""
    text = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]


def against_smi() -> list[Card]:
    """Total and used of every card."""
    seen = cards()
    for card, (uuid, total, used) in zip(seen, smi("uuid", "memory.total", "memory.used"), strict=True):
        check("uuid", card.uuid == uuid, f"{card.uuid} against {uuid}")
        pairs = (("total", card.memory_total_bytes, total), ("used", card.memory_used_bytes, used))
        for name, ours, theirs in pairs:
            off = abs((ours or 0) - int(theirs) * MIB)
            check(name, off < TOLERANCE, f"card {card.index}: {ours} against {theirs} MiB")
    return seen


def hold(size: int) -> subprocess.Popen[str]:
    """Another process that holds ``size`` bytes on the first card."""
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD.format(size=size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    if child.stdout.readline().strip() != "held":
        raise SystemExit(f"a process could not hold {size} bytes on the card.")
    return child


def other_process(size: int, what: str) -> None:
    """Memory of another process shows as the others' share, within a context of the driver."""
    before = cards()[0]
    child = hold(size)
    try:
        after = cards()[0]
        grown = (after.memory_used_bytes or 0) - (before.memory_used_bytes or 0)
        check(
            what,
            0 <= grown - size < 1024 * MIB,
            f"used grew by {grown / MIB:.0f} MiB for {size / MIB:.0f} MiB",
        )
        engine, others = owners(after, [os.getpid()])
        if others is None:
            print("note: the driver hides the memory of processes here (container or virtual machine)")
        elif child.pid in after.processes:
            check(f"{what}, owner", others >= size and engine == 0, f"others hold {others / MIB:.0f} MiB")
        else:
            print("note: NVML names the host's processes here (container); owners are told by device only")
    finally:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(60)


def main() -> None:
    """Run every check."""
    first = against_smi()[0]
    other_process(512 * MIB, "another process")
    free = (first.memory_total_bytes or 0) - (first.memory_used_bytes or 0)
    other_process(int(free * 0.9), "a card nearly full")
    if _failures:
        sys.exit(f"{len(_failures)} checks failed: {', '.join(_failures)}")
    print("all checks passed")


if __name__ == "__main__":
    main()

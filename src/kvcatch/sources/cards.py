"""Cards: how full each one is and who holds it, from NVML; on a CPU engine the host's memory plays the card."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvcatch.errors import KVCatchError, missing_extra
from kvcatch.results import RankView, Result


class Card(Result, frozen=True):
    """One card as NVML sees it. None is unknown: the error says why.

    processes: pid -> bytes, 0 where the driver hides the amount (virtual machines, WSL). In a container
    NVML names the host's pids.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    processes: dict[int, int] = msgspec.field(default_factory=dict)
    mig: bool | None = None
    error: str | None = None


def cards(nvml: Any = None) -> list[Card]:
    """Every NVIDIA card of this machine. A lost card is listed with its error, the others stay readable.

    Raises KVCatchError when there is no driver or the NVML binding is not installed.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise missing_extra("nvidia-ml-py", "cards") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise KVCatchError(
            f"no NVIDIA driver to ask: {error}.",
            "On a CPU machine the memory of the processes is shown instead.",
        ) from None
    try:
        return [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise KVCatchError(f"NVML does not list the cards: {error}.") from None
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Card:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = _memory(nvml, handle)
    except nvml.NVMLError as error:
        return Card(index=index, error=str(error))
    return Card(
        index=index,
        uuid=_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle)),
        name=_text(_ask(nvml, nvml.nvmlDeviceGetName, handle)),
        memory_total_bytes=memory["total"],
        memory_used_bytes=memory["used"],
        memory_reserved_bytes=memory["reserved"],
        processes=_processes(nvml, handle),
        mig=_mig(nvml, handle),
    )


def _ask(nvml: Any, question: Any, handle: Any) -> Any:
    """The answer, None when this card or driver does not know it."""
    try:
        return question(handle)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    """Older bindings answer bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _memory(nvml: Any, handle: Any) -> dict[str, int | None]:
    """Total, used, reserved. The second version of the call tells used from reserved by the driver."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except (nvml.NVMLError, TypeError):
            pass
        else:
            return {"total": int(info.total), "used": int(info.used), "reserved": int(info.reserved)}
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"total": int(info.total), "used": int(info.used), "reserved": None}


def _processes(nvml: Any, handle: Any) -> dict[int, int]:
    held: dict[int, int] = {}
    for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        question = getattr(nvml, name, None)
        for row in (_ask(nvml, question, handle) if question is not None else None) or ():
            # One process may be listed for computing and for graphics, with the same memory.
            held[int(row.pid)] = max(held.get(int(row.pid), 0), int(row.usedGpuMemory or 0))
    return held


def _mig(nvml: Any, handle: Any) -> bool | None:
    question = getattr(nvml, "nvmlDeviceGetMigMode", None)
    mode = _ask(nvml, question, handle) if question is not None else None
    return None if mode is None else bool(mode[0])


def owners(card: Card, pids: Iterable[int]) -> tuple[int | None, int | None]:
    """Bytes held by the engine's processes, and by all others; None when the driver hides the amounts."""
    if card.memory_used_bytes is None or any(size == 0 for size in card.processes.values()):
        return None, None
    ours = set(pids)
    engine = sum(size for pid, size in card.processes.items() if pid in ours)
    others = sum(size for pid, size in card.processes.items() if pid not in ours)
    return engine, others


def with_cards(ranks: Sequence[RankView], seen: Sequence[Card]) -> tuple[RankView, ...]:
    """Ranks with the driver's view of their card: total, used by this engine, used by other processes.

    A rank's card is the one that lists its process, else the one its device name counts to. Figures that
    NVML does not give stay as the rank reported them.
    """
    pids = [rank.pid for rank in ranks if rank.pid is not None]
    return tuple(_with_card(rank, _card_of(rank, seen), pids) for rank in ranks)


def _card_of(rank: RankView, seen: Sequence[Card]) -> Card | None:
    for card in seen:
        if rank.pid is not None and rank.pid in card.processes:
            return card
    kind, _, number = (rank.device or "").partition(":")
    if kind != "cuda" or not number.isdigit():
        return None
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    wanted = visible[int(number)] if int(number) < len(visible) else number
    for card in seen:
        if wanted in (str(card.index), card.uuid):
            return card
    return None


def _with_card(rank: RankView, card: Card | None, pids: list[int]) -> RankView:
    if card is None or card.memory_total_bytes is None:
        return rank
    engine, others = owners(card, pids)
    known = rank.pid in card.processes and engine is not None
    return msgspec.structs.replace(
        rank,
        memory_total_bytes=card.memory_total_bytes,
        memory_used_bytes=engine if known else rank.memory_used_bytes,
        other_processes_bytes=others if known else rank.other_processes_bytes,
    )


def binding_rank(ranks: Sequence[RankView]) -> RankView | None:
    """The rank whose card has least memory left: the one that limits the KV cache of all.

    None when no rank's memory is known.
    """
    known = [(left, index) for index, rank in enumerate(ranks) if (left := _left(rank)) is not None]
    return ranks[min(known)[1]] if known else None


def _left(rank: RankView) -> int | None:
    if rank.memory_total_bytes is None or rank.memory_used_bytes is None:
        return None
    return rank.memory_total_bytes - rank.memory_used_bytes - (rank.other_processes_bytes or 0)


def process_memory(pid: int, proc: str = "/proc") -> tuple[int, int] | None:
    """Resident and peak resident bytes of a process; None when it is gone. The card of a CPU engine."""
    found: dict[str, int] = {}
    try:
        with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in ("VmRSS", "VmHWM"):
                    found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    if "VmRSS" not in found:
        return None
    return found["VmRSS"], found.get("VmHWM", found["VmRSS"])

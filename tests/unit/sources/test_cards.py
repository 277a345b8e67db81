"""Cards against a fake of NVML's answers, errors included; process memory against this very process."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from kvcatch.errors import KVCatchError
from kvcatch.results import RankView
from kvcatch.sources.cards import Card, binding_rank, cards, owners, process_memory, with_cards

GIB = 1024**3


class FakeNVML:
    """The calls of pynvml that are used, with what a driver answers."""

    nvmlMemory_v2 = 0x2000028

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.lost: set[int] = set()
        self.driver = True
        self.hidden = False
        self.old = False
        self.shut = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        if version is not None and self.old:
            raise self.NVMLError("Function Not Found")
        reserved = {} if version is None else {"reserved": GIB // 2}
        used = 70 * GIB + (GIB // 2 if version is None else 0)
        return SimpleNamespace(total=80 * GIB, used=used, free=9 * GIB, **reserved)

    def nvmlDeviceGetUUID(self, handle: int) -> bytes | str:
        return f"GPU-{handle}".encode() if self.old else f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        amounts = (None, None) if self.hidden else (66 * GIB, 4 * GIB)
        rows = ((100 + handle, amounts[0]), (999, amounts[1]))
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in rows]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:
        if self.old:
            raise self.NVMLError("Not Supported")
        return (1, 1) if handle == 1 else (0, 0)


def test_a_card_says_total_used_reserved_and_who_holds_it() -> None:
    nvml = FakeNVML()
    first, second = cards(nvml)
    assert (first.memory_total_bytes, first.memory_used_bytes) == (80 * GIB, 70 * GIB)
    assert first.memory_reserved_bytes == GIB // 2
    assert first.processes == {100: 66 * GIB, 999: 4 * GIB}
    assert (first.mig, second.mig) == (False, True)
    assert owners(first, [100]) == (66 * GIB, 4 * GIB)
    assert nvml.shut == 1


def test_no_driver_and_no_binding_are_said() -> None:
    nvml = FakeNVML()
    nvml.driver = False
    with pytest.raises(KVCatchError, match="Driver Not Loaded"):
        cards(nvml)


def test_a_lost_card_does_not_hide_the_others() -> None:
    nvml = FakeNVML(3)
    nvml.lost = {1}
    got = cards(nvml)
    assert [card.error for card in got] == [None, "GPU is lost", None]
    assert got[1].memory_total_bytes is None
    assert got[2].memory_total_bytes == 80 * GIB
    assert nvml.shut == 1


def test_an_old_driver_answers_less_and_stays_readable() -> None:
    nvml = FakeNVML(1)
    nvml.old = True
    (card,) = cards(nvml)
    assert (card.uuid, card.memory_reserved_bytes, card.mig) == ("GPU-0", None, None)


def test_hidden_amounts_are_unknown_not_zero() -> None:
    nvml = FakeNVML(1)
    nvml.hidden = True
    (card,) = cards(nvml)
    assert owners(card, [100]) == (None, None)
    rank = RankView(device="cuda:0", pid=100, memory_used_bytes=5, other_processes_bytes=None)
    (joined,) = with_cards([rank], [card])
    assert (joined.memory_used_bytes, joined.other_processes_bytes) == (5, None)


def test_ranks_are_joined_by_process_whatever_the_device_is_called() -> None:
    ranks = [
        RankView(tp_rank=0, device="cuda:0", pid=101, kv_cache_bytes=40 * GIB),
        RankView(tp_rank=1, device="cuda:1", pid=100, kv_cache_bytes=40 * GIB),
    ]
    seen = [
        Card(index=0, memory_total_bytes=80 * GIB, memory_used_bytes=60 * GIB, processes={100: 60 * GIB}),
        Card(index=1, memory_total_bytes=40 * GIB, memory_used_bytes=38 * GIB, processes={101: 30 * GIB, 7: 8 * GIB}),
    ]  # fmt: skip
    first, second = with_cards(ranks, seen)
    assert (first.memory_total_bytes, first.memory_used_bytes) == (40 * GIB, 30 * GIB)
    assert first.other_processes_bytes == 8 * GIB
    assert (second.memory_total_bytes, second.other_processes_bytes) == (80 * GIB, 0)
    assert binding_rank([first, second]) == first


def test_in_a_container_the_device_name_finds_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML lists the host's pids there, and the ranks only know their own."""
    seen = [
        Card(index=index, uuid=f"GPU-{index}", memory_total_bytes=(index + 1) * GIB, memory_used_bytes=0)
        for index in range(4)
    ]
    rank = RankView(device="cuda:1", pid=1, memory_used_bytes=5)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert with_cards([rank], seen)[0].memory_total_bytes == 2 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    assert with_cards([rank], seen)[0].memory_total_bytes == 3 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-0")
    joined = with_cards([rank], seen)[0]
    assert (joined.memory_total_bytes, joined.memory_used_bytes) == (GIB, 5)


def test_ranks_without_a_card_stay_as_they_are() -> None:
    ranks = (RankView(device="cpu", pid=3, memory_used_bytes=5, memory_total_bytes=9),)
    assert with_cards(ranks, [Card(index=0, memory_total_bytes=1)]) == ranks
    assert binding_rank(ranks) == ranks[0]
    assert binding_rank([RankView()]) is None


def test_the_memory_of_a_process_is_its_card_on_a_cpu() -> None:
    block = bytearray(64 * 1024**2)
    block[::4096] = b"x" * len(block[::4096])
    got = process_memory(os.getpid())
    assert got is not None
    resident, peak = got
    assert 64 * 1024**2 < resident <= peak
    assert process_memory(2**22 + 1) is None

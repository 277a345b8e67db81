"""A recorded engine as a ``Workload``: what was asked of it, to ask again of a simulated one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcatch.errors import KVCatchError
from kvcatch.store.base import Capture
from kvcatch.workload import Workload, build


@dataclass(frozen=True, eq=False)
class Measured:
    """What the engine did with the requests, in the workload's order; seconds from the first arrival."""

    first_token: npt.NDArray[np.float64]
    finished: npt.NDArray[np.float64]
    cached_tokens: npt.NDArray[np.int64]
    preemptions: int
    recomputed_tokens: int


@dataclass
class _Request:
    arrival: int
    prompt: int
    tenant: str
    known: bool
    max_tokens: int
    frontend: int = 0
    hashes: list[str] = field(default_factory=list)
    cached: int = 0
    first: int = 0
    finished: int = 0
    output: int = 0
    preemptions: int = 0
    recomputed: int = 0


def workload_of(capture: Capture, *, client_times: bool = False) -> tuple[Workload, Measured]:
    """Every request that ended, with the prefixes that its block hashes tell.

    Args:
        capture: a recording.
        client_times: arrivals as the front end saw them, to be sent again; by default as the engine core did, to be
            scheduled again.

    Raises:
        KVCatchError: the capture holds no request that ended, or does not know its block size.
    """
    size = capture.info.hash_block_size or capture.info.block_size
    if not size:
        raise KVCatchError(
            f"{capture.target}: the block size is not recorded.", "Record it with kvcatch run."
        )
    requests = _collect(capture)
    if client_times:
        for request in requests.values():
            request.arrival -= request.frontend
    ended = [request for request in requests.values() if request.finished and request.prompt]
    if not ended:
        raise KVCatchError(f"{capture.target}: no request that ended in it.", "Record for longer.")
    ended.sort(key=lambda request: request.arrival)
    notes = []
    if len(ended) < len(requests):
        notes.append(f"{len(requests) - len(ended)} requests had not ended and are left out")
    short = sum(1 for request in ended if not request.known or len(request.hashes) < request.prompt // size)
    if short:
        notes.append(f"block hashes of {short} requests are incomplete: what they shared is unknown")
    rows = []
    start = ended[0].arrival
    for number, request in enumerate(ended):
        named = request.hashes[: request.prompt // size]
        segments: list[tuple[object, int]] = [(name, size) for name in named]
        left = request.prompt - len(named) * size
        if left:
            segments.append((number, left))
        rows.append(
            {
                # Seconds since 1970 would be off by up to half a microsecond.
                "arrival": (request.arrival - start) / 1e9,
                "prompt": request.prompt,
                "output": request.output,
                "segments": segments,
                "made": request.hashes[request.prompt // size :]
                if len(named) == request.prompt // size
                else (),
                "tenant": request.tenant,
                "max_tokens": request.max_tokens,
            }
        )
    workload = build(capture.target, rows, grain=size, notes=notes)
    return workload, Measured(
        first_token=np.array([(r.first - start) / 1e9 if r.first else np.nan for r in ended]),
        finished=np.array([(r.finished - start) / 1e9 for r in ended]),
        cached_tokens=np.array([r.cached for r in ended], np.int64),
        preemptions=sum(r.preemptions for r in ended),
        recomputed_tokens=sum(r.recomputed for r in ended),
    )


def _collect(capture: Capture) -> dict[int, _Request]:
    requests: dict[int, _Request] = {}
    # Numbered from 1 in the order in which the recorder met them; 0 is the root of all prefixes.
    nodes: list[tuple[int, str]] = [(0, "")]
    for event in capture.events():
        kind = event["kind"]
        if kind == "epoch":
            nodes = [(0, "")]
            continue
        if kind == "chain":
            parent, path = event["parent_node"], []
            for name in event["hashes"]:
                nodes.append((parent, name))
                parent = len(nodes) - 1
            while parent and parent < len(nodes):
                parent, name = nodes[parent]
                path.append(name)
            if event["rid"] in requests:
                requests[event["rid"]].hashes = path[::-1]
            continue
        if kind == "arrive":
            requests[event["rid"]] = _Request(
                arrival=event["unix_ns"],
                prompt=event["prompt_tokens"],
                tenant=event["tags"].get("tenant", ""),
                known=event["num_hashes"] is not None,
                max_tokens=event.get("max_tokens") or 0,
                frontend=event.get("frontend_ns", 0),
            )
            continue
        request = requests.get(event.get("rid", -1))
        if request is None:
            continue
        if kind == "new":
            request.cached = event["hit_tokens"]
        elif kind == "first_token":
            request.first = event["unix_ns"]
        elif kind == "finish":
            request.finished, request.output = event["unix_ns"], event["output_tokens"]
            request.preemptions, request.recomputed = event["preemptions"], event["recomputed_tokens"]
    return requests

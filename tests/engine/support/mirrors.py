"""A gateway that copies every request to a candidate, driven one request after the other."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.support.gateway import Gateway, gateway
from engine.support.processes import children, deadline_poll, stat
from engine.support.server import Server, engine_lock, server


@dataclass(frozen=True)
class Site:
    """Two engines of one model."""

    upstream: Server
    candidate: Server


@contextmanager
def two_engines(folder: Path, model: Path, flags: Sequence[str], more: Sequence[str] = ()) -> Iterator[Site]:
    """Both with ``flags``, the candidate with ``more`` too."""
    with (
        engine_lock(),
        server(folder / "b", model, *flags, *more, lock=False, wait=False) as candidate,
        server(folder / "a", model, *flags, lock=False) as upstream,
    ):
        deadline_poll(candidate.healthy, 300, f"health of the candidate (log: {candidate.log})", 0.2)
        yield Site(upstream, candidate)


@dataclass(frozen=True)
class Mirrored:
    """What a mirror left: its folder, the gateway's log, the choices that clients got."""

    results: Path
    log: str
    choices: list[Any]


def outcomes(front: Gateway) -> dict[str, int]:
    """Requests of the mirror by outcome, from the gateway's own page."""
    with urllib.request.urlopen(front.url + "/metrics", timeout=10) as answer:
        page = answer.read().decode()
    found = re.findall(
        r'^kvcatch_gateway_mirror_requests_total\{outcome="([^"]+)"\} (\S+)', page, re.MULTILINE
    )
    return {name: int(float(value)) for name, value in found}


def drive(folder: Path, rings: Path, upstream: str, candidate: str, bodies: list[dict[str, Any]]) -> Mirrored:
    """Send the requests, each after the comparison of the one before, until the mirror stops."""
    results, choices = folder / "mirror", []

    def over(count: int) -> bool:
        # Copied is not the end of it.
        ended = sum(value for name, value in outcomes(front).items() if name != "copied")
        return "mirror stopped" in front.text or ended >= count

    with gateway(
        folder, rings, "--upstream", upstream, "--mirror", candidate, "--mirror-share", "1",
        "--mirror-dir", str(results),
    ) as front:  # fmt: skip
        (worker,) = children(front.process.pid)
        for count, body in enumerate(bodies, 1):
            choices.append(front.post("/v1/completions", body).json["choices"])
            deadline_poll(lambda count=count: over(count), 120, "the comparison", 0.05)
            if "mirror stopped" in front.text:
                break
    assert stat(worker) is None
    return Mirrored(results, front.text, choices)

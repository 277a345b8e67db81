"""Who holds the cache over time (tenants and their largest requests), and the life of each request."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcatch.store.columns import Recording
from kvcatch.store.names import client_request_id
from kvcatch.views.html.curves import milliseconds
from kvcatch.views.html.thin import Ints, Slices

INSTANTS, TENANTS, LARGEST, LIVES = 240, 8, 12, 3000
_FOREVER = 1 << 62


def holders(recording: Recording, samples: dict[str, Any]) -> dict[str, Any] | None:
    """Blocks held by tenants and by their largest requests, at the fullest moment of each slice of time.

    A block that several requests share counts for each of them. None when nothing was held.
    """
    requests, unix = recording.requests, samples["unix_ns"]
    slices = Slices(unix, INSTANTS)
    instants = unix[slices.row_of_highest(samples["active_blocks"])]
    rid, at, blocks = _standing(recording, instants - recording.wall_offset)
    row = np.minimum(np.searchsorted(requests.rid, rid), max(0, len(requests) - 1))
    if not len(row):
        return None
    known, code = np.unique(np.array(requests.tenants(), dtype=str), return_inverse=True)
    tenant = code[row]
    totals = np.zeros((len(known), len(instants)), np.int64)
    np.add.at(totals, (tenant, at), blocks)
    ranked = np.argsort(-totals.max(axis=1), kind="stable")
    ranked = ranked[totals[ranked].max(axis=1) > 0]
    tenants = []
    for number in ranked[:TENANTS]:
        mine = np.flatnonzero(tenant == number)
        mine = mine[np.lexsort((-blocks[mine], at[mine]))]
        largest: list[list[list[int]]] = [[] for _ in instants]
        place: dict[int, int] = {}
        for moment, who, held in zip(
            at[mine].tolist(), row[mine].tolist(), blocks[mine].tolist(), strict=True
        ):
            if len(largest[moment]) < LARGEST:
                largest[moment].append([place.setdefault(who, len(place)), held])
        names = [client_request_id(requests.named(who)[0]) for who in place]
        tenants.append(
            {
                "name": str(known[number]),
                "blocks": totals[number].tolist(),
                "requests": names,
                "largest": largest,
            }
        )
    rest = ranked[TENANTS:]
    if len(rest):
        summed = totals[rest].sum(axis=0).tolist()
        tenants.append(
            {
                "name": f"{len(rest)} other tenants",
                "blocks": summed,
                "requests": [],
                "largest": [[] for _ in instants],
            }
        )
    return {"x": milliseconds(instants, int(unix[0])), "tenants": tenants}


def _standing(recording: Recording, moments: Ints) -> tuple[Ints, Ints, Ints]:
    """Who held how much at these moments: request number, place of the moment, blocks."""
    holds = recording.holds
    until = np.full(len(holds.time), _FOREVER)
    same = holds.rid[1:] == holds.rid[:-1]
    until[:-1][same] = holds.time[1:][same]
    first, last = np.searchsorted(moments, holds.time), np.searchsorted(moments, until)
    count = np.where(holds.blocks > 0, np.maximum(0, last - first), 0)
    rows = np.repeat(np.arange(len(count)), count)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count) + first[rows]
    return holds.rid[rows], place, holds.blocks[rows]


def lives(
    recording: Recording, samples: dict[str, Any], rows: Ints, seconds_per_token: float | None
) -> dict[str, Any]:
    """The requests worth drawing: preempted ones, then the largest holders, then the longest waits.

    A preemption has when it came, when the request ran again (None: never), and how long computing its tokens again
    took at the measured prefill speed (None: unknown).
    """
    requests, holds, start = recording.requests, recording.holds, int(samples["unix_ns"][0])
    offset = recording.wall_offset - start
    wait = np.where(requests.first[rows] > 0, requests.first[rows] - requests.arrival[rows], 0)
    peaks = _peaks(recording, rows)
    order = np.lexsort((-wait, -peaks, -requests.preemptions[rows]))[:LIVES]
    chosen = rows[order]
    place = {int(rid): at for at, rid in enumerate(requests.rid[chosen])}
    stops: list[list[list[int | None]]] = [[] for _ in chosen]
    first = np.searchsorted(holds.rid, requests.rid[chosen])
    last = np.searchsorted(holds.rid, requests.rid[chosen], side="right")
    lost = recording.preempted
    for rid, computed, when in zip(
        *(lost[name].tolist() for name in ("rid", "computed_tokens", "time")), strict=True
    ):
        at = place.get(int(rid))
        if at is None:
            continue
        mine = slice(first[at], last[at])
        later = np.flatnonzero((holds.time[mine] > when) & (holds.blocks[mine] > 0))
        again = int(holds.time[mine][later[0]]) if len(later) else None
        lasted = None if seconds_per_token is None else round(1e3 * seconds_per_token * computed)
        stops[at].append([_ms(when + offset), None if again is None else _ms(again + offset), lasted])
    tenants = requests.tenants()
    listed = []
    for at, row in enumerate(chosen.tolist()):
        times = [_ms(int(value[row]) + offset) if value[row] else None
                 for value in (requests.arrival, requests.scheduled, requests.first, requests.finish)]  # fmt: skip
        listed.append(
            [
                client_request_id(requests.named(row)[0]), tenants[row], *times, int(peaks[order[at]]),
                int(requests.prompt_tokens[row]), int(requests.output_tokens[row]), int(requests.cached_tokens[row]),
                int(requests.recomputed_tokens[row]), stops[at],
            ]
        )  # fmt: skip
    return {"rows": listed, "of": len(rows)}


def _peaks(recording: Recording, rows: Ints) -> Ints:
    holds = recording.holds
    if not len(holds.rid):
        return np.zeros(len(rows), np.int64)
    starts = np.flatnonzero(np.diff(holds.rid, prepend=holds.rid[0] - 1))
    most = np.maximum.reduceat(holds.blocks, starts)
    at = np.minimum(np.searchsorted(holds.rid[starts], recording.requests.rid[rows]), len(starts) - 1)
    result: Ints = np.where(holds.rid[starts][at] == recording.requests.rid[rows], most[at], 0)
    return result


def _ms(nanoseconds: int) -> int:
    return int(nanoseconds // 1_000_000)

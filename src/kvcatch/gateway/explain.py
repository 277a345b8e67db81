"""What would happen to a request now, for operators."""

from __future__ import annotations

from typing import Any

from kvcatch.gateway.body import Ask
from kvcatch.gateway.door import STRICT
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.fit import never_fits
from kvcatch.gateway.gate import Gate, Headers
from kvcatch.gateway.ledger import Entry
from kvcatch.gateway.refusal import Refusal


async def explain(gate: Gate, route: str, headers: Headers, raw: bytes) -> dict[str, Any]:
    """What would happen to this request now, without sending it."""
    flight = gate.begin(route, None)
    try:
        ask = await gate.judge(flight, headers, raw)
        entry = flight.entry
        assert entry is not None
        rows = [_engine(gate, engine, ask, entry) for engine in gate.serving(ask.model)]
        held = [row for row in rows if row["would_be"] != "relayed"]
        best = next((row for row in rows if row["would_be"] == "relayed"), rows[0])
        return {
            "outcome": best["would_be"], "reasons": best["reasons"], "tenant": flight.tenant or None,
            "prompt_tokens": ask.total_prompt, "output_tokens": entry.strict, "planned_output_tokens": entry.planned,
            "long": entry.long, "changed": ask.changed, "engines": rows, "engines_that_hold": len(held),
        }  # fmt: skip
    except Refusal as refusal:
        return {
            "outcome": "refused", "status": refusal.status, "reasons": [refusal.reason],
            "message": refusal.message, "details": refusal.details,
        }  # fmt: skip
    finally:
        gate.flights.pop(flight.key, None)


def _engine(gate: Gate, engine: Engine, ask: Ask, entry: Entry) -> dict[str, Any]:
    ledger = engine.ledger
    row: dict[str, Any] = {"engine": engine.label, "would_be": "relayed", "reasons": []}
    refusal = never_fits(ask, engine)
    if ledger is not None and refusal is None:
        ledger.size(entry)
        entry.long = entry.longest > gate.door.long_threshold(engine)
        refusal = gate.door.never(entry, engine)
        found = gate.door.reasons(entry, engine)
        row["reasons"] = [name if counts else f"{name} (observed only)" for name, counts in found]
        row["would_be"] = "held" if any(counts for _, counts in found) else "relayed"
        row |= {
            "needed_blocks": entry.blocks, "planned_blocks": ledger.planned_blocks(),
            "peak_blocks": ledger.peak_with(entry, gate.policy.rules.mode == STRICT),
            "limit_blocks": ledger.limit, "foreign_blocks": round(ledger.foreign),
        }  # fmt: skip
    if refusal is not None:
        row |= {"would_be": "refused", "reasons": [refusal.reason]}
    return row

"""What fits into an engine at all: its context, and its whole pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvcatch.gateway.body import Ask
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.ledger import kv_tokens
from kvcatch.gateway.refusal import Refusal


def room(ask: Ask, engines: Sequence[Engine]) -> int | None:
    """Output tokens beside the longest prompt on the roomiest engine; None while nothing is known."""
    rooms = []
    for engine in engines:
        bounds = []
        if engine.max_model_len:
            bounds.append(engine.max_model_len - ask.longest_prompt)
        if engine.exact_layout and engine.ledger is not None:
            bounds.append(most_tokens(engine) + 1 - ask.longest_prompt)
        if bounds:
            rooms.append(min(bounds))
    return max(rooms, default=None)


def pool_is_smaller(engines: Sequence[Engine]) -> bool:
    """Whether an engine takes longer requests than its pool holds."""
    return any(
        engine.exact_layout
        and engine.ledger is not None
        and (engine.max_model_len or 0) > most_tokens(engine)
        for engine in engines
    )


def refuse_never(ask: Ask, engines: Sequence[Engine]) -> None:
    """Raise the Refusal of what no engine can ever hold: prompt, and prompt with all the output it may reach."""
    refusals = []
    for engine in engines:
        refusal = never_fits(ask, engine)
        if refusal is None:
            return
        refusals.append(refusal)
    raise refusals[0]


def most_tokens(engine: Engine) -> int:
    """KV tokens of the longest sequence that one pool of this engine holds."""
    table = engine.ledger.blocks if engine.ledger is not None else None
    if table is None:
        return 0
    return int(table.values.searchsorted(engine.info.usable_blocks, side="right")) - 1


def never_fits(ask: Ask, engine: Engine) -> Refusal | None:
    """Why this engine can never finish the request, None when it can (or nothing is known)."""
    prompt, output = ask.longest_prompt, ask.output_tokens
    least = output if output is not None else 1
    if ask.generates and ask.document.get("echo") is not True:
        least = max(1, least)
    longest = engine.max_model_len
    if longest is not None and prompt + least > longest:
        return Refusal(
            413, "context-length",
            f"{prompt} prompt tokens and {least} output tokens; this model's context is {longest}.",
            code="context_length_exceeded",
            details={"prompt_tokens": prompt, "output_tokens": least, "limit_tokens": longest},
        )  # fmt: skip
    need = engine.needed_blocks(kv_tokens(prompt, least))
    usable = engine.info.usable_blocks
    if need is not None and need > usable:
        return Refusal(
            413, "never-fits",
            f"{prompt} prompt tokens and {least} output tokens need {need} KV blocks; the engine has {usable}.",
            code="context_length_exceeded",
            details={"prompt_tokens": prompt, "output_tokens": least, "needed_blocks": need, "usable_blocks": usable},
        )  # fmt: skip
    return None

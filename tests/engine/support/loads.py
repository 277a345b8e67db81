"""Made-up requests whose prefix sharing, lengths and tenants are known."""

from __future__ import annotations

import random
import string

from engine.support.server import Ask

LETTERS = string.ascii_letters + string.digits + " .,:;"


def text(rng: random.Random, length: int) -> str:
    """Random printable text; one character is one token of the tiny models."""
    return "".join(rng.choice(LETTERS) for _ in range(length))


def tenants_load(
    count: int,
    tenants: int = 8,
    prompt: tuple[int, int] = (20, 300),
    output: tuple[int, int] = (20, 200),
    seed: int = 0,
) -> list[Ask]:
    """``count`` requests of ``tenants``, each tenant with a system prompt of its own length in front.

    Even requests carry their tenant in the request id, odd ones in ``vllm_xargs``.
    """
    rng = random.Random(seed)
    systems = [text(rng, rng.randrange(20, 260)) for _ in range(tenants)]
    asks = []
    for index in range(count):
        tenant = index % tenants
        name = f"team{tenant}"
        if index // tenants % 2:
            request_id, more = f"r{index}", {"vllm_xargs": {"kvcatch_tenant": name}}
        else:
            request_id, more = f"kvc~{name}~~r{index}", {}
        body = systems[tenant] + text(rng, rng.randrange(*prompt))
        asks.append(Ask(body, rng.randrange(*output), request_id, more=more))
    return asks

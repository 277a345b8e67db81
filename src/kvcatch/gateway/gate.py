"""The path of a request up to its engine and after it: parse, tag, cap, count, fit, shorten, limit, admit, settle.

No sockets here: the same gate serves the proxy and the middleware inside an engine's API server.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvcatch.capture import tags
from kvcatch.gateway import body as bodies
from kvcatch.gateway.body import COMPLETIONS, EMBEDDINGS, RESPONSES, Ask
from kvcatch.gateway.counting import Counter
from kvcatch.gateway.door import STRICT, TENANT_HOLD, Door
from kvcatch.gateway.engine import Engine
from kvcatch.gateway.fit import never_fits, pool_is_smaller, refuse_never, room
from kvcatch.gateway.fleet import Fleet
from kvcatch.gateway.flight import COUNTING, RELAYING, WAITING, Flight
from kvcatch.gateway.ledger import Entry
from kvcatch.gateway.limits import Denied, Limits, MemoryLimits, Want
from kvcatch.gateway.meters import Meters
from kvcatch.gateway.policy import Policy
from kvcatch.gateway.refusal import Refusal
from kvcatch.gateway.truncate import REJECT, shorten
from kvcatch.policy.lengths import OutputLengths

logger = logging.getLogger("kvcatch.gateway")

#: of observed output lengths, to plan with in the modes that do not have to prove anything
QUANTILE = 0.9
#: bodies above this are decoded in a thread
INLINE_BYTES = 256 << 10

Headers = Iterable[tuple[str, str]]


class Gate:
    """Governs the requests of one process. ``counters`` by model; ``engines`` are all upstreams."""

    def __init__(
        self,
        policy: Policy,
        engines: Sequence[Engine],
        limits: Limits | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.policy = policy
        self.engines = list(engines)
        self.limits: Limits = limits or MemoryLimits()
        self.fleet = fleet
        self.door = Door(policy.rules, shared=fleet)
        self._share_rules()
        self.lengths = OutputLengths(QUANTILE)
        self.meters = Meters()
        self.flights: dict[str, Flight] = {}
        self.counters: dict[str, Counter] = {}
        self._background: set[asyncio.Task[Any]] = set()

    def use(self, policy: Policy) -> None:
        """Decide by another policy from now on; requests in flight keep what they were given."""
        self.policy = policy
        self.door.rules = policy.rules
        self._share_rules()
        for engine in self.engines:
            engine.reserve_ratio = policy.reserve_ratio
            if engine.ledger is not None:
                engine.ledger.reserve_ratio = engine.reserved()
        self.door.drain()

    def start(self) -> None:
        """Begin to share ledgers with other gateways. In the event loop."""
        if self.fleet is not None:
            self.fleet.start(self.engines, self.door.drain, lambda: self.door.waiting > 0)

    async def close(self) -> None:
        """Give back what is held elsewhere."""
        await self.settled()
        await self.limits.close()
        if self.fleet is not None:
            await self.fleet.close()

    def _share_rules(self) -> None:
        if self.fleet is not None:
            self.fleet.strict = self.policy.rules.mode == STRICT

    # ---- before the engine -----------------------------------------------------------------------------

    def begin(self, route: str, given_id: str | None) -> Flight:
        """A request has arrived."""
        clean = bodies.clean_request_id(given_id)
        if clean is not None:
            clean, _ = tags.request_tags(clean, None)  # a raw user in the id is hashed
        flight = Flight(uuid.uuid4().hex, clean or f"kvg-{uuid.uuid4().hex[:20]}", route)
        flight.task = asyncio.current_task()
        self.flights[flight.key] = flight
        return flight

    async def judge(self, flight: Flight, headers: Headers, raw: bytes) -> Ask:
        """Everything that can be decided about the request alone. Raises Refusal."""
        if len(raw) > INLINE_BYTES:
            ask = await asyncio.to_thread(bodies.parse, flight.route, raw)
        else:
            ask = bodies.parse(flight.route, raw)
        flight.ask = ask
        self._tag(flight, ask, headers)
        left = self.door.on_hold(flight.tenant)
        if left > 0:
            raise Refusal(
                429, TENANT_HOLD, "This tenant is on hold by the operator.", code="tenant_on_hold", retry_seconds=left
            )  # fmt: skip
        engines = self.serving(ask.model)
        flight.state = COUNTING
        counter = self.counters.get(engines[0].url)
        if counter is None:
            raise Refusal(503, "no-engine", "No engine answers at the moment.", retry_seconds=5.0)
        ask.prompt_tokens = await counter.count(ask)
        self._engine_cuts(ask)
        await self._shorten(ask, counter, engines)
        self._cap_output(ask, engines)
        refuse_never(ask, engines)
        flight.entry = self._entry(flight, ask)
        return ask

    def _tag(self, flight: Flight, ask: Ask, headers: Headers) -> None:
        """Who it is: into the flight, and into the body for the recorder."""
        policy = self.policy
        pairs = [
            (name.encode("latin-1", "replace"), value.encode("utf-8", "surrogateescape"))
            for name, value in headers
        ]
        found = policy.tags.tags_for(pairs, ask.document, policy.trust_header)
        given = ask.document.get("vllm_xargs") or {}
        if (
            "kvcatch_tenant" not in found
            and policy.trust_header
            and isinstance(given.get("kvcatch_tenant"), str)
        ):
            found["kvcatch_tenant"] = given["kvcatch_tenant"][: tags.MAX_VALUE]
        if "kvcatch_tenant" not in found and policy.trust_header:
            named = tags.request_tags(flight.request_id, None)[1].get("tenant")
            if named:
                found["kvcatch_tenant"] = named
        flight.tenant = found.get("kvcatch_tenant", "")
        if ask.route == EMBEDDINGS:
            ask.document.pop("vllm_xargs", None)
            return
        # What the client says about itself counts only where it may name its tenant.
        if isinstance(given.get("kvcatch_user"), str) and "kvcatch_user" not in found:
            found["kvcatch_user"] = tags.hash_user(given["kvcatch_user"])
        kept = {k: v for k, v in given.items() if k not in ("kvcatch_tenant", "kvcatch_user")}
        if kept or found:
            ask.document["vllm_xargs"] = {**kept, **found}
        if isinstance(ask.document.get("user"), str):
            ask.document["user"] = tags.hash_user(ask.document["user"])
        priority = policy.priorities.get(flight.tenant)
        if priority is not None:
            ask.document["priority"] = priority
        if policy.isolate:
            # Prefixes are shared within a tenant only; a salt of the client's own splits further.
            own = ask.document.get("cache_salt")
            secret = f"salt:{flight.tenant}:{own if isinstance(own, str) else ''}"
            ask.document["cache_salt"] = f"{tags.hash_secret(secret):016x}"

    def serving(self, model: str) -> list[Engine]:
        """Engines that serve a model; a request without one may go anywhere. Raises Refusal (404, 503)."""
        known = [engine for engine in self.engines if engine.models]
        if not known:
            raise Refusal(503, "no-engine", "No engine answers at the moment.", retry_seconds=5.0)
        found = [engine for engine in known if not model or model in engine.models]
        if not found:
            raise Refusal(404, "model", "No engine serves this model.", code="model_not_found")
        return sorted(found, key=lambda engine: not engine.healthy)

    def _engine_cuts(self, ask: Ask) -> None:
        """A request may itself ask the engine to cut its prompt (``truncate_prompt_tokens``)."""
        limit = ask.document.get("truncate_prompt_tokens")
        if isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1:
            ask.prompt_tokens = [min(limit, tokens) for tokens in ask.prompt_tokens]

    async def _shorten(self, ask: Ask, counter: Counter, engines: Sequence[Engine]) -> None:
        """The over-long policy of the route."""
        length = self.policy.length_of(ask.route)
        limit = length.max_input
        if limit is None or ask.longest_prompt <= limit:
            return
        before = ask.total_prompt
        if length.over_long == REJECT:
            raise _over_long(ask.longest_prompt, limit)
        for index, prompt in enumerate(ask.prompts):

            async def counted(trial: Any, index: int = index) -> int:
                return (await counter.count(_with_prompt(ask, index, trial)))[index]

            cut = await shorten(prompt, ask.prompt_tokens[index], limit, length.over_long, counted)
            if cut is None:
                raise _over_long(ask.prompt_tokens[index], limit)
            ask.prompts[index], ask.prompt_tokens[index] = cut
        _store_prompts(ask)
        ask.changed["x-kvcatch-truncated"] = str(before - ask.total_prompt)

    def _cap_output(self, ask: Ask, engines: Sequence[Engine]) -> None:
        """Output limits; an open end gets one where the engine would otherwise grow past its pool."""
        if not ask.generates:
            return
        length = self.policy.length_of(ask.route)
        if (
            length.max_logprobs is not None
            and ask.prompt_logprobs
            and ask.longest_prompt > length.max_logprobs
        ):
            raise Refusal(
                413, "prompt-logprobs",
                f"Log probabilities of {ask.longest_prompt} prompt tokens; the limit is {length.max_logprobs}.",
                code="request_too_large",
                details={"prompt_tokens": ask.longest_prompt, "limit_tokens": length.max_logprobs},
            )  # fmt: skip
        beside = room(ask, engines)
        if ask.output_tokens is None:
            if length.max_output is not None:
                ask.set_output(max(1, min(length.max_output, beside or length.max_output)))
            elif beside is not None and pool_is_smaller(engines):
                ask.set_output(max(1, beside))
        elif length.max_output is not None and ask.output_tokens > length.max_output:
            ask.set_output(length.max_output)

    def _entry(self, flight: Flight, ask: Ask) -> Entry:
        strict = ask.output_tokens if ask.output_tokens is not None else self._open_end(ask)
        planned = strict
        if self.policy.rules.mode != STRICT:
            planned = min(strict, self.lengths.bound(flight.tenant, ask.longest_prompt, 0, strict))
        # Progress is known only where the tokens are seen to pass.
        produced = 0 if ask.stream and ask.generates else None
        return Entry(
            key=flight.key, tenant=flight.tenant, prompts=tuple(ask.prompt_tokens), weight=ask.choices,
            strict=strict, planned=planned, produced=produced, request_id=flight.request_id,
        )  # fmt: skip

    def _open_end(self, ask: Ask) -> int:
        """What the engine itself puts in when a request does not say: all that is left of the context."""
        beside = room(ask, self.serving(ask.model))
        return max(1, beside if beside is not None else bodies.COMPLETION_DEFAULT)

    async def admit(self, flight: Flight) -> Engine:
        """Limits, then blocks; waits if it must. Raises Refusal."""
        ask, entry = flight.ask, flight.entry
        assert ask is not None
        assert entry is not None
        engines = [e for e in self.serving(ask.model) if never_fits(ask, e) is None]
        sequences = entry.weight * len(entry.prompts)
        flight.state = WAITING
        entry.long = any(entry.longest > self.door.long_threshold(engine) for engine in engines)
        wants = self.policy.wants(flight.tenant, entry.total_prompt + entry.strict * sequences, entry.long)
        if wants:
            denied = await self.limits.reserve(flight.key, wants)
            if denied is not None:
                raise _denied(denied)
            flight.reserved = True
        engine = await self.door.enter(entry, engines, self.policy.priorities.get(flight.tenant, 0))
        flight.engine = engine
        engine.in_flight += 1
        flight.state = RELAYING
        for reason in entry.observed:
            self.meters.would_hold(reason)
        return engine

    def idle(self, engine: Engine) -> bool:
        """Whether an engine has room for work that nobody waits for: nothing waits, half of its pool is not in use.

        False while its state is unknown or old. Reads single values only, so any thread may ask.
        """
        reading = engine.reading
        if reading is None or not engine.healthy or engine.degraded(time.monotonic()):
            return False
        if self.door.waiting or reading.waiting:
            return False
        usable = reading.info.usable_blocks * reading.pools
        return reading.active_blocks is None or not usable or 2 * reading.active_blocks <= usable

    # ---- after the engine --------------------------------------------------------------------------------

    def end(self, flight: Flight, outcome: str, reason: str) -> None:
        """The request is over, however: give everything back, once."""
        if self.flights.pop(flight.key, None) is None:
            return
        self.meters.decided(outcome, reason)
        entry, engine = flight.entry, flight.engine
        output = self._output(flight)
        if engine is not None and entry is not None:
            engine.in_flight -= 1
            self.door.leave(entry, engine, output or 0)
            if flight.output is not None and outcome == "relayed":
                self.lengths.observe(
                    flight.tenant, entry.longest, max(1, flight.output // max(1, entry.weight))
                )
        if flight.reserved and entry is not None:
            task = asyncio.get_running_loop().create_task(
                self.limits.settle(flight.key, self._used(flight, entry, output))
            )
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _output(self, flight: Flight) -> int | None:
        """Output tokens to charge; None = unknown."""
        if flight.output is not None:
            return flight.output
        engine = flight.engine
        if engine is not None and engine.reading is not None:
            known = engine.reading.finished.get(flight.request_id)
            if known is not None:
                return known
        return flight.events if self.policy.charge_unknown == "chunks" and flight.events else None

    def _used(self, flight: Flight, entry: Entry, output: int | None) -> dict[str, int]:
        """What to charge per bucket. A request the engine never saw costs nothing."""
        sequences = entry.weight * len(entry.prompts)
        if not flight.sent:
            tokens, count = 0, 0
        else:
            spent = entry.strict * sequences if output is None else output
            tokens, count = entry.total_prompt + spent, 1
        tenant = flight.tenant or "-"
        return {f"tokens:{tenant}": tokens, f"requests:{tenant}": count, f"long:{tenant}": count}

    async def settled(self) -> None:
        """Wait until every settlement has been written."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)

    # ---- operators ---------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> list[Flight]:
        """End every request of this id (the client's, or an engine's id that contains it)."""
        hit = [
            f
            for f in self.flights.values()
            if f.request_id == request_id or _inside(f.request_id, request_id)
        ]
        return [flight for flight in hit if flight.abort("operator")]

    def hold(self, tenant: str, seconds: float) -> None:
        """Refuse new requests of a tenant for a while; 0 ends it."""
        if seconds > 0:
            self.door.held[tenant] = time.monotonic() + seconds
        else:
            self.door.held.pop(tenant, None)


def _over_long(tokens: int, limit: int) -> Refusal:
    return Refusal(
        413, "over-long", f"The prompt has {tokens} tokens; the limit is {limit}.", code="context_length_exceeded",
        details={"prompt_tokens": tokens, "limit_tokens": limit},
    )  # fmt: skip


def _denied(denied: Denied) -> Refusal:
    want: Want = denied.want
    kind = want.bucket.partition(":")[0]
    details: Mapping[str, int] = {"requested": want.amount, "limit": want.limit}
    if denied.never:
        return Refusal(
            429, f"limit-{kind}", f"This request alone asks for {want.amount} {kind}; the limit is {want.limit}.",
            code="request_too_large", details=details,
        )  # fmt: skip
    per = f" per {want.window} s" if want.window else " at once"
    return Refusal(
        429, f"limit-{kind}", f"The tenant's limit of {want.limit} {kind}{per} is used up.", code="rate_limit_exceeded",
        retry_seconds=denied.retry_seconds if denied.retry_seconds is not None else 1.0, details=details,
    )  # fmt: skip


def _inside(request_id: str, engine_id: str) -> bool:
    """Whether an engine's id (``cmpl-<id>-0-<hex>``) is one of this request's."""
    from kvcatch.store.names import client_request_id

    return client_request_id(engine_id) == request_id


def _with_prompt(ask: Ask, index: int, prompt: Any) -> Ask:
    """A copy of the request with another prompt, for counting."""
    prompts = [*ask.prompts]
    prompts[index] = prompt
    return Ask(
        route=ask.route, document=ask.document, model=ask.model, stream=ask.stream, output_tokens=ask.output_tokens,
        choices=ask.choices, prompts=prompts, prompt_logprobs=ask.prompt_logprobs,
    )  # fmt: skip


def _store_prompts(ask: Ask) -> None:
    """Write the (shortened) prompts back into the document."""
    if ask.route == bodies.CHAT:
        ask.document["messages"] = ask.prompts[0]
        return
    name = "prompt" if ask.route == COMPLETIONS else "input"
    single = (
        ask.route == RESPONSES
        or isinstance(ask.document[name], str)
        or isinstance(ask.document[name][0], int)
    )
    ask.document[name] = ask.prompts[0] if single else ask.prompts

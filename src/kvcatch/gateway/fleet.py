"""One ledger per engine for any number of gateways, in Redis: admission is one script, one round trip.

Every gateway keeps one row per engine: the sum of the curves (``curve``) of its own requests there. The script
replaces that row, subtracts the old and adds the new one to the engine's sum, and lets in every candidate that fits
beside it. Replacing cannot count anything twice, so the same call announces, renews, releases, and rebuilds a Redis
that came back empty. The clock is Redis's own.

    {p}:kv1:ENGINE      hash: born (microseconds), epoch, sum, g:GATEWAY -> "sequence epoch row",
                        asked (calls with candidates), admitted (candidates)
    {p}:kv1:ENGINE:z    sorted set: gateway -> end of its lease (microseconds)
    row, sum            held planned requests, then blocks in each of the 64 slots

A gateway that was killed is subtracted when its lease ends. A younger epoch (the engine's own start time) empties
the ledger. While a ledger is younger than WARM_SECONDS not everybody may have announced: each gateway then keeps to
its share, as when Redis is lost.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcatch.gateway import link
from kvcatch.gateway.curve import MARGIN
from kvcatch.gateway.ledger import Entry, Others
from kvcatch.gateway.link import CLOSED, LOCAL, OPEN, Link

if TYPE_CHECKING:
    from kvcatch.gateway.engine import Engine
    from kvcatch.policy.blocks import IntArray

#: shorter than those of limits: what a killed gateway held is free within ten seconds, next heartbeat included
LEASE_SECONDS = 7
#: longer than a heartbeat and a time-out: by then every living gateway has announced what it holds
WARM_SECONDS = 5
#: between two looks at what has to be announced
BEAT_SECONDS = 0.1
#: candidates in one call
BATCH = 32
#: numbers before the slots of a row: held blocks, planned blocks, requests
HEAD = 3

# KEYS: ledger, leases. ARGV: gateway, sequence, epoch, limit, lease micros, warm micros, row, candidate ...
# Answers: status, one letter per candidate (1 in, 0 out, w too young), born, epoch, what the others hold.
_SCRIPT = """
local h, z = KEYS[1], KEYS[2]
local me, seq, epoch, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local lease, warm = tonumber(ARGV[5]), tonumber(ARGV[6])
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]

local function numbers(text)
  local out = {}
  for n in string.gmatch(text, '%-?%d+') do out[#out + 1] = tonumber(n) end
  return out
end
local function text(row)
  local out = {}
  for i = 1, #row do out[i] = string.format('%.0f', row[i]) end
  return table.concat(out, ' ')
end
local function plus(a, b, sign)
  local out = {}
  for i = 1, math.max(#a, #b) do out[i] = (a[i] or 0) + sign * (b[i] or 0) end
  return out
end
local function stored(id)
  local found = redis.call('HGET', h, 'g:' .. id)
  if not found then return nil end
  local s, e, rest = string.match(found, '^(%S+) (%S+) (.*)$')
  return {seq = tonumber(s), epoch = tonumber(e), row = numbers(rest)}
end

local born = redis.call('HGET', h, 'born')
if not born then
  born = string.format('%.0f', now)
  redis.call('HSET', h, 'born', born)
end
local known = tonumber(redis.call('HGET', h, 'epoch') or '0')
if epoch > 0 and epoch < known then
  return {'old', '', born, string.format('%.0f', known), ''}
end
local sum = numbers(redis.call('HGET', h, 'sum') or '')
if epoch > known then
  if known > 0 then
    for _, name in ipairs(redis.call('HKEYS', h)) do
      if string.sub(name, 1, 2) == 'g:' then redis.call('HDEL', h, name) end
    end
    redis.call('DEL', z)
    sum = {}
  end
  known = epoch
  redis.call('HSET', h, 'epoch', string.format('%.0f', known))
end

local late = redis.call('ZRANGEBYSCORE', z, '-inf', now, 'LIMIT', 0, 64)
for _, id in ipairs(late) do
  local gone = stored(id)
  if gone then sum = plus(sum, gone.row, -1) end
  redis.call('HDEL', h, 'g:' .. id)
  redis.call('ZREM', z, id)
end

local before = stored(me)
if before and seq <= before.seq then
  redis.call('HSET', h, 'sum', text(sum))
  return {'late', '', born, string.format('%.0f', known), ''}
end
local others = sum
if before then others = plus(sum, before.row, -1) end
if #ARGV > 7 then redis.call('HINCRBY', h, 'asked', 1) end
local mine = numbers(ARGV[7])
local said = {}
for i = 8, #ARGV do
  if now - tonumber(born) < warm then
    said[#said + 1] = 'w'
  else
    local new = plus(mine, numbers(ARGV[i]), 1)
    local total = plus(others, new, 1)
    local fits = true
    -- One request alone may use the whole pool.
    if total[3] > 1 then
      for slot = 4, #total do
        if total[slot] > limit then fits = false end
      end
    end
    if fits then
      mine = new
      redis.call('HINCRBY', h, 'admitted', 1)
    end
    said[#said + 1] = fits and '1' or '0'
  end
end
if (mine[3] or 0) > 0 then
  redis.call('HSET', h, 'g:' .. me, string.format('%.0f %.0f ', seq, epoch) .. text(mine))
  redis.call('ZADD', z, string.format('%.0f', now + lease), me)
else
  redis.call('HDEL', h, 'g:' .. me)
  redis.call('ZREM', z, me)
end
redis.call('HSET', h, 'sum', text(plus(others, mine, 1)))
redis.call('EXPIRE', h, 86400)
redis.call('EXPIRE', z, 86400)
local status = 'ok'
if now - tonumber(born) < warm then status = 'young' end
return {status, table.concat(said), born, string.format('%.0f', known), text(others)}
"""


class _Desk:
    """What this gateway knows about one engine's shared ledger."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.granted: dict[str, Entry] = {}
        self.waiting: list[tuple[Entry, asyncio.Future[bool]]] = []
        self.told: dict[str, int | None] = {}  # progress of each request when it was last announced
        self.told_at = 0.0
        self.dirty = False
        self.alone = False  # lost or too young: keep to the share
        self.planned_alone = 0  # what we had planned when that began
        self.sequence = 0
        self.epoch = 0
        self.sending: asyncio.Task[None] | None = None


class Fleet:
    """Admission shared with other gateways. Raises KVCatchError when the package is missing or the URL is wrong.

    when_lost: ``local`` = at most a share (1 / replicas) of each engine; ``closed`` = nobody new; ``open`` = by what
    this gateway itself holds.
    """

    def __init__(
        self, url: str, *, prefix: str = "kvcatch", when_lost: str = LOCAL, replicas: int = 1,
        script: str = _SCRIPT,
    ) -> None:  # fmt: skip
        self._link = Link(url, script, "KV ledgers", when_lost)
        self._prefix = "{" + prefix + "}"
        self._when_lost = when_lost
        self._replicas = max(1, replicas)
        self._name = uuid.uuid4().hex
        self._desks: dict[str, _Desk] = {}
        self._beat: asyncio.Task[None] | None = None
        self._freed: Callable[[], None] = lambda: None
        self._anyone: Callable[[], bool] = lambda: False
        self.strict = False

    # ---- life ------------------------------------------------------------------------------------------

    def start(self, engines: Iterable[Engine], freed: Callable[[], None], anyone: Callable[[], bool]) -> None:
        """Announce from now on. freed: called with every fresh view; anyone: whether somebody waits in line."""
        for engine in engines:
            self._desk(engine)
        self._freed, self._anyone = freed, anyone
        self._beat = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        """Give back what is left, stop announcing, disconnect."""
        if self._beat is not None:
            await link.ended(self._beat)
        for desk in self._desks.values():
            desk.granted.clear()
            if not self._link.lost:
                self._kick(desk)
        await asyncio.gather(*(desk.sending for desk in self._desks.values() if desk.sending is not None))
        await self._link.close()

    @property
    def lost(self) -> bool:
        """Whether Redis did not answer the last time."""
        return self._link.lost

    # ---- requests --------------------------------------------------------------------------------------

    async def admit(self, entry: Entry, engine: Engine) -> bool:
        """Whether this request, which the engine's own ledger has let in, fits beside those of all gateways."""
        desk = self._desk(engine)
        if desk.alone:
            self.note(entry, engine)
            return True
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        desk.waiting.append((entry, future))
        self._kick(desk)
        return await future or self._fits_the_share(desk, entry)

    def note(self, entry: Entry, engine: Engine) -> None:
        """Count a request in without asking."""
        desk = self._desk(engine)
        desk.granted[entry.key] = entry
        self._kick(desk)

    def release(self, entry: Entry, engine: Engine) -> None:
        """A request is done or gone."""
        desk = self._desk(engine)
        if desk.granted.pop(entry.key, None) is not None:
            self._kick(desk)

    # ---- inside ----------------------------------------------------------------------------------------

    def _desk(self, engine: Engine) -> _Desk:
        desk = self._desks.get(engine.url)
        if desk is None:
            desk = self._desks[engine.url] = _Desk(engine)
        return desk

    def _kick(self, desk: _Desk) -> None:
        desk.dirty = True
        if desk.sending is None or desk.sending.done():
            desk.sending = asyncio.get_running_loop().create_task(self._send(desk))

    async def _send(self, desk: _Desk) -> None:
        """One call at a time per engine; what comes meanwhile goes with the next."""
        while desk.dirty or desk.waiting:
            desk.dirty = False
            batch = desk.waiting[:BATCH]
            del desk.waiting[:BATCH]
            try:
                await self._call(desk, [pair for pair in batch if not pair[1].done()])
            except self._link.errors:
                self._keep_to_share(desk)
                batch += desk.waiting
                desk.waiting = []
                for _, future in batch:
                    if not future.done():
                        future.set_result(False)  # the door decides again, by the share
                self._freed()
                return
            finally:
                for _, future in batch:
                    if not future.done():
                        future.set_result(False)
            if not desk.waiting:
                self._freed()

    async def _call(self, desk: _Desk, batch: Sequence[tuple[Entry, asyncio.Future[bool]]]) -> None:
        engine, ledger = desk.engine, desk.engine.ledger
        if ledger is None:
            for _, future in batch:
                future.set_result(True)
            return
        self._meet_epoch(desk)
        desk.sequence += 1
        micros = 1_000_000
        mine = list(desk.granted.values())
        told = {entry.key: entry.produced for entry in mine}
        arguments: list[Any] = [
            self._name, desk.sequence, desk.epoch, ledger.limit, int(LEASE_SECONDS * micros),
            int(WARM_SECONDS * micros), self._row(desk, mine),
        ]  # fmt: skip
        arguments += [self._row(desk, [entry]) for entry, _ in batch]
        name = f"{self._prefix}:kv1:{engine.label}"
        status, said, _, epoch, others = await self._link.run([name, name + ":z"], arguments)
        if status == "old":
            # Another gateway has seen the engine start anew before we did: ask again, as of then.
            desk.epoch = max(desk.epoch, int(epoch))
            self._forget_before(desk)
        if status in ("old", "late"):
            desk.waiting[:0] = batch
            desk.dirty = True
            return
        desk.told, desk.told_at = told, time.monotonic()
        row = np.array([int(word) for word in others.split()] or [0] * HEAD, dtype=np.int64)
        ledger.others = Others(row[HEAD:], int(row[0]), int(row[1]), int(row[2]), desk.told_at)
        if status == "young":
            self._keep_to_share(desk)
        else:
            desk.alone = False
            ledger.budget = None
        for (entry, future), letter in zip(batch, said, strict=True):
            if letter == "1" and not future.done():
                desk.granted[entry.key] = entry
                desk.told[entry.key] = entry.produced
                future.set_result(True)
            elif letter == "1":
                desk.dirty = True  # its client left meanwhile
            elif not future.done():
                future.set_result(False)

    def _row(self, desk: _Desk, entries: Sequence[Entry]) -> str:
        ledger = desk.engine.ledger
        assert ledger is not None
        curve: IntArray = ledger.curve(entries, self.strict)
        planned = sum(ledger.full(entry, self.strict) for entry in entries)
        held = ledger.held_blocks(entries)
        return " ".join(map(str, [held, planned, len(entries), *curve.tolist()]))

    def _meet_epoch(self, desk: _Desk) -> None:
        epoch = desk.engine.epoch
        if epoch > desk.epoch:
            before, desk.epoch = desk.epoch, epoch
            if before:
                self._forget_before(desk)

    def _forget_before(self, desk: _Desk) -> None:
        """The engine has started anew: what ran before holds nothing any more."""
        for entry in desk.granted.values():
            if desk.engine.ledger is not None:
                desk.engine.ledger.remove(entry.key)
        desk.granted.clear()

    def _fits_the_share(self, desk: _Desk, entry: Entry) -> bool:
        """The answer of our own, when nobody speaks for the others since a moment ago."""
        ledger = desk.engine.ledger
        if not desk.alone or ledger is None:
            return False
        planned = sum(ledger.full(one, self.strict) for one in [*desk.granted.values(), entry])
        if planned > (ledger.limit if ledger.budget is None else ledger.budget):
            return False
        self.note(entry, desk.engine)
        return True

    def _keep_to_share(self, desk: _Desk) -> None:
        """Nobody speaks for the others: stay within a share, and add at most a share of what is spare.

        Once the leases of before have ended, what others really hold is seen at the engine.
        """
        ledger = desk.engine.ledger
        if ledger is None:
            return
        if not desk.alone:
            desk.planned_alone = sum(ledger.full(entry, self.strict) for entry in desk.granted.values())
        desk.alone = True
        if self._when_lost == CLOSED:
            ledger.budget = 0
            return
        if self._when_lost == OPEN:
            ledger.budget, ledger.others = None, Others.nobody()
            return
        share = ledger.limit // self._replicas
        others = ledger.others or Others.nobody()
        if time.monotonic() - others.at < LEASE_SECONDS:
            spare = max(0, ledger.limit - desk.planned_alone - others.planned)
            share = min(share, desk.planned_alone + spare // self._replicas)
        else:
            ledger.others = Others.nobody()
        ledger.budget = share

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            now, queued = time.monotonic(), self._anyone()
            for desk in self._desks.values():
                if queued or desk.alone or now - desk.told_at > link.HEARTBEAT_SECONDS or self._ahead(desk):
                    self._kick(desk)

    @staticmethod
    def _ahead(desk: _Desk) -> bool:
        """Whether a request of ours may soon have passed what its announced curve covers."""
        return any(
            (entry.produced or 0) - (desk.told.get(key) or 0) > MARGIN // 2
            for key, entry in desk.granted.items()
        )


def fleet_of(document: dict[str, Any]) -> Fleet | None:
    """Ledgers in Redis when a checked document names one, else None. Raises KVCatchError."""
    table = document.get("redis", {})
    return Fleet(table["url"], **link.options_of(table)) if table.get("url") else None

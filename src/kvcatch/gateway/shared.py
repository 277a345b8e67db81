"""The same limits for any number of gateways, in Redis: one script, one round trip per operation.

A reservation is a lease: it is renewed while its gateway lives, and what a killed gateway had reserved and not
charged comes back when the lease ends. The clock is Redis's own. Every key carries one hash tag, so that a cluster
keeps them together.

    {p}:b:BUCKET   hash: level (micro-units), at (microseconds), held
    {p}:leases     sorted set: key -> end of its lease (microseconds)
    {p}:r:KEY      what it reserved: BUCKET, limit, window, amount, ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from kvcatch.gateway import link
from kvcatch.gateway.limits import Denied, Limits, MemoryLimits, Want
from kvcatch.gateway.link import CLOSED, LOCAL, OPEN, Link

# ARGV[1] = operation; reserve: prefix, key, lease micros, then bucket, limit, window, amount ...
# restore: the same, but whatever the levels are. settle: prefix, key, then bucket, used ...
# renew: prefix, lease micros, key ...; answers with how many it still knew.
_SCRIPT = """
local M = 1000000
local function clock()
  local t = redis.call('TIME')
  return t[1] * M + t[2]
end
local now = clock()
local op, p = ARGV[1], ARGV[2]

local function level(b, limit, window)
  local row = redis.call('HMGET', p .. ':b:' .. b, 'level', 'at')
  local full = limit * M
  if not row[1] then return full end
  local then_ = tonumber(row[2])
  if now < then_ then return math.min(full, tonumber(row[1])) end
  return math.min(full, tonumber(row[1]) + math.floor((now - then_) * limit / window))
end

local function store(b, value, window)
  local name = p .. ':b:' .. b
  redis.call('HSET', name, 'level', string.format('%.0f', value), 'at', string.format('%.0f', now))
  redis.call('EXPIRE', name, math.ceil(window) * 2 + 60)
end

local function give_back(key, used)
  local name = p .. ':r:' .. key
  local row = redis.call('LRANGE', name, 0, -1)
  if #row == 0 then return 0 end
  redis.call('DEL', name)
  redis.call('ZREM', p .. ':leases', key)
  for i = 1, #row, 4 do
    local b, limit, window, amount = row[i], tonumber(row[i+1]), tonumber(row[i+2]), tonumber(row[i+3])
    if window == 0 then
      local left = redis.call('HINCRBY', p .. ':b:' .. b, 'held', -amount)
      if left <= 0 then redis.call('DEL', p .. ':b:' .. b) end
    else
      local spent = used[b]
      if spent == nil then spent = amount end
      local spare = amount - math.min(amount, spent)
      store(b, math.min(limit * M, level(b, limit, window) + spare * M), window)
    end
  end
  return 1
end

local function take(key, lease)
  for i = 5, #ARGV, 4 do
    local b, limit, window, amount = ARGV[i], tonumber(ARGV[i+1]), tonumber(ARGV[i+2]), tonumber(ARGV[i+3])
    if window == 0 then redis.call('HINCRBY', p .. ':b:' .. b, 'held', amount)
    else store(b, level(b, limit, window) - amount * M, window) end
    redis.call('RPUSH', p .. ':r:' .. key, b, ARGV[i+1], ARGV[i+2], ARGV[i+3])
  end
  redis.call('ZADD', p .. ':leases', string.format('%.0f', now + lease), key)
end

local late = redis.call('ZRANGEBYSCORE', p .. ':leases', '-inf', now, 'LIMIT', 0, 64)
for _, key in ipairs(late) do
  local nothing = {}
  local row = redis.call('LRANGE', p .. ':r:' .. key, 0, -1)
  for i = 1, #row, 4 do nothing[row[i]] = 0 end
  give_back(key, nothing)
  redis.call('ZREM', p .. ':leases', key)
end

if op == 'reserve' then
  local key, lease = ARGV[3], tonumber(ARGV[4])
  if redis.call('EXISTS', p .. ':r:' .. key) == 1 then return {'ok'} end
  for i = 5, #ARGV, 4 do
    local b, limit, window, amount = ARGV[i], tonumber(ARGV[i+1]), tonumber(ARGV[i+2]), tonumber(ARGV[i+3])
    if amount > limit then return {'never', tostring((i - 5) / 4)} end
    if window == 0 then
      local held = tonumber(redis.call('HGET', p .. ':b:' .. b, 'held') or '0')
      if held + amount > limit then return {'held', tostring((i - 5) / 4)} end
    else
      local missing = amount * M - level(b, limit, window)
      if missing > 0 then
        return {'short', tostring((i - 5) / 4), string.format('%.0f', math.ceil(missing * window / limit))}
      end
    end
  end
  take(key, lease)
  return {'ok'}
elseif op == 'settle' then
  local used = {}
  for i = 4, #ARGV, 2 do used[ARGV[i]] = tonumber(ARGV[i+1]) end
  return {tostring(give_back(ARGV[3], used))}
elseif op == 'restore' then
  local key, lease = ARGV[3], tonumber(ARGV[4])
  if redis.call('EXISTS', p .. ':r:' .. key) == 0 then
    take(key, lease)
    return {'1'}
  end
  return {'0'}
elseif op == 'renew' then
  local kept = 0
  for i = 4, #ARGV do
    if redis.call('ZADD', p .. ':leases', 'XX', 'CH', string.format('%.0f', now + tonumber(ARGV[3])), ARGV[i]) == 1
    then kept = kept + 1 end
  end
  return {tostring(kept)}
end
return {'unknown'}
"""


class SharedLimits:
    """Limits in Redis. Raises KVCatchError when the package is missing or the URL is wrong.

    when_lost: ``local`` = each gateway on its own with limit / replicas; ``closed`` = refuse; ``open`` = let pass.
    """

    def __init__(
        self, url: str, *, prefix: str = "kvcatch", when_lost: str = LOCAL, replicas: int = 1
    ) -> None:
        self._link = Link(url, _SCRIPT, "limits", when_lost)
        self._errors = self._link.errors
        self._prefix = "{" + prefix + "}"
        self._when_lost = when_lost
        self._replicas = max(1, replicas)
        self._local = MemoryLimits()
        self._mine: dict[str, list[Any]] = {}  # key -> arguments of its reservation
        self._owed: dict[str, dict[str, int]] = {}  # settlements that Redis did not hear of
        self._restoring = asyncio.Lock()  # while a reservation is taken again
        self._beat: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether Redis did not answer the last time."""
        return self._link.lost

    async def reserve(self, key: str, wants: Iterable[Want]) -> Denied | None:
        """One round trip. When Redis does not answer, ``when_lost`` decides."""
        wants = list(wants)
        arguments: list[Any] = ["reserve", self._prefix, key, link.LEASE_SECONDS * 1_000_000]
        for want in wants:
            arguments += [want.bucket, want.limit, want.window, want.amount]
        self._start()
        try:
            answer = await self._run(arguments)
        except self._errors:
            return await self._without(key, wants)
        if answer[0] == "ok":
            self._mine[key] = arguments[2:]
            return None
        want = wants[int(float(answer[1]))]
        if answer[0] == "short":
            return Denied(want, int(answer[2]) / 1_000_000)
        return Denied(want, None, never=answer[0] == "never")

    async def settle(self, key: str, used: dict[str, int]) -> None:
        """One round trip; when Redis does not answer it is told later, before the lease ends."""
        await self._local.settle(key, used)
        async with self._restoring:
            # From here on nobody takes it again: a heartbeat that overtakes this settlement would leave it behind.
            mine = self._mine.pop(key, None)
        if mine is None:
            return
        try:
            await self._settle(key, used)
        except self._errors:
            self._mine[key] = mine
            self._owed[key] = used

    async def close(self) -> None:
        """Stop renewing and disconnect."""
        if self._beat is not None:
            await link.ended(self._beat)
        await self._link.close()

    async def _settle(self, key: str, used: dict[str, int]) -> None:
        arguments: list[Any] = ["settle", self._prefix, key]
        for bucket, amount in used.items():
            arguments += [bucket, amount]
        await self._run(arguments)

    async def _run(self, arguments: list[Any]) -> list[str]:
        return await self._link.run([self._prefix + ":leases"], arguments)

    async def _without(self, key: str, wants: list[Want]) -> Denied | None:
        if self._when_lost == OPEN:
            return None
        if self._when_lost == CLOSED:
            return Denied(wants[0], link.HEARTBEAT_SECONDS) if wants else None
        # A share of each limit: all replicas together stay within it.
        share = [
            Want(want.bucket, max(1, want.limit // self._replicas), want.window, want.amount)
            for want in wants
        ]
        return await self._local.reserve(key, share)

    def _start(self) -> None:
        if self._beat is None or self._beat.done():
            self._beat = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """Renew leases, and tell Redis what it missed."""
        while True:
            await asyncio.sleep(link.HEARTBEAT_SECONDS)
            with contextlib.suppress(*self._errors):
                for key, used in list(self._owed.items()):
                    await self._settle(key, used)
                    del self._owed[key]
                    self._mine.pop(key, None)
                await self._renew_all()

    async def _renew_all(self) -> None:
        keys = list(self._mine)
        for low in range(0, len(keys), 1000):
            part = keys[low : low + 1000]
            known = await self._run(["renew", self._prefix, link.LEASE_SECONDS * 1_000_000, *part])
            if int(known[0]) == len(part):
                continue
            # Redis has forgotten (it came back empty): what is in flight is taken again, whatever the levels.
            for key in part:
                async with self._restoring:
                    if key in self._mine:
                        await self._run(["restore", self._prefix, *self._mine[key]])


def limits_of(document: dict[str, Any]) -> Limits:
    """Limits in Redis when a checked document names one, else in memory. Raises KVCatchError."""
    table = document.get("redis", {})
    if not table.get("url"):
        return MemoryLimits()
    return SharedLimits(table["url"], **link.options_of(table))

"""Continuous batching over the exact block pool, in numba: the decisions of ``embedded``'s schedulers, fast.

Requests arrive on a clock that each step advances by a linear cost. With async scheduling two batches are in flight;
``stepwise`` says the same in plain Python. Generated blocks get ids of their own, so a preempted request finds them
again when it resumes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvcatch.simulator.jit import compiled

Array = npt.NDArray[Any]

# Columns per request and places in the totals.
SCHEDULED, FIRST_TOKEN, FINISHED = range(3)
CACHED, PREEMPTED, RECOMPUTED = range(3)
(STEPS, PREEMPTIONS, RECOMPUTES, EVICTED, PEAK_ACTIVE, PEAK_RUNNING, PEAK_WAITING, BLOCK_STEPS, SLACK_STEPS,
 FULL_STEPS) = range(10)  # fmt: skip
TOTALS = 10
# Columns of the optional log, one row a step.
LOG_RUNNING, LOG_WAITING, LOG_FREE, LOG_TOKENS, LOG_PREEMPTED, LOG_EVICTED = range(6)
LOG_COLUMNS = 6
# Parts of the cost of a step.
FIXED, PER_PREFILL, PER_DECODE, PER_CONTEXT, PER_ATTENTION = range(5)


@compiled
def _unlink(after: Array, before: Array, block: int) -> None:
    left, right = before[block], after[block]
    after[left] = right
    before[right] = left


@compiled
def _insert(after: Array, before: Array, left: int, block: int) -> None:
    right = after[left]
    after[left] = block
    before[block] = left
    after[block] = right
    before[right] = block


@compiled
def _forget(first: Array, copy_after: Array, key: int, block: int) -> None:
    """Take a block out of the list of blocks that hold this id."""
    if first[key] == block:
        first[key] = copy_after[block]
    else:
        walk = first[key]
        while copy_after[walk] != block:
            walk = copy_after[walk]
        copy_after[walk] = copy_after[block]
    copy_after[block] = -1


@compiled
def _remember(first: Array, copy_after: Array, key: int, block: int) -> None:
    """Add a block at the end of the list: the one stored first serves hits."""
    walk = first[key]
    if walk < 0:
        first[key] = block
        return
    while copy_after[walk] >= 0:
        walk = copy_after[walk]
    copy_after[walk] = block


@compiled
def _release(
    request: int, table: Array, tables: Array, held: Array, references: Array, hash_of: Array, after: Array,
    before: Array, free: int, caching: bool, append_all: bool,
) -> int:  # fmt: skip
    """Give up a request's blocks, its last block first; returns the number of free blocks."""
    start = tables[request]
    front = 0
    for place in range(held[request] - 1, -1, -1):
        block = table[start + place]
        references[block] -= 1
        if references[block] > 0:
            continue
        free += 1
        if (hash_of[block] >= 0 and caching) or append_all:
            tail = len(after) - 1
            _insert(after, before, before[tail], block)
        else:
            _insert(after, before, front, block)
            front = block
    held[request] = 0
    return free


@compiled
def _take(
    request: int, need: int, table: Array, tables: Array, held: Array, references: Array, hash_of: Array,
    first: Array, copy_after: Array, after: Array, before: Array, free: int, totals: Array,
) -> int:  # fmt: skip
    """Give a request blocks from the head of the free queue; returns the number of free blocks."""
    for _ in range(need):
        block = after[0]
        _unlink(after, before, block)
        if hash_of[block] >= 0:
            _forget(first, copy_after, hash_of[block], block)
            hash_of[block] = -1
            totals[EVICTED] += 1
        references[block] = 1
        table[tables[request] + held[request]] = block
        held[request] += 1
    return free - max(need, 0)


@compiled
def _store(
    request: int, end: int, whole: int, ids: Array, offset: int, generated: int, start: int, table: Array,
    stored: Array, hash_of: Array, first: Array, copy_after: Array,
) -> None:  # fmt: skip
    """Give the blocks that are full by now, up to ``end``, their ids."""
    for place in range(stored[request], end):
        block = table[start + place]
        key = ids[offset + place] if place < whole else generated + place - whole
        hash_of[block] = key
        _remember(first, copy_after, key, block)
    stored[request] = max(stored[request], end)


@compiled
def _last_in_line(running: Array, count: int, priority: Array) -> int:
    """Place of the running request with the largest (priority, arrival)."""
    best = 0
    for place in range(1, count):
        one, other = running[place], running[best]
        if priority[one] > priority[other] or (priority[one] == priority[other] and one > other):
            best = place
    return best


@compiled
def _first_in_line(waiting: Array, count: int, priority: Array) -> int:
    """Place of the waiting request with the smallest (priority, arrival)."""
    best = 0
    for place in range(1, count):
        one, other = waiting[place], waiting[best]
        if priority[one] < priority[other] or (priority[one] == priority[other] and one < other):
            best = place
    return best


@compiled
def run_engine(
    arrival: Array, prompt: Array, output: Array, ids: Array, offsets: Array, generated: Array, tables: Array,
    num_ids: int, num_blocks: int, block_size: int, max_seqs: int, max_tokens: int, watermark: int, caching: bool,
    append_all: bool, reserve: bool, priority: Array, most: Array, depth: int, cost: Array, log: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Serve all requests.

    Args:
        arrival: seconds, in order.
        prompt, output: tokens; output at least 1. Requests that can never fit must have been taken out.
        ids, offsets: blocks of the prompts.
        generated: first id of each request's generated blocks.
        tables: where each request's block table starts, one more at the end.
        num_ids: ids in all, generated ones included.
        num_blocks, block_size: of the pool, null block included.
        max_seqs, max_tokens: requests at once, tokens a step.
        watermark: blocks kept free when a request is admitted beside running ones.
        caching: prefix caching. append_all: free queue of vLLM 0.12. reserve: a request is admitted only when
            its whole prompt fits (vLLM 0.24 and later), else when its next chunk does.
        priority: of each request, the smallest first (vLLM's priority scheduling); empty: first come, first served.
        most: output tokens of each request, as far as the scheduler knows.
        depth: batches in flight at once; 2 with async scheduling, first come first served only.
        cost: seconds per step, prefill token, decoding request, token of context read by decoding, and
            pair of prefill token and context token.
        log: rows to fill, (0, LOG_COLUMNS) for none.

    Returns:
        Seconds per request (first scheduled, first token, finished), counts per request (tokens hit at first
        admission, preemptions, tokens computed again) and totals.
    """
    count = len(prompt)
    times = np.full((count, 3), np.nan)
    counts = np.zeros((count, 3), np.int64)
    totals = np.zeros(TOTALS, np.int64)
    null, tail = 0, num_blocks
    after = np.empty(num_blocks + 1, np.int32)
    before = np.empty(num_blocks + 1, np.int32)
    for block in range(num_blocks):
        after[block] = block + 1
        before[block + 1] = block
    after[tail] = null
    before[null] = tail
    usable = num_blocks - 1
    free = usable
    references = np.zeros(num_blocks, np.int32)
    hash_of = np.full(num_blocks, -1, np.int32)
    first = np.full(num_ids, -1, np.int32)
    copy_after = np.full(num_blocks, -1, np.int32)
    table = np.empty(tables[count], np.int32)
    held = np.zeros(count, np.int32)  # blocks of each request
    stored = np.zeros(count, np.int32)  # of these, blocks with an id
    computed = np.zeros(count, np.int64)
    made = np.zeros(count, np.int64)  # generated tokens
    high = np.zeros(count, np.int64)  # tokens computed at most so far
    wanted = np.zeros(count, np.int64)  # tokens of this step
    running = np.empty(max_seqs + 1, np.int32)
    num_running = 0
    # Preempted requests, the next to resume on top; by priority: all that wait, in any order.
    stack = np.empty(count, np.int32)
    ranked = len(priority) > 0
    num_stack = 0
    head = 0  # first request that was never admitted
    arrived = 0
    finished = 0
    now = 0.0
    victims = np.empty(max_seqs + 1, np.int32)
    scheduled = np.empty(max_seqs + 1, np.int32)
    # Batches in flight, a ring: who computes how many tokens, who gets a token for it, when it is done.
    batch = np.empty((depth, max_seqs + 1), np.int32)
    batch_tokens = np.empty((depth, max_seqs + 1), np.int64)
    batch_samples = np.empty((depth, max_seqs + 1), np.bool_)
    batch_size = np.zeros(depth, np.int64)
    batch_end = np.zeros(depth)
    oldest = 0
    num_flying = 0
    flying = np.zeros(count, np.int64)  # tokens in flight
    stale = np.zeros(count, np.int64)  # of these, tokens that a preemption has overtaken
    ahead = np.zeros(count, np.int64)  # sampled tokens that are counted but not known yet
    done = np.zeros(count, np.bool_)
    told = True  # no request has ended since the last step
    while finished < count:
        if num_running == 0 and num_stack == 0 and head == arrived and told and num_flying == 0:
            now = max(now, arrival[arrived])
        while arrived < count and arrival[arrived] <= now:
            if ranked:
                stack[num_stack] = arrived
                num_stack += 1
                head += 1
            arrived += 1
        if num_running > 0 or num_stack > 0 or head < arrived or not told:
            budget = max_tokens
            num_scheduled = 0
            num_victims = 0
            at = 0
            while at < num_running and budget > 0:
                request = running[at]
                early = ahead[request]
                if early > 0 and computed[request] + 2 - early >= prompt[request] + most[request]:
                    at += 1  # the token in flight is its last
                    continue
                tokens = min(prompt[request] + made[request] + early - computed[request], budget)
                need = (computed[request] + tokens + block_size - 1) // block_size - held[request]
                gone = False
                while need > free and num_running > 0:
                    place = num_running - 1
                    if ranked:
                        place = _last_in_line(running, num_running, priority)
                    victim = running[place]
                    for behind in range(place, num_running - 1):
                        running[behind] = running[behind + 1]
                    num_running -= 1
                    if place < at:
                        # It was scheduled in this step already: its tokens are given back.
                        at -= 1
                        budget += wanted[victim]
                        num_scheduled -= 1
                        for behind in range(place, num_scheduled):
                            scheduled[behind] = scheduled[behind + 1]
                    victims[num_victims] = victim
                    num_victims += 1
                    free = _release(
                        victim, table, tables, held, references, hash_of, after, before, free, caching,
                        append_all,
                    )  # fmt: skip
                    high[victim] = max(high[victim], computed[victim])
                    computed[victim] = 0
                    stale[victim] = flying[victim]
                    ahead[victim] = 0
                    stored[victim] = 0
                    counts[victim, PREEMPTED] += 1
                    totals[PREEMPTIONS] += 1
                    stack[num_stack] = victim
                    num_stack += 1
                    if victim == request:
                        gone = True
                        break
                if gone or need > free:
                    break
                free = _take(
                    request, need, table, tables, held, references, hash_of, first, copy_after, after, before, free,
                    totals,
                )  # fmt: skip
                if caching:
                    _store(
                        request, min(computed[request] + tokens, prompt[request] + made[request]) // block_size,
                        prompt[request] // block_size, ids, offsets[request], generated[request], tables[request],
                        table, stored, hash_of, first, copy_after,
                    )  # fmt: skip
                wanted[request] = tokens
                budget -= tokens
                scheduled[num_scheduled] = request
                num_scheduled += 1
                at += 1
            admit = num_victims == 0
            while admit and budget > 0 and num_running < max_seqs and (num_stack > 0 or head < arrived):
                if ranked:
                    place = _first_in_line(stack, num_stack, priority)
                    stack[place], stack[num_stack - 1] = stack[num_stack - 1], stack[place]
                request = stack[num_stack - 1] if num_stack > 0 else head
                length = prompt[request] + made[request]
                start = tables[request]
                hit = 0
                idle = 0
                if caching:
                    whole = prompt[request] // block_size
                    limit = (length - 1) // block_size
                    while hit < limit:
                        key = ids[offsets[request] + hit] if hit < whole else generated[request] + hit - whole
                        block = first[key]
                        if block < 0:
                            break
                        table[start + hit] = block
                        idle += references[block] == 0
                        hit += 1
                tokens = min(length - hit * block_size, budget)
                chunk = (hit * block_size + tokens + block_size - 1) // block_size - hit
                whole_blocks = (length + block_size - 1) // block_size - hit
                needed = (whole_blocks if reserve else chunk) + idle
                if num_running > 0:
                    needed += watermark
                if needed > free:
                    break
                for place in range(hit):
                    block = table[start + place]
                    if references[block] == 0:
                        _unlink(after, before, block)
                        free -= 1
                    references[block] += 1
                held[request] = hit
                stored[request] = hit
                computed[request] = hit * block_size
                free = _take(
                    request, chunk, table, tables, held, references, hash_of, first, copy_after, after, before, free,
                    totals,
                )  # fmt: skip
                if num_stack > 0:
                    num_stack -= 1
                else:
                    head += 1
                if counts[request, PREEMPTED] > 0:
                    totals[RECOMPUTES] += 1
                else:
                    times[request, SCHEDULED] = now
                    counts[request, CACHED] = hit * block_size
                running[num_running] = request
                num_running += 1
                wanted[request] = tokens
                budget -= tokens
                scheduled[num_scheduled] = request
                num_scheduled += 1
                if caching:
                    _store(
                        request, (computed[request] + tokens) // block_size, prompt[request] // block_size, ids,
                        offsets[request], generated[request], start, table, stored, hash_of, first, copy_after,
                    )  # fmt: skip
            slot = (oldest + num_flying) % depth
            start_at = batch_end[(slot + depth - 1) % depth] if num_flying > 0 else now
            seconds = cost[FIXED] if num_scheduled > 0 else 0.0
            for at in range(num_scheduled):
                request = scheduled[at]
                tokens = wanted[request]
                again = min(computed[request] + tokens, high[request]) - computed[request]
                if again > 0:
                    counts[request, RECOMPUTED] += again
                context = computed[request] + tokens
                if tokens == 1 and context >= prompt[request]:
                    seconds += cost[PER_DECODE] + cost[PER_CONTEXT] * context
                else:
                    seconds += tokens * (cost[PER_PREFILL] + cost[PER_ATTENTION] * (context - 0.5 * tokens))
                computed[request] = context
                samples = context >= prompt[request] + made[request] + ahead[request]
                if samples and depth > 1:
                    ahead[request] += 1
                flying[request] += tokens
                batch[slot, at] = request
                batch_tokens[slot, at] = tokens
                batch_samples[slot, at] = samples
            batch_size[slot] = num_scheduled
            batch_end[slot] = start_at + seconds
            num_flying += 1
            told = True
            if num_scheduled > 0:
                active = usable - free
                slack = 0
                for at in range(num_running):
                    request = running[at]
                    slack += held[request] * block_size - computed[request]
                totals[BLOCK_STEPS] += active
                totals[SLACK_STEPS] += slack
                totals[PEAK_ACTIVE] = max(totals[PEAK_ACTIVE], active)
                totals[PEAK_RUNNING] = max(totals[PEAK_RUNNING], num_running)
                totals[PEAK_WAITING] = max(totals[PEAK_WAITING], num_stack + arrived - head)
                totals[FULL_STEPS] += free == 0
                step = totals[STEPS]
                if step < len(log):
                    log[step, LOG_RUNNING] = num_running
                    log[step, LOG_WAITING] = num_stack + arrived - head
                    log[step, LOG_FREE] = free
                    log[step, LOG_TOKENS] = max_tokens - budget
                    log[step, LOG_PREEMPTED] = num_victims
                    log[step, LOG_EVICTED] = totals[EVICTED]
                totals[STEPS] += 1
            if num_flying < depth and (
                num_scheduled > 0 or num_running > 0 or num_stack > 0 or head < arrived
            ):
                continue
        now = max(now, batch_end[oldest])
        ended = 0
        for at in range(batch_size[oldest]):
            request = batch[oldest, at]
            if done[request]:
                continue  # it ended while this was computed
            flying[request] -= batch_tokens[oldest, at]
            overtaken = stale[request] > 0
            if overtaken:
                stale[request] -= batch_tokens[oldest, at]
            if not batch_samples[oldest, at]:
                continue
            if made[request] == 0:
                times[request, FIRST_TOKEN] = now
            made[request] += 1
            if depth > 1 and not overtaken:
                ahead[request] -= 1
                if caching:
                    _store(
                        request, (computed[request] - ahead[request]) // block_size, prompt[request] // block_size,
                        ids, offsets[request], generated[request], tables[request], table, stored, hash_of, first,
                        copy_after,
                    )  # fmt: skip
            if made[request] >= output[request]:
                times[request, FINISHED] = now
                done[request] = True
                finished += 1
                told = False
                if overtaken:
                    # It waits to be computed again.
                    kept = 0
                    for place in range(num_stack):
                        if stack[place] != request:
                            stack[kept] = stack[place]
                            kept += 1
                    num_stack = kept
                    continue
                free = _release(
                    request, table, tables, held, references, hash_of, after, before, free, caching,
                    append_all,
                )  # fmt: skip
                computed[request] = -1
                ended += 1
        oldest = (oldest + 1) % depth
        num_flying -= 1
        if ended > 0:
            kept = 0
            for at in range(num_running):
                if computed[running[at]] >= 0:
                    running[kept] = running[at]
                    kept += 1
            num_running = kept
    return times, counts, totals

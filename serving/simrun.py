"""Simulated time: when requests come, when steps begin and end, and what each step leaves behind. Compiled.

What a step does is decided in serving/simkernel.py. With two steps in flight a step is decided while the one before
runs, as vLLM's `async_scheduler.py` does.
"""

from __future__ import annotations

import numpy as np

from serving.compiled import entry, inner, outer
from serving.simblocks import cache_blocks, free_blocks, release_item, release_items, unlink
from serving.simkernel import FEATURES, enqueue, remove_running, schedule
from serving.simstate import (
    ARRIVED,
    BUSY_UNTIL,
    CANCELLED,
    DECIDED,
    DUE,
    ENDS,
    FREE,
    IN_FLIGHT,
    LOGGED,
    NOTED,
    NOW,
    PREEMPTED,
    RUNNING,
    SIZES,
    SLOT,
    STATE,
    STEPPED,
    STEPS,
    WAITING,
    Floats,
    Ints,
    Sim,
)

STEP_COLUMNS = FEATURES + 6  # features, then start_s, duration_s, running, waiting, free blocks, preempted
IDLE, LATER, FULL, STUCK = 0, 1, 2, 3  # why `advance` stopped


@outer
def _launch(s: Sim, slot: int) -> int:
    """Take what was scheduled as computed, and note in `flight[slot]` who gets a token; returns how many requests."""
    count = 0
    for index in range(s.counts[STEPPED]):
        request = s.order[index]
        new = s.req[request].stepped
        if new == 0:
            continue  # preempted after it was scheduled
        s.req[request].computed += new
        s.req[request].stepped, s.req[request].stepped_items, s.req[request].stepped_images = 0, 0, 0
        writes = s.req[request].computed >= s.req[request].known + s.req[request].promised
        if writes:
            s.req[request].promised += 1
        s.flight[slot, count, 0], s.flight[slot, count, 1] = request, 1 if writes else 0
        count += 1
    return count


@outer
def _send_next(s: Sim, request: int, now: float) -> None:
    """Let a request come that waited for an answer, which was written `now`."""
    at = max(s.req[request].arrival_s, now + s.req[request].wait_s)
    s.req[request].arrival_s = at
    place = s.counts[DUE]
    while place > s.counts[ARRIVED] and s.req[s.arrivals[place - 1]].arrival_s > at:
        s.arrivals[place] = s.arrivals[place - 1]
        place -= 1
    s.arrivals[place] = request
    s.counts[DUE] += 1


@outer
def _settle(s: Sim, slot: int, count: int, now: float, token_s: Floats) -> None:
    """End the step in `slot`: note its tokens at `now`, and let finished requests go."""
    finished = 0
    for index in range(count):
        request, writes = s.flight[slot, index, 0], s.flight[slot, index, 1]
        if s.req[request].known < 0:
            continue  # cancelled while the step ran
        # The asynchronous scheduler keeps an image until its last token is behind what is promised, too.
        done = s.req[request].computed - (s.req[request].promised if s.rule.depth > 1 else 0)
        for item in range(s.req[request].item_first, s.req[request].item_end):
            if s.item[item].offset + s.item[item].tokens <= done:
                release_item(s, item)
        if writes == 0:
            continue
        written = s.req[request].known - s.req[request].prompt
        token_s[s.req[request].token_first + written] = now
        s.req[request].known += 1
        if s.req[request].active == 1:
            s.req[request].promised -= 1
            cached = s.req[request].computed - s.req[request].promised
            cache_blocks(s, request, min(cached, s.req[request].known))
        if written + 1 < s.req[request].output:
            continue
        finished += 1
        if s.req[request].active == 0:  # preempted meanwhile, and now needs no more
            unlink(s.req, request)
            s.counts[WAITING] -= 1
        free_blocks(s, request)
        release_items(s, request)
        s.req[request].known = -1
        if s.req[request].next >= 0:
            _send_next(s, s.req[request].next, now)
    if finished > 0:
        kept = 0
        for place in range(s.counts[RUNNING]):
            request = s.running[place]
            if s.req[request].known >= 0:
                s.running[kept] = request
                kept += 1
        s.counts[RUNNING] = kept


@outer
def _arrive(s: Sim) -> None:
    """Queue the requests that have come by now."""
    total = len(s.arrivals)
    while s.counts[ARRIVED] < s.counts[DUE]:
        request = s.arrivals[s.counts[ARRIVED] % total]
        if s.req[request].arrival_s > s.clock[NOW]:
            return
        if s.req[request].known >= 0:  # else cancelled before it came
            enqueue(s, request, False)
        s.counts[ARRIVED] += 1


@outer
def _drop_cancelled(s: Sim) -> None:
    """Let the requests go whose clients have left: they get nothing more, and their blocks are free."""
    for index in range(s.counts[CANCELLED]):
        request = s.cancelled[index]
        if s.req[request].known < 0:
            continue  # it has ended meanwhile
        if s.req[request].active == 0:
            unlink(s.req, request)
            s.counts[WAITING] -= 1
        else:
            place = 0
            while s.running[place] != request:
                place += 1
            remove_running(s, place)
        free_blocks(s, request)
        release_items(s, request)
        s.req[request].known = -1
    s.counts[CANCELLED] = 0


@inner
def _seconds(cost: Floats, features: Floats) -> float:
    """How long a step takes: linear . f + max(compute . f, memory . f); `cost` has these three as rows."""
    linear, compute, memory = 0.0, 0.0, 0.0
    for index in range(FEATURES):
        linear += cost[0, index] * features[index]
        compute += cost[1, index] * features[index]
        memory += cost[2, index] * features[index]
    return linear + max(compute, memory)


@inner
def _scattered(spread: Floats, duration: float, step: int) -> float:
    """The duration times a ratio of its band; rows of `spread` are (from which duration, ratios ...), ascending."""
    band = 0
    while band + 1 < len(spread) and spread[band + 1, 0] <= duration:
        band += 1
    ratio: float = spread[band, 1 + step % (spread.shape[1] - 1)]
    return duration * ratio


@inner
def _note(s: Sim, features: Floats, start: float, duration: float, steps: Floats, log: Ints) -> None:
    """Add the step to the tables."""
    count = s.counts[NOTED]
    for index in range(FEATURES):
        steps[count, index] = features[index]
    steps[count, FEATURES], steps[count, FEATURES + 1] = start, duration
    steps[count, FEATURES + 2], steps[count, FEATURES + 3] = s.counts[RUNNING], s.counts[WAITING]
    steps[count, FEATURES + 4] = s.counts[FREE]
    steps[count, FEATURES + 5] = s.counts[PREEMPTED]
    for index in range(s.counts[STEPPED]):
        request, row = s.order[index], s.counts[LOGGED]
        if row < len(log) and s.req[request].stepped > 0:
            log[row, 0], log[row, 1] = s.counts[STEPS], request
            log[row, 2], log[row, 3] = s.req[request].stepped, s.req[request].stepped_images
            s.counts[LOGGED] += 1
    s.counts[NOTED] += 1
    s.counts[STEPS] += 1


@entry
def advance(s: Sim, cost: Floats, spread: Floats, until_s: float, steps: Floats, log: Ints, token_s: Floats) -> None:
    """Go on until nothing is left to do, until the next thing happens after `until_s`, or until `steps` is full.

    May be called again and again, with more requests in `s.arrivals` and a later `until_s`. `cost` are the coefficients
    of a step's duration (3, `FEATURES`), and `spread` how it scatters (`StepTime.spread`). Filled are `steps` (a row a
    step: `STEP_COLUMNS`; `s.counts[NOTED]` of them), `log` (rows of step, request, tokens, images encoded) and
    `token_s`, the time of every token.

    `s.counts[STATE]` says why it stopped: `IDLE`, `LATER`, `FULL`, or `STUCK` with requests that it can never run.
    """
    features = np.zeros(FEATURES)
    while True:
        if s.counts[DECIDED] == 0:
            _arrive(s)
            if s.counts[CANCELLED] > 0:
                _drop_cancelled(s)
            if s.counts[NOTED] == len(steps):
                s.counts[STATE] = FULL
                return
            for index in range(FEATURES):
                features[index] = 1.0 if index == 0 else 0.0
            schedule(s, features)
            slot = s.counts[SLOT]
            if features[1] + features[2] > 0.0:
                duration = _scattered(spread, _seconds(cost, features), s.counts[STEPS])
                start = max(s.clock[NOW], s.clock[BUSY_UNTIL])
                s.clock[BUSY_UNTIL] = start + duration
                _note(s, features, start, duration, steps, log)
                newest = (slot + s.counts[IN_FLIGHT]) % 2
                s.counts[SIZES + newest], s.clock[ENDS + newest] = _launch(s, newest), start + duration
                s.counts[IN_FLIGHT] += 1
                if s.counts[IN_FLIGHT] < s.rule.depth and s.clock[ENDS + slot] > s.clock[NOW]:
                    continue  # the next step is decided while this one runs
            elif s.counts[IN_FLIGHT] == 0:
                if s.counts[ARRIVED] == s.counts[DUE]:
                    stuck = s.counts[WAITING] > 0 or s.counts[RUNNING] > 0
                    s.counts[STATE] = STUCK if stuck else IDLE
                    return
                following = s.req[s.arrivals[s.counts[ARRIVED] % len(s.arrivals)]].arrival_s
                if following > until_s:
                    s.counts[STATE] = LATER
                    return
                s.clock[NOW] = max(s.clock[NOW], following)
                continue
        s.counts[DECIDED] = 1
        slot = s.counts[SLOT]
        if s.clock[ENDS + slot] > until_s:
            s.counts[STATE] = LATER
            return
        s.clock[NOW] = max(s.clock[NOW], s.clock[ENDS + slot])
        _settle(s, slot, s.counts[SIZES + slot], s.clock[NOW], token_s)
        s.counts[SLOT] = (slot + 1) % 2
        s.counts[IN_FLIGHT] -= 1
        s.counts[DECIDED] = 0

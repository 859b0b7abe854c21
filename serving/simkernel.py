"""The engine's scheduler, step by step, on arrays: compiled, and the same decisions as vLLM 0.32's.

Followed: `vllm/v1/core/sched/scheduler.py` (running requests first in admission order, then waiting ones; step budget;
long-prefill threshold; preemption and recompute), `async_scheduler.py` (a step is decided while the one before runs),
and for blocks and images what serving/simblocks.py follows. A test drives vLLM's own schedulers with the same requests
and compares every step. Not followed: speculative decoding, LoRA, connectors, layers with windows or state.

Other orders, for comparison: `PREFILL_FIRST` runs whole prompts before any decode (what Sarathi-Serve, Agrawal et al.,
OSDI 2024, calls prefill-prioritizing); `DECODE_FIRST` gives every decode its token before prompts share what is left
(its stall-free batching, algorithm 3); `FIXED_SPLITS` does so too, but a prompt advances in splits of one size and its
tail (the decomposition of Dynamic SplitFuse, DeepSpeed-FastGen, Holmes et al. 2024).
"""

from __future__ import annotations

from serving.compiled import inner, outer
from serving.simblocks import (
    admit_blocks,
    cache_blocks,
    cdiv,
    encode,
    free_blocks,
    hit_blocks,
    link,
    plan_items,
    release_items,
    take_blocks,
    unlink,
)
from serving.simstate import FREE, PREEMPTED, RUNNING, STEPPED, WAITING, Floats, Sim

VLLM, PREFILL_FIRST, DECODE_FIRST, FIXED_SPLITS = 0, 1, 2, 3
# one, decode tokens, prefill tokens, decode context, prefill pairs, prefill context, encoder tokens, encoder items
FEATURES = 8


@inner
def _count(features: Floats, s: Sim, request: int, new: int, sign: int) -> None:
    """Add (or take away) one request's part of the step."""
    start = s.req[request].computed
    if start >= s.req[request].prompt and s.req[request].known + s.req[request].promised - start == 1:
        features[1] += sign
        features[3] += sign * (start + 1)
    else:
        features[2] += sign * new
        features[4] += sign * (new * start + new * (new + 1) // 2)
        features[5] += sign * (start + new)


@inner
def _victim(s: Sim) -> int:
    """Place in the running list of the request to preempt: the last admitted, or the least urgent."""
    place = int(s.counts[RUNNING]) - 1
    if s.rule.by_priority:
        place = 0
        for index in range(1, s.counts[RUNNING]):
            best, other = s.running[place], s.running[index]
            if (s.req[other].priority, s.req[other].arrival_s) > (s.req[best].priority, s.req[best].arrival_s):
                place = index
    return place


@inner
def remove_running(s: Sim, place: int) -> None:
    """Take the request at `place` out of the running list."""
    last = s.counts[RUNNING] - 1
    for index in range(place, last):
        s.running[index] = s.running[index + 1]
    s.counts[RUNNING] = last


@inner
def _more_urgent(s: Sim, one: int, other: int) -> bool:
    if s.req[one].priority != s.req[other].priority:
        return bool(s.req[one].priority < s.req[other].priority)
    if s.req[one].arrival_s != s.req[other].arrival_s:
        return bool(s.req[one].arrival_s < s.req[other].arrival_s)
    return one < other


@outer
def enqueue(s: Sim, request: int, back: bool) -> None:
    """Queue a request: by priority and arrival, or first come first served with preempted ones back at the front."""
    left = s.req[len(s.req) - 1].before
    if s.rule.by_priority:
        while left < len(s.req) - 2 and _more_urgent(s, request, left):
            left = s.req[left].before
    elif back:
        left = len(s.req) - 2
    link(s.req, left, request)
    s.counts[WAITING] += 1


@inner
def _step(s: Sim, request: int, new: int, features: Floats) -> None:
    """Note that the request gets `new` tokens in this step."""
    s.req[request].stepped = new
    s.order[s.counts[STEPPED]] = request
    s.counts[STEPPED] += 1
    _count(features, s, request, new, 1)


@outer
def _preempt(s: Sim, at: int, features: Floats) -> tuple[int, int, int]:
    """Take everything from the running request at place `at`; returns it, and the budgets that it gives back."""
    victim = s.running[at]
    remove_running(s, at)
    tokens, items = s.req[victim].stepped, s.req[victim].stepped_items
    if tokens > 0:
        _count(features, s, victim, tokens, -1)
        features[6] -= items
        features[7] -= s.req[victim].stepped_images
        s.req[victim].stepped, s.req[victim].stepped_items, s.req[victim].stepped_images = 0, 0, 0
    free_blocks(s, victim)
    release_items(s, victim)
    s.req[victim].computed, s.req[victim].promised, s.req[victim].active = 0, 0, 0
    s.req[victim].preemptions += 1
    s.counts[PREEMPTED] += 1
    enqueue(s, victim, True)
    return victim, tokens, items


@inner
def _run_request(
    s: Sim, place: int, budget: int, encoder: int, threshold: int, features: Floats
) -> tuple[int, int, int, bool]:
    """Give the running request at `place` its tokens of this step, preempting others when blocks are short.

    Returns the next place, what is left of both budgets, and whether the list may be gone on with.
    """
    request = s.running[place]
    new = s.req[request].known + s.req[request].promised - s.req[request].computed
    if 0 < threshold < new:
        new = threshold
    new = min(new, budget, s.rule.max_model_len - s.req[request].computed - 1)
    new, items, left = plan_items(s, request, s.req[request].computed, new, encoder)
    if new == 0:
        return place + 1, budget, encoder, True
    need = max(0, cdiv(s.req[request].computed + new, s.rule.block_tokens) - s.req[request].held)
    while need > s.counts[FREE]:
        at = _victim(s)
        if at < place:
            place -= 1
        victim, tokens, embeds = _preempt(s, at, features)
        budget += tokens
        encoder += embeds
        if victim == request:
            return place, budget, encoder, False
    take_blocks(s, request, need)
    cache_blocks(s, request, min(s.req[request].computed + new, s.req[request].known))
    _step(s, request, new, features)
    if items > 0:
        encode(s, request, items, features)
        encoder = left
    return place + 1, budget - new, encoder, True


@inner
def _will_be_done(s: Sim, request: int) -> bool:
    """Whether the step in flight writes the request's last token, so that it needs no other."""
    promised = s.req[request].promised
    last = s.req[request].prompt + s.req[request].output
    return bool(promised > 0 and s.req[request].computed + 2 - promised >= last)


@inner
def _decodes(s: Sim, request: int) -> bool:
    left = s.req[request].known + s.req[request].promised - s.req[request].computed
    return bool(s.req[request].computed >= s.req[request].prompt and left == 1)


@outer
def _run_pass(s: Sim, which: int, budget: int, encoder: int, threshold: int, features: Floats) -> tuple[int, int, bool]:
    """Go through the running requests: all of them (`which` 0), those that decode (1) or those that do not (2)."""
    place, goes_on = 0, True
    while goes_on and place < s.counts[RUNNING] and budget > 0:
        request = s.running[place]
        if _will_be_done(s, request):
            place += 1
            continue
        if s.req[request].stepped > 0 or (which > 0 and _decodes(s, request) != (which == 1)):
            place += 1
            continue
        if s.rule.policy == FIXED_SPLITS and which == 2:
            if min(s.rule.split, s.req[request].known - s.req[request].computed) > budget:
                place += 1
                continue
            threshold = s.rule.split
        place, budget, encoder, goes_on = _run_request(s, place, budget, encoder, threshold, features)
    return budget, encoder, goes_on


@outer
def _admit(s: Sim, budget: int, encoder: int, threshold: int, features: Floats) -> None:
    """Admit waiting requests while budget, slots and blocks last; the first that does not fit ends it."""
    whole = s.rule.policy == PREFILL_FIRST
    while s.counts[WAITING] > 0 and budget > 0 and s.counts[RUNNING] < s.rule.max_num_seqs:
        request = s.req[len(s.req) - 2].after
        hits = hit_blocks(s, request)
        start = hits * s.rule.block_tokens
        new = s.req[request].known - start
        if 0 < threshold < new:
            new = threshold
        if s.rule.policy == FIXED_SPLITS:
            new = min(new, s.rule.split)
            if new > budget:
                break
        if not s.rule.chunked and new > budget and not (whole and s.counts[STEPPED] == 0):
            break
        if not whole:
            new = min(new, budget)
        new, items, left = plan_items(s, request, start, new, encoder)
        if new == 0:
            break
        if not admit_blocks(s, request, hits, new):
            release_items(s, request)
            break
        unlink(s.req, request)
        s.counts[WAITING] -= 1
        s.running[s.counts[RUNNING]] = request
        s.counts[RUNNING] += 1
        s.req[request].computed, s.req[request].active = start, 1
        if s.req[request].preemptions == 0:
            s.req[request].hits = start
        _step(s, request, new, features)
        budget -= new
        if items > 0:
            encode(s, request, items, features)
            encoder = left


@outer
def schedule(s: Sim, features: Floats) -> None:
    """Decide one step."""
    s.counts[PREEMPTED], s.counts[STEPPED] = 0, 0
    budget, encoder = s.rule.budget, s.rule.encoder_budget
    present = s.counts[RUNNING] + s.counts[WAITING]
    threshold = s.rule.threshold if present > 1 else 0
    if threshold > 0 and s.rule.adaptive:
        threshold = max(threshold, s.rule.budget // present)
    if s.rule.policy == PREFILL_FIRST:
        _admit(s, budget, encoder, 0, features)
        if s.counts[STEPPED] == 0:
            _run_pass(s, 0, budget, encoder, 0, features)
        return
    goes_on = True
    if s.rule.policy == VLLM:
        budget, encoder, goes_on = _run_pass(s, 0, budget, encoder, threshold, features)
    else:
        budget, encoder, goes_on = _run_pass(s, 1, budget, encoder, 0, features)
        if goes_on:
            budget, encoder, goes_on = _run_pass(s, 2, budget, encoder, threshold, features)
    if s.counts[PREEMPTED] == 0:
        _admit(s, budget, encoder, threshold, features)

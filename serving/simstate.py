"""What one simulation holds: settings, and records of requests, blocks, contents and images.

A content key names what a block holds; requests that share a prefix have equal keys there. Free blocks, and cached
images that nobody refers to, are linked lists in the order of reuse, as are waiting requests in the order of service;
two sentinels, head and tail, stand behind the last node.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Records = Any  # a numpy array of one of the record types below

# Places in `Sim.counts`: free blocks, encoder cache room (free, and reclaimable), running requests, preemptions of this
# step, waiting requests, requests of this step.
FREE, FREE_SLOTS, FREEABLE_SLOTS, RUNNING, PREEMPTED, WAITING, STEPPED = range(7)
# Requests queued so far, and all in `Sim.arrivals`; requests to cancel; steps in flight, the slot of the oldest, and
# how many requests each has; whether the next thing is that the oldest ends; steps so far; rows in the table of steps,
# and in the log; why the simulation stopped.
ARRIVED, DUE, CANCELLED, IN_FLIGHT, SLOT, SIZES, _, DECIDED, STEPS, NOTED, LOGGED, STATE = range(7, 19)
_COUNTS = 19
# Places in `Sim.clock`, seconds: the present, until when the engine is busy, when the step in each slot ends.
NOW, BUSY_UNTIL, ENDS = 0, 1, 2

_REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("prompt", "i8"),
        ("output", "i8"),
        ("priority", "i8"),
        ("table_first", "i8"),  # its block numbers in Sim.table, and what they are to hold in Sim.content
        ("token_first", "i8"),  # its tokens among those of all requests
        ("item_first", "i8"),  # its images in Sim.item
        ("item_end", "i8"),
        ("computed", "i8"),  # tokens whose keys and values are in the cache
        ("known", "i8"),  # prompt and tokens written so far; -1 when finished
        ("promised", "i8"),  # tokens that steps in flight will have written
        ("active", "i8"),  # 1 while running
        ("held", "i8"),  # blocks
        ("cached", "i8"),  # blocks entered into the prefix cache
        ("stepped", "i8"),  # tokens of this step
        ("stepped_items", "i8"),  # image tokens encoded in this step
        ("stepped_images", "i8"),  # images encoded in this step
        ("hits", "i8"),  # prompt tokens found in the prefix cache at the first admission
        ("preemptions", "i8"),
        ("after", "i8"),  # the queue of waiting requests
        ("before", "i8"),
        ("next", "i8"),  # the request that is sent once this one is answered, or -1
        ("wait_s", "f8"),  # from the answer before until the engine gets it
    ]
)
_BLOCK = np.dtype([(n, "i8") for n in ("after", "before", "refs", "key", "same_after", "same_before")])
_KEY = np.dtype([("head", "i8"), ("tail", "i8")])  # blocks of one content, oldest first
_IMAGE = np.dtype([(n, "i8") for n in ("size", "cached", "refs", "after", "before")])
_ITEM = np.dtype([(n, "i8") for n in ("offset", "tokens", "image", "held")])


class Rules(NamedTuple):
    """The engine's settings, as the simulator reads them."""

    policy: int
    budget: int
    max_num_seqs: int
    threshold: int
    adaptive: bool
    chunked: bool
    by_priority: bool
    block_tokens: int
    blocks: int
    prefix_caching: bool
    encoder_budget: int
    encoder_cache: int
    whole_items: bool
    watermark_blocks: int
    reserve_prompt: bool
    max_model_len: int
    split: int
    depth: int  # steps in flight: 1, or 2 with asynchronous scheduling


class Sim(NamedTuple):
    """One simulation. Everything but `rule` changes as it runs."""

    rule: Rules
    req: Records
    blk: Records
    key: Records
    img: Records
    item: Records
    table: Ints
    content: Ints
    running: Ints
    order: Ints
    flight: Ints  # requests of the steps in flight, and whether each gets a token: (step, place, 2)
    picked: Ints
    arrivals: Ints  # requests in the order in which they come, used as a ring
    cancelled: Ints
    counts: Ints
    clock: Floats


@dataclass(frozen=True, slots=True)
class SimImage:
    """An image in a prompt: `tokens` of it from position `offset`; equal `content` is the same picture."""

    offset: int
    tokens: int
    content: Hashable


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request as the engine sees it.

    `arrival_s` is when the engine gets it. The first `prefix_tokens` are the same for all requests of one `prefix`; the
    rest is the same only within one `stream` (one request, or the turns of one conversation). Lengths in tokens, images
    inside the prompt. One that `follows` another (its place among the requests) comes `wait_s` after that one's answer,
    or at `arrival_s` if that is later.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    prefix: Hashable = None
    prefix_tokens: int = 0
    stream: Hashable = None
    images: tuple[SimImage, ...] = ()
    follows: int | None = None
    wait_s: float = 0.0


def new_sim(rule: Rules, requests: Sequence[SimRequest]) -> Sim:
    """Set a simulation up; `requests` must be in arrival order. A `stream` of None is the request's own.

    Raises:
        ValueError: A request could never run, or is not in order.
    """
    check_requests(rule, requests)
    records = _linked(len(requests), _REQUEST)
    req = records[:-2]
    length = np.array([request.prompt_tokens + request.output_tokens for request in requests], dtype=np.int64)
    blocks = -(-length // rule.block_tokens) + 1
    req["arrival_s"] = [request.arrival_s for request in requests]
    req["prompt"] = req["known"] = [request.prompt_tokens for request in requests]
    req["output"] = [request.output_tokens for request in requests]
    req["priority"] = [request.priority for request in requests]
    req["table_first"] = np.cumsum(blocks) - blocks
    req["token_first"] = np.cumsum(req["output"]) - req["output"]
    req["next"] = -1
    for number, request in enumerate(requests):
        if request.follows is not None:
            req["next"][request.follows], req["wait_s"][number] = number, request.wait_s
    first = [number for number, request in enumerate(requests) if request.follows is None]
    arrivals = np.zeros(len(requests), dtype=np.int64)
    arrivals[: len(first)] = first
    content, keys = _content_keys(rule, requests, blocks)
    item, sizes = _items(req, requests)
    images = _linked(len(sizes), _IMAGE)
    images["size"][:-2] = sizes
    return Sim(
        rule=rule,
        req=records,
        blk=_free_blocks(rule.blocks),
        key=np.full((keys, 2), -1, dtype=np.int64).view(_KEY)[:, 0],
        img=images,
        item=item,
        table=np.zeros(len(content), dtype=np.int64),
        content=content,
        running=np.zeros(rule.max_num_seqs + 1, dtype=np.int64),
        order=np.zeros(2 * rule.max_num_seqs + 1, dtype=np.int64),
        flight=np.zeros((2, 2 * rule.max_num_seqs + 1, 2), dtype=np.int64),
        picked=np.zeros(max([1, *(len(request.images) for request in requests)]), dtype=np.int64),
        arrivals=arrivals,
        cancelled=np.zeros(1, dtype=np.int64),
        counts=_start_counts(rule, due=len(first)),
        clock=np.zeros(4),
    )


def empty_sim(rule: Rules, *, slots: int, most_images: int) -> Sim:
    """No requests yet: serving/simlive.py puts them into the `slots`, each of up to `most_images` images."""
    records = _linked(slots, _REQUEST)
    req = records[:-2]
    blocks = -(-rule.max_model_len // rule.block_tokens) + 1
    number = np.arange(slots, dtype=np.int64)
    req["table_first"] = number * blocks
    req["token_first"] = number * rule.max_model_len
    req["item_first"] = req["item_end"] = number * most_images
    req["known"] = req["next"] = -1
    # Every cached block and every block of a request may hold something else, and so may every image.
    contents = rule.blocks + slots * blocks
    return Sim(
        rule=rule,
        req=records,
        blk=_free_blocks(rule.blocks),
        key=np.full((contents, 2), -1, dtype=np.int64).view(_KEY)[:, 0],
        img=_linked(rule.encoder_cache + slots * most_images, _IMAGE),
        item=np.zeros(slots * most_images, dtype=_ITEM),
        table=np.zeros(slots * blocks, dtype=np.int64),
        content=np.zeros(slots * blocks, dtype=np.int64),
        running=np.zeros(rule.max_num_seqs + 1, dtype=np.int64),
        order=np.zeros(2 * rule.max_num_seqs + 1, dtype=np.int64),
        flight=np.zeros((2, 2 * rule.max_num_seqs + 1, 2), dtype=np.int64),
        picked=np.zeros(most_images, dtype=np.int64),
        arrivals=np.zeros(slots, dtype=np.int64),
        cancelled=np.zeros(slots, dtype=np.int64),
        counts=_start_counts(rule, due=0),
        clock=np.zeros(4),
    )


def _start_counts(rule: Rules, *, due: int) -> Ints:
    counts = np.zeros(_COUNTS, dtype=np.int64)
    counts[[FREE, FREE_SLOTS, FREEABLE_SLOTS]] = rule.blocks - 1, rule.encoder_cache, rule.encoder_cache
    counts[DUE] = due
    return counts


def check_requests(rule: Rules, requests: Sequence[SimRequest]) -> None:
    """Raises ValueError when a request could never run, or they are not in order of arrival."""
    last = 0.0
    for number, request in enumerate(requests):
        total = request.prompt_tokens + request.output_tokens
        if request.arrival_s < last:
            raise ValueError(f"request {number} arrives before the one ahead of it")
        last = request.arrival_s
        if request.follows is not None and not 0 <= request.follows < len(requests):
            raise ValueError(f"request {number} follows {request.follows}, which is not among the {len(requests)}")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {number} has a prompt or an output below one token")
        if total > rule.max_model_len:
            raise ValueError(f"request {number} has {total} tokens, allowed: max_model_len ({rule.max_model_len})")
        if -(-total // rule.block_tokens) > rule.blocks - 1:
            raise ValueError(
                f"request {number} has {total} tokens, more than the cache's {rule.blocks - 1} blocks hold"
            )
        if request.prefix_tokens > request.prompt_tokens:
            raise ValueError(f"request {number} shares {request.prefix_tokens} tokens, more than its prompt")
        end = 0
        for image in request.images:
            if image.offset < end or image.offset + image.tokens > request.prompt_tokens or image.tokens < 1:
                raise ValueError(f"request {number} has images out of order, overlapping or outside its prompt")
            if image.tokens > min(rule.encoder_budget, rule.encoder_cache):
                raise ValueError(
                    f"request {number} has an image of {image.tokens} tokens, more than the encoder's budget or cache"
                )
            end = image.offset + image.tokens


def _content_keys(rule: Rules, requests: Sequence[SimRequest], blocks: Ints) -> tuple[Ints, int]:
    """What each block of each request is to hold, and how many contents there are.

    Every stream and every shared prefix has a range of keys: one for each of its blocks.
    """
    longest: dict[Hashable, int] = {}
    streams: list[Hashable] = []
    for number, request in enumerate(requests):
        own = ("own", number) if request.stream is None else ("stream", request.stream)
        streams.append(own)
        longest[own] = max(longest.get(own, 0), int(blocks[number]))
        if request.prefix_tokens:
            shared = ("prefix", request.prefix)
            longest[shared] = max(longest.get(shared, 0), request.prefix_tokens // rule.block_tokens)
    first: dict[Hashable, int] = {}
    total = 0
    for content, count in longest.items():
        first[content] = total
        total += count
    place = np.arange(int(blocks.sum()), dtype=np.int64)
    place -= np.repeat(np.cumsum(blocks) - blocks, blocks)  # of each block within its request
    keys = place + np.repeat([first[own] for own in streams], blocks)
    shared_blocks = np.array([request.prefix_tokens // rule.block_tokens for request in requests], dtype=np.int64)
    shared_first = [first[("prefix", request.prefix)] if request.prefix_tokens else 0 for request in requests]
    in_prefix = place < np.repeat(shared_blocks, blocks)
    keys[in_prefix] = (place + np.repeat(shared_first, blocks))[in_prefix]
    return keys, total


def _items(req: Records, requests: Sequence[SimRequest]) -> tuple[Records, list[int]]:
    """Images of all requests, and the size of each distinct picture."""
    numbers: dict[Hashable, int] = {}
    sizes: list[int] = []
    rows: list[tuple[int, int, int, int]] = []
    for number, request in enumerate(requests):
        req["item_first"][number] = len(rows)
        for image in request.images:
            if image.content not in numbers:
                numbers[image.content] = len(sizes)
                sizes.append(image.tokens)
            place = numbers[image.content]
            if sizes[place] != image.tokens:
                raise ValueError(f"picture {image.content!r} has {sizes[place]} tokens once and {image.tokens} again")
            rows.append((image.offset, image.tokens, place, 0))
        req["item_end"][number] = len(rows)
    return np.array(rows, dtype=_ITEM), sizes


def _linked(count: int, kind: np.dtype[np.void]) -> Records:
    """`count` records in no list, and the two sentinels of an empty one."""
    nodes = np.zeros(count + 2, dtype=kind)
    nodes["after"][count], nodes["before"][count + 1] = count + 1, count
    return nodes


def _free_blocks(blocks: int) -> Records:
    """All blocks free, in order of number, but block 0, which the engine keeps as the null block."""
    nodes = _linked(blocks, _BLOCK)
    nodes["key"] = nodes["same_after"] = nodes["same_before"] = -1
    chain = [blocks, *range(1, blocks), blocks + 1]
    nodes["after"][chain[:-1]] = chain[1:]
    nodes["before"][chain[1:]] = chain[:-1]
    return nodes

"""Blocks and images of the simulated engine: its KV-cache manager and its encoder cache.

Followed: vLLM 0.32's `kv_cache_manager.py`, `block_pool.py` and `encoder_cache_manager.py`, in their order of reuse.
"""

from __future__ import annotations

from serving.compiled import inner, outer
from serving.simstate import FREE, FREE_SLOTS, FREEABLE_SLOTS, RUNNING, Floats, Records, Sim


@inner
def cdiv(value: int, by: int) -> int:
    """`value` / `by`, rounded up."""
    return -(-value // by)


@inner
def unlink(nodes: Records, node: int) -> None:
    """Take `node` out of its list."""
    nodes[nodes[node].before].after = nodes[node].after
    nodes[nodes[node].after].before = nodes[node].before


@inner
def link(nodes: Records, left: int, node: int) -> None:
    """Put `node` behind `left`."""
    right = nodes[left].after
    nodes[left].after, nodes[right].before = node, node
    nodes[node].before, nodes[node].after = left, right


@inner
def _key(s: Sim, request: int, block: int) -> int:
    return int(s.content[s.req[request].table_first + block])


@inner
def _forget_block(s: Sim, block: int) -> None:
    """Take a block out of the prefix cache."""
    key = s.blk[block].key
    if key < 0:
        return
    left, right = s.blk[block].same_before, s.blk[block].same_after
    if left >= 0:
        s.blk[left].same_after = right
    else:
        s.key[key].head = right
    if right >= 0:
        s.blk[right].same_before = left
    else:
        s.key[key].tail = left
    s.blk[block].key = -1


@inner
def take_blocks(s: Sim, request: int, count: int) -> None:
    """Give the request the next `count` free blocks; what they held is forgotten."""
    head = s.rule.blocks
    for _ in range(count):
        block = s.blk[head].after
        unlink(s.blk, block)
        _forget_block(s, block)
        s.blk[block].refs = 1
        s.table[s.req[request].table_first + s.req[request].held] = block
        s.req[request].held += 1
    s.counts[FREE] -= count


@inner
def cache_blocks(s: Sim, request: int, tokens: int) -> None:
    """Enter the blocks that are full with `tokens` tokens into the prefix cache."""
    if not s.rule.prefix_caching:
        return
    first = s.req[request].table_first
    for index in range(s.req[request].cached, tokens // s.rule.block_tokens):
        block, key = s.table[first + index], _key(s, request, index)
        tail = s.key[key].tail
        s.blk[block].key, s.blk[block].same_before, s.blk[block].same_after = key, tail, -1
        if tail >= 0:
            s.blk[tail].same_after = block
        else:
            s.key[key].head = block
        s.key[key].tail = block
        s.req[request].cached = index + 1


@outer
def free_blocks(s: Sim, request: int) -> None:
    """Give blocks back, last block first: those without content to the front of the free list, others to its end."""
    first, head, tail = s.req[request].table_first, s.rule.blocks, s.rule.blocks + 1
    front = head
    for index in range(s.req[request].held - 1, -1, -1):
        block = s.table[first + index]
        s.blk[block].refs -= 1
        if s.blk[block].refs > 0:
            continue
        s.counts[FREE] += 1
        if s.blk[block].key < 0:
            link(s.blk, front, block)
            front = block
        else:
            link(s.blk, s.blk[tail].before, block)
    s.req[request].held, s.req[request].cached = 0, 0


@inner
def release_item(s: Sim, item: int) -> None:
    """The item's request needs its encoded image no longer; it stays cached until room is needed."""
    if s.item[item].held == 0:
        return
    s.item[item].held = 0
    image, tail = s.item[item].image, len(s.img) - 1
    s.img[image].refs -= 1
    if s.img[image].refs == 0:
        link(s.img, s.img[tail].before, image)
        s.counts[FREEABLE_SLOTS] += s.img[image].size


@outer
def release_items(s: Sim, request: int) -> None:
    """The request needs none of its encoded images any longer."""
    for item in range(s.req[request].item_first, s.req[request].item_end):
        release_item(s, item)


@outer
def _room_for_image(s: Sim, size: int, budget: int, planned: int) -> bool:
    """Whether an image fits the encoder's budget and cache; images that nobody refers to make room, oldest first."""
    if size > budget:
        return False
    needed, head = size + planned, len(s.img) - 2
    if needed > s.counts[FREE_SLOTS] and needed > s.counts[FREEABLE_SLOTS]:
        return False
    while needed > s.counts[FREE_SLOTS]:
        image = s.img[head].after
        unlink(s.img, image)
        s.img[image].cached = 0
        s.counts[FREE_SLOTS] += s.img[image].size
    return True


@outer
def plan_items(s: Sim, request: int, computed: int, new: int, budget: int) -> tuple[int, int, int]:
    """Images that the tokens [computed, computed + new) need: encoded whole in this step, or the tokens stop before.

    Returns tokens, images to encode (left in `s.picked`) and what remains of the encoder's budget.
    """
    count, planned = 0, 0
    end = computed + new
    for item in range(s.req[request].item_first, s.req[request].item_end):
        offset, tokens = s.item[item].offset, s.item[item].tokens
        if offset >= end:
            break
        if offset + tokens <= computed:
            continue
        if s.rule.whole_items and computed < offset and computed + new < offset + tokens:
            new = max(0, offset - computed)
            break
        image = s.item[item].image
        if s.img[image].cached == 1:
            if s.item[item].held == 0:
                if s.img[image].refs == 0:
                    unlink(s.img, image)
                    s.counts[FREEABLE_SLOTS] -= s.img[image].size
                s.img[image].refs += 1
                s.item[item].held = 1
            continue
        size = s.img[image].size
        if not _room_for_image(s, size, budget, planned):
            new = offset - computed if computed < offset else 0
            break
        planned += size
        budget -= size
        s.picked[count] = item
        count += 1
    return new, count, budget


@outer
def encode(s: Sim, request: int, count: int, features: Floats) -> None:
    """Reserve cache room for the images in `s.picked`."""
    for index in range(count):
        item = s.picked[index]
        image = s.item[item].image
        size = s.img[image].size
        s.img[image].cached, s.img[image].refs, s.item[item].held = 1, 1, 1
        s.counts[FREE_SLOTS] -= size
        s.counts[FREEABLE_SLOTS] -= size
        s.req[request].stepped_items += size
        s.req[request].stepped_images += 1
        features[6] += size
        features[7] += 1


@inner
def hit_blocks(s: Sim, request: int) -> int:
    """Full blocks of the request that are in the prefix cache, from its start; the last token is always computed."""
    if not s.rule.prefix_caching:
        return 0
    limit = int(s.req[request].known - 1) // s.rule.block_tokens
    for index in range(limit):
        if s.key[_key(s, request, index)].head < 0:
            return index
    return limit


@outer
def admit_blocks(s: Sim, request: int, hits: int, new: int) -> bool:
    """Blocks for a waiting request: the cached ones are shared, the rest taken; nothing changes if they do not fit."""
    idle = 0
    for index in range(hits):
        if s.blk[s.key[_key(s, request, index)].head].refs == 0:
            idle += 1
    reserve = s.rule.watermark_blocks if s.counts[RUNNING] > 0 else 0
    full = cdiv(min(s.req[request].known, s.rule.max_model_len), s.rule.block_tokens) - hits
    if s.rule.reserve_prompt and full + idle + reserve > s.counts[FREE]:
        return False
    need = cdiv(hits * s.rule.block_tokens + new, s.rule.block_tokens) - hits
    if need + idle + reserve > s.counts[FREE]:
        return False
    for index in range(hits):
        block = s.key[_key(s, request, index)].head
        if s.blk[block].refs == 0:
            unlink(s.blk, block)
            s.counts[FREE] -= 1
        s.blk[block].refs += 1
        s.table[s.req[request].table_first + index] = block
    s.req[request].held, s.req[request].cached = hits, hits
    take_blocks(s, request, need)
    cache_blocks(s, request, min(hits * s.rule.block_tokens + new, s.req[request].known))
    return True

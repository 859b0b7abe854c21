"""How many bytes of keys and values a model keeps, and how many blocks of them the engine hands out.

The size of the cache is 2 (keys and values) x layers x KV heads x head size x tokens x sequences x bytes per element;
with plain multi-head attention KV heads x head size is the hidden size. What departs from that is in the layers: a
sliding window stops growing, a latent (DeepSeek) stores one vector for all heads, tensor parallelism splits KV heads
until there is one per GPU and copies them beyond that.

The engine stores the cache in blocks of `block_tokens` tokens (PagedAttention: Kwon et al., SOSP 2023, section 4.1), so
a sequence wastes at most one block per group of layers; a contiguous allocation has to reserve the longest sequence it
may become. Grouping of hybrid models, the size of a block and the token count printed at start-up follow vLLM 0.32
(`vllm/v1/core/kv_cache_utils.py`, `vllm/v1/kv_cache_interface.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.modelshape import LayerGroup, LayerKind, ModelShape, ShapeError

DEFAULT_BLOCK_TOKENS = {"cpu": 128, "gpu": 16}  # vLLM 0.32 where --block-size is not given
_HYBRID_MERGE_RATIO = 1.5  # vLLM: below this ratio of layer counts the shorter kind is padded rather than split


@dataclass(frozen=True, slots=True)
class KVDtype:
    """How one element of the cache is stored.

    `scale_bytes` are kept per token and KV head, for keys and values alike (per-token-head modes pack a 32-bit scale
    for each side); per-tensor fp8 keeps one scale per layer, which is not part of the cache.
    """

    name: str
    element_bits: int
    scale_bytes: int = 0

    def cell_bytes(self, group: LayerGroup) -> int:
        """Bytes of one token of one KV head in one layer: keys, values and scales."""
        sizes = (group.key_size, group.value_size)
        return sum(size * self.element_bits // 8 for size in sizes) + 2 * self.scale_bytes


KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KVDtype("fp32", 32),
        KVDtype("fp16", 16),
        KVDtype("bf16", 16),
        KVDtype("fp8", 8),
        KVDtype("fp8_per_token_head", 8, scale_bytes=4),
        KVDtype("int8", 8, scale_bytes=4),
        KVDtype("int4", 4, scale_bytes=4),
    )
}
_DTYPE_ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}


def kv_dtype(name: str, model_dtype: str | None = None) -> KVDtype:
    """Look a cache dtype up by our name or the engine's; `auto` is the model's own.

    Raises:
        ShapeError: The engine has no such dtype, or `auto` and the model does not say what it is.
    """
    if name == "auto":
        if model_dtype is None:
            raise ShapeError("dtype is auto, but the model's config does not say its dtype; give --dtype")
        name = model_dtype
    found = KV_DTYPES.get(_DTYPE_ALIASES.get(name, name))
    if found is None:
        raise ShapeError(f"dtype is {name!r}, allowed: auto, {', '.join([*KV_DTYPES, *_DTYPE_ALIASES])}")
    return found


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Layers that share one block table: a sequence draws blocks from the pool for each of these."""

    kind: LayerKind
    layers: int
    window_tokens: int | None

    def blocks(self, tokens: int, block_tokens: int) -> int:
        """Blocks held by one sequence of `tokens` tokens between two steps."""
        return _cdiv(tokens, block_tokens) - self._forgotten(tokens) // block_tokens

    def most_blocks(self, max_tokens: int, in_flight_tokens: int, block_tokens: int) -> int:
        """Blocks that one sequence may hold at worst on its way to `max_tokens`.

        Blocks outside a window are freed only after the step that computed past them, so a window needs room for the
        tokens in flight too, and one block more because it may start within a block.
        """
        if self.window_tokens is None:
            return _cdiv(max_tokens, block_tokens)
        if self.kind is LayerKind.CHUNKED:
            return _cdiv(min(self.window_tokens + in_flight_tokens, max_tokens), block_tokens)
        return _cdiv(min(self.window_tokens - 1 + in_flight_tokens, max_tokens), block_tokens) + 1

    def _forgotten(self, tokens: int) -> int:
        if self.window_tokens is None:
            return 0
        if self.kind is LayerKind.CHUNKED:
            return tokens // self.window_tokens * self.window_tokens
        return max(0, tokens - self.window_tokens + 1)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the engine lays the cache out on one GPU: a pool of equal blocks, and the groups that draw from it."""

    block_tokens: int
    block_bytes: int
    groups: tuple[BlockGroup, ...]

    def blocks(self, tokens: int) -> int:
        """Blocks of one sequence of `tokens` tokens, over all groups."""
        return sum(group.blocks(tokens, self.block_tokens) for group in self.groups)

    def most_blocks(self, max_tokens: int, in_flight_tokens: int) -> int:
        """Blocks that one sequence may need at worst on its way to `max_tokens`, over all groups."""
        return sum(group.most_blocks(max_tokens, in_flight_tokens, self.block_tokens) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The cache of `sequences` sequences of `tokens` tokens each.

    Attributes:
        kv_bytes: Keys and values themselves, over the whole model, counted once.
        per_gpu_bytes: The part on one of the `tensor_parallel` GPUs; copies make `tensor_parallel` of these more than
            `kv_bytes` where there are fewer KV heads than GPUs.
        bytes_per_token: What one token of one sequence adds on the whole model while no window is full.
        paged_bytes: Per GPU, rounded up to blocks of `block_tokens` tokens and to the engine's groups.
        contiguous_bytes: Per GPU, if each sequence reserved `reserve_tokens` beforehand.
    """

    kv_bytes: int
    per_gpu_bytes: int
    bytes_per_token: int
    paged_bytes: int
    contiguous_bytes: int
    tokens: int
    sequences: int
    reserve_tokens: int
    block_tokens: int
    tensor_parallel: int

    @property
    def paged_waste_bytes(self) -> int:
        """Per GPU, lost to the last block of each sequence and to padding layers."""
        return self.paged_bytes - self.per_gpu_bytes

    @property
    def saved_bytes(self) -> int:
        """Per GPU, what paging keeps free against reserving the longest sequence contiguously."""
        return self.contiguous_bytes - self.paged_bytes


def footprint(
    shape: ModelShape,
    dtype: KVDtype,
    *,
    tokens: int,
    sequences: int = 1,
    tensor_parallel: int = 1,
    block_tokens: int = DEFAULT_BLOCK_TOKENS["gpu"],
    reserve_tokens: int | None = None,
) -> Footprint:
    """Bytes of cache, exact, per GPU, in blocks, and as a contiguous reservation of `reserve_tokens` would need.

    `reserve_tokens` defaults to `tokens`: no sequence longer than these.

    Raises:
        ShapeError: A number is out of range or the heads do not divide among the GPUs.
    """
    reserve_tokens = tokens if reserve_tokens is None else reserve_tokens
    for name, value in (("tokens", tokens), ("sequences", sequences)):
        if value < 1:
            raise ShapeError(f"{name} is {value}, allowed: 1 or more")
    if reserve_tokens < tokens:
        raise ShapeError(f"a sequence has {tokens} tokens, more than the {reserve_tokens} reserved for it")
    layout = cache_layout(shape, dtype, block_tokens=block_tokens, tensor_parallel=tensor_parallel)
    per_gpu = shard(shape, tensor_parallel)
    return Footprint(
        kv_bytes=_bytes(shape, dtype, tokens) * sequences,
        per_gpu_bytes=_bytes(per_gpu, dtype, tokens) * sequences,
        bytes_per_token=_bytes(shape, dtype, 1),
        paged_bytes=layout.blocks(tokens) * layout.block_bytes * sequences,
        contiguous_bytes=_bytes(per_gpu, dtype, reserve_tokens, ignore_windows=True) * sequences,
        tokens=tokens,
        sequences=sequences,
        reserve_tokens=reserve_tokens,
        block_tokens=block_tokens,
        tensor_parallel=tensor_parallel,
    )


def shard(shape: ModelShape, tensor_parallel: int) -> ModelShape:
    """The shape on one of `tensor_parallel` GPUs: KV heads split, or copied where there are fewer than GPUs.

    Raises:
        ShapeError: Heads and GPUs do not divide one another, which the engine refuses.
    """
    if tensor_parallel < 1:
        raise ShapeError(f"tensor parallel size is {tensor_parallel}, allowed: 1 or more")
    groups = []
    for group in shape.groups:
        heads = group.kv_heads
        if group.kind is not LayerKind.LATENT and heads % tensor_parallel and tensor_parallel % heads:
            raise ShapeError(
                f"{heads} KV heads over {tensor_parallel} GPUs, allowed: one a multiple of the other, or the engine "
                "does not start"
            )
        split = max(1, heads // tensor_parallel)
        groups.append(replace(group, kv_heads=split))
    return replace(shape, groups=tuple(groups))


def cache_layout(shape: ModelShape, dtype: KVDtype, *, block_tokens: int, tensor_parallel: int = 1) -> CacheLayout:
    """Groups and block size as vLLM 0.32 forms them.

    Layers of one kind form one group, and a block holds `block_tokens` tokens of all of them. A model of several kinds
    is cut into groups of equal layer count (the smallest kind's; padded where the counts are close), each with a block
    table of its own, so that a pool block fits any group.

    Raises:
        ShapeError: Kinds whose tokens differ in size, which the engine packs in ways not modelled here.
    """
    if block_tokens < 1:
        raise ShapeError(f"block size is {block_tokens}, allowed: 1 or more tokens")
    groups = shard(shape, tensor_parallel).groups
    token_bytes = {group.kv_heads * dtype.cell_bytes(group) for group in groups}
    if len(token_bytes) > 1:
        raise ShapeError(f"layers differ in bytes a token ({sorted(token_bytes)}), whose packing is not modelled here")
    page_bytes = token_bytes.pop() * block_tokens
    if len(groups) == 1:
        size, cut = groups[0].layers, [groups[0]]
    else:
        counts = [group.layers for group in groups]
        size = max(counts) if max(counts) < min(counts) * _HYBRID_MERGE_RATIO else min(counts)
        cut = [group for group in groups for _ in range(_cdiv(group.layers, size))]
    return CacheLayout(
        block_tokens=block_tokens,
        block_bytes=size * page_bytes,
        groups=tuple(BlockGroup(group.kind, size, group.window_tokens) for group in cut),
    )


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The pool that fits a given memory, as the engine counts it.

    Attributes:
        tokens: What vLLM 0.32 prints as "KV cache size": concurrency x longest sequence.
        tokens_unwindowed: Pool blocks x tokens a block / groups: what releases before that printed.
        concurrency: Sequences of the longest length that fit at once.
    """

    blocks: int
    tokens: int
    tokens_unwindowed: int
    concurrency: float


def pool_size(layout: CacheLayout, cache_bytes: int, *, max_model_len: int, in_flight_tokens: int) -> PoolSize:
    """Blocks and tokens of a pool of `cache_bytes` per GPU.

    `in_flight_tokens` is the step budget (`max_num_batched_tokens`) x steps in flight (1, or 2 with asynchronous
    scheduling); it matters only to layers with a window.

    Raises:
        ShapeError: One sequence of `max_model_len` tokens does not fit, so that the engine would not start.
    """
    blocks = max(0, cache_bytes) // layout.block_bytes
    per_sequence = layout.most_blocks(max_model_len, in_flight_tokens)
    if blocks < per_sequence:
        raise ShapeError(
            f"the cache holds {blocks} blocks, one sequence of {max_model_len} tokens needs {per_sequence} "
            f"({per_sequence * layout.block_bytes / 2**30:.2f} GiB): the engine would not start; "
            "give it more memory or a smaller max_model_len"
        )
    concurrency = blocks / per_sequence
    return PoolSize(
        blocks=blocks,
        tokens=int(concurrency * max_model_len),
        tokens_unwindowed=blocks // len(layout.groups) * layout.block_tokens,
        concurrency=concurrency,
    )


def _bytes(shape: ModelShape, dtype: KVDtype, tokens: int, *, ignore_windows: bool = False) -> int:
    """Keys and values of one sequence of `tokens` tokens."""
    total = 0
    for group in shape.groups:
        kept = tokens if group.window_tokens is None or ignore_windows else min(tokens, group.window_tokens)
        total += group.layers * group.kv_heads * dtype.cell_bytes(group) * kept
    return total


def _cdiv(value: int, by: int) -> int:
    return -(-value // by)

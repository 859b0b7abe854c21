"""Chunked prefill is the same attention: causal attention in one pass, and in chunks over cached keys and values.

Each query attends over the keys at and before its own position. Which other queries are computed in the same pass does
not enter, so a prompt may be cut anywhere as long as earlier keys and values are kept. Computing the softmax over keys
piece by piece needs the running maximum and sum only (online softmax: Milakov and Gimelshein 2018; FlashAttention, Dao
et al. 2022, section 3.1). What differs between the two is the order of floating-point additions, and how often cached
keys and values are read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class KVCache:
    """Keys and values of one sequence, filled chunk by chunk.

    Shapes: (KV heads, tokens, head size). Counts what is read from it, to compare chunk sizes.
    """

    def __init__(self, kv_heads: int, capacity_tokens: int, head_size: int, dtype: torch.dtype) -> None:
        self._keys = torch.empty(kv_heads, capacity_tokens, head_size, dtype=dtype)
        self._values = torch.empty_like(self._keys)
        self.tokens = 0
        self.bytes_read = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add a chunk's keys and values.

        Raises:
            ValueError: The chunk does not fit the capacity.
        """
        end = self.tokens + keys.shape[1]
        if end > self._keys.shape[1]:
            raise ValueError(f"a cache of {self._keys.shape[1]} tokens cannot take {end}")
        self._keys[:, self.tokens : end] = keys
        self._values[:, self.tokens : end] = values
        self.tokens = end

    def read(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens [start, end)."""
        keys, values = self._keys[:, start:end], self._values[:, start:end]
        self.bytes_read += 2 * keys.numel() * keys.element_size()
        return keys, values


def one_pass(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of a whole prompt at once.

    Args:
        queries: (heads, tokens, head size); heads are a multiple of the KV heads, which they share in order.
        keys: (KV heads, tokens, head size).
        values: As keys.

    Returns:
        (heads, tokens, head size), in the queries' dtype; computed in 32 bits at least.
    """
    group = _group(queries, keys)
    scores = _scores(queries, keys.repeat_interleave(group, dim=0))
    tokens = queries.shape[1]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return (weights @ values.repeat_interleave(group, dim=0).to(weights.dtype)).to(queries.dtype)


def in_chunks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunk_tokens: int,
    *,
    tile_tokens: int = 128,
    cache: KVCache | None = None,
) -> torch.Tensor:
    """The same attention as `one_pass`, with the prompt computed `chunk_tokens` at a time over a cache.

    Each chunk stores its keys and values and reads all stored so far, `tile_tokens` at a time. Shapes as `one_pass`.

    Raises:
        ValueError: A size is below 1.
    """
    if chunk_tokens < 1 or tile_tokens < 1:
        raise ValueError(f"chunks of {chunk_tokens} and tiles of {tile_tokens} tokens, allowed: 1 or more")
    kv_heads, tokens, head_size = keys.shape
    cache = cache if cache is not None else KVCache(kv_heads, tokens, head_size, keys.dtype)
    outputs = []
    for start in range(0, tokens, chunk_tokens):
        end = min(start + chunk_tokens, tokens)
        cache.append(keys[:, start:end], values[:, start:end])
        outputs.append(_chunk(queries[:, start:end], start, cache, tile_tokens))
    return torch.cat(outputs, dim=1)


def _chunk(queries: torch.Tensor, start: int, cache: KVCache, tile_tokens: int) -> torch.Tensor:
    """Online softmax of one chunk, whose first query stands at position `start`, over everything in the cache."""
    heads, count, head_size = queries.shape
    precision = _precision(queries)
    best = torch.full((heads, count, 1), float("-inf"), dtype=precision)
    total = torch.zeros(heads, count, 1, dtype=precision)
    mixed = torch.zeros(heads, count, head_size, dtype=precision)
    positions = torch.arange(start, start + count)[:, None]
    for first in range(0, cache.tokens, tile_tokens):
        last = min(first + tile_tokens, cache.tokens)
        keys, values = cache.read(first, last)
        group = _group(queries, keys)
        scores = _scores(queries, keys.repeat_interleave(group, dim=0))
        scores = scores.masked_fill(torch.arange(first, last)[None, :] > positions, float("-inf"))
        higher = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        # The first tile holds position 0, which every query sees, so `higher` is finite from there on.
        shrink, weights = torch.exp(best - higher), torch.exp(scores - higher)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * shrink + weights @ values.repeat_interleave(group, dim=0).to(precision)
        best = higher
    return (mixed / total).to(queries.dtype)


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    precision = _precision(queries)
    scaled: torch.Tensor = queries.to(precision) @ keys.to(precision).transpose(1, 2) / queries.shape[-1] ** 0.5
    return scaled


def _precision(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _group(queries: torch.Tensor, keys: torch.Tensor) -> int:
    if queries.shape[0] % keys.shape[0]:
        raise ValueError(f"{queries.shape[0]} heads over {keys.shape[0]} KV heads, allowed: a multiple")
    return queries.shape[0] // keys.shape[0]


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """What one chunk size costs in cache traffic for a prompt of `tokens` tokens.

    Attributes:
        chunks: Steps that the prompt takes.
        read_tokens: Tokens of keys and values read over all chunks: chunk i reads i x chunk size of them.
        read_bytes: The same in bytes; `again_bytes` is what one pass would not have read.
    """

    chunk_tokens: int
    chunks: int
    read_tokens: int
    read_bytes: int
    again_bytes: int


def chunk_cost(tokens: int, chunk_tokens: int, kv_token_bytes: int) -> ChunkCost:
    """Keys and values that a chunked prefill reads: each chunk reads all before it and itself, one pass only itself.

    The growth with the number of chunks is the overhead that SARATHI (Agrawal et al. 2023, section 4.2) weighs against
    smaller steps.

    Raises:
        ValueError: A size is below 1.
    """
    if tokens < 1 or chunk_tokens < 1:
        raise ValueError(f"{tokens} tokens in chunks of {chunk_tokens}, allowed: 1 or more each")
    ends = [min(start + chunk_tokens, tokens) for start in range(0, tokens, chunk_tokens)]
    read = sum(ends)
    return ChunkCost(
        chunk_tokens=chunk_tokens,
        chunks=len(ends),
        read_tokens=read,
        read_bytes=read * kv_token_bytes,
        again_bytes=(read - tokens) * kv_token_bytes,
    )

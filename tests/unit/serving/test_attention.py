from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.attention import KVCache, chunk_cost, in_chunks, one_pass

# Both compute in 32 bits (64 for double) and round once to the dtype: they may differ by a rounding step of it.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompt(seed: int, heads: int, kv_heads: int, tokens: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, tokens, size), (kv_heads, tokens, size), (kv_heads, tokens, size))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 70),
    chunk=st.integers(1, 80),
    tile=st.integers(1, 48),
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([4, 16, 32]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=40, deadline=None)
def test_chunks_give_what_one_pass_gives(
    seed: int, tokens: int, chunk: int, tile: int, kv_heads: int, group: int, size: int, dtype: torch.dtype
) -> None:
    parts = prompt(seed, kv_heads * group, kv_heads, tokens, size, dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        in_chunks(*parts, chunk, tile_tokens=tile), one_pass(*parts), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_thousand_tokens_in_chunks_of_256_are_four_chunks(dtype: torch.dtype) -> None:
    queries, keys, values = prompt(7, 4, 2, 1000, 16, dtype)
    cache = KVCache(2, 1000, 16, dtype)
    chunked = in_chunks(queries, keys, values, 256, cache=cache)
    torch.testing.assert_close(chunked, one_pass(queries, keys, values), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    token_bytes = 2 * 2 * 16 * keys.element_size()
    cost = chunk_cost(1000, 256, token_bytes)
    assert cost.chunks == 4
    assert cost.read_tokens == 256 + 512 + 768 + 1000
    assert cache.bytes_read == cost.read_bytes
    assert cost.again_bytes == (2536 - 1000) * token_bytes


def test_torchs_own_attention_agrees() -> None:
    queries, keys, values = prompt(3, 6, 3, 77, 32, torch.float64)
    ours = in_chunks(queries, keys, values, 10)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_changed_token_changes_only_what_comes_after_it() -> None:
    queries, keys, values = prompt(5, 2, 2, 60, 16, torch.float32)
    before = in_chunks(queries, keys, values, 16)
    values = values.clone()
    values[:, 30] += 1
    after = in_chunks(queries, keys, values, 16)
    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.allclose(before[:, 30:], after[:, 30:])


@pytest.mark.parametrize(
    ("tokens", "chunk", "chunks", "read"),
    [
        pytest.param(1000, 1000, 1, 1000, id="one pass reads each once"),
        pytest.param(1000, 5000, 1, 1000, id="larger than the prompt"),
        pytest.param(1000, 1, 1000, 500_500, id="token by token"),
        pytest.param(8192, 512, 16, 512 * 136, id="sixteen chunks"),
    ],
)
def test_reading_again(tokens: int, chunk: int, chunks: int, read: int) -> None:
    cost = chunk_cost(tokens, chunk, 10)
    assert (cost.chunks, cost.read_tokens, cost.read_bytes) == (chunks, read, 10 * read)


@pytest.mark.parametrize(("tokens", "chunk"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(tokens: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        chunk_cost(tokens, chunk, 1)
    queries, keys, values = prompt(0, 3, 2, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="multiple"):
        one_pass(queries, keys, values)
    with pytest.raises(ValueError, match="1 or more"):
        in_chunks(queries, keys, values, 0)
    with pytest.raises(ValueError, match="cannot take"):
        KVCache(2, 3, 4, torch.float32).append(keys, values)

from __future__ import annotations

import pytest

from serving.startuplog import GIB, read_startup_log


@pytest.mark.parametrize(
    ("text", "cache_gib", "tokens", "blocks", "weights_gib"),
    [
        pytest.param(
            "Model loading took 14.9889 GiB and 3.6 seconds\nAvailable KV cache memory: 6.51 GiB\n"
            "GPU KV cache size: 42,656 tokens, Maximum concurrency for 32,768 tokens per request: 1.30x",
            6.51,
            42656,
            None,
            14.9889,
            id="one line, as in 0.32",
        ),
        pytest.param(
            "model weights take 12.55GiB; non_torch_memory takes 0.16GiB; the rest of the memory reserved for KV Cache "
            "is 56.18GiB.\n# cuda blocks: 7191, # CPU blocks: 512",
            56.18,
            None,
            7191,
            12.55,
            id="0.7",
        ),
        pytest.param(
            "Explicitly set (1.0/23.5) GiB for KV cache on node 0.\nCPU KV cache size: 46,592 tokens, Maximum",
            1.0,
            46592,
            None,
            None,
            id="CPU with a fixed size",
        ),
        pytest.param("nothing of the kind", None, None, None, None, id="no such lines"),
    ],
)
def test_wordings(
    text: str, cache_gib: float | None, tokens: int | None, blocks: int | None, weights_gib: float | None
) -> None:
    report = read_startup_log(text)
    assert report.cache_bytes == (None if cache_gib is None else int(cache_gib * GIB))
    assert (report.cache_tokens, report.cache_blocks) == (tokens, blocks)
    assert report.weight_bytes == (None if weights_gib is None else int(weights_gib * GIB))


def test_the_last_start_counts() -> None:
    report = read_startup_log(
        "GPU KV cache size: 100 tokens\nGPU KV cache size: 2,000 tokens\n"
        "Maximum concurrency for 50 tokens per request: 40.00x"
    )
    assert (report.cache_tokens, report.concurrency, report.concurrency_tokens) == (2000, 40.0, 50)

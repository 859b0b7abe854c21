from __future__ import annotations

import pytest

from serving.capacity import (
    MemoryBudget,
    MixPart,
    activation_peak_bytes,
    advise,
    mix_concurrency,
    sensitivities,
    weights_bytes,
)
from serving.kvcache import KV_DTYPES, PoolSize, cache_layout
from serving.modelshape import ShapeError, plain_shape

LAYOUT = cache_layout(plain_shape(1, 1, 64), KV_DTYPES["fp16"], block_tokens=16)


def pool(blocks: int) -> PoolSize:
    return PoolSize(blocks=blocks + 1, tokens=blocks * 16, tokens_unwindowed=blocks * 16, concurrency=1.0)


def test_requests_that_fit_however_they_fall_together() -> None:
    mix = [MixPart("chat", 3, 160, 160), MixPart("camera", 1, 640, 0)]
    found = mix_concurrency(LAYOUT, pool(1000), mix, max_num_seqs=8)
    assert found.at_worst == 1000 // (0.75 * 20 + 0.25 * 40)
    # 10 blocks before the first token, then 16 tokens each at 11 to 20.
    mean = (10 + 16 * sum(range(11, 21))) / 161
    assert found.on_average == int(1000 / (0.75 * mean + 0.25 * 40))


def test_a_shared_prefix_is_held_once() -> None:
    alone = mix_concurrency(LAYOUT, pool(1000), [MixPart("chat", 1, 160, 0)], max_num_seqs=8)
    shared = mix_concurrency(LAYOUT, pool(1000), [MixPart("chat", 1, 160, 0, 80)], max_num_seqs=8)
    assert alone.at_worst == 100
    assert shared.at_worst == (1000 - 5) // 5


@pytest.mark.parametrize(
    ("running", "low", "high"),
    [
        pytest.param(50, 0.0, 0.0, id="all fit at their longest"),
        pytest.param(200, 1.0, 1.0, id="not even the shortest fit"),
        pytest.param(64, 0.2, 0.8, id="near the mean it is a toss-up"),
    ],
)
def test_preemption_risk(running: int, low: float, high: float) -> None:
    mix = [MixPart("chat", 1, 160, 160)]
    found = mix_concurrency(LAYOUT, pool(1000), mix, max_num_seqs=running)
    assert low <= found.preemption_risk <= high


def test_advice_names_the_figure_it_changes_and_the_largest_gain_comes_first() -> None:
    mix = [MixPart("chat", 4, 100, 64), MixPart("report", 1, 4000, 1000)]
    advice = advise(LAYOUT, pool(5000), mix, max_num_seqs=16)
    gains = [item.after - item.before for item in advice]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0
    texts = " | ".join(item.text for item in advice)
    for words in ("same in every prompt first", "one passage", "cap the output", "instance of their own"):
        assert words in texts
    assert "retrieve one passage" not in " | ".join(
        item.text for item in advise(LAYOUT, pool(5000), mix[:1], max_num_seqs=16)
    )


def test_memory_adds_up_and_utilization_moves_it() -> None:
    memory = MemoryBudget(10_000_000, 0.9, 2_000_000, 500_000, 500_000)
    assert memory.cache_bytes == 6_000_000
    tokens = sensitivities(LAYOUT, memory, max_model_len=16, in_flight_tokens=16)
    assert list(tokens.values()) == sorted(tokens.values())
    assert tokens[0.9] == 6_000_000 // LAYOUT.block_bytes * 16


def test_what_cannot_be_known_is_asked_for() -> None:
    shape = plain_shape(1, 1, 64)
    with pytest.raises(ShapeError, match="--weights-gib"):
        weights_bytes(shape, files_bytes=None)
    assert weights_bytes(shape, files_bytes=1000, tensor_parallel=2) == 500
    with pytest.raises(ShapeError, match="hidden_size, intermediate_size, vocab_size"):
        activation_peak_bytes(shape, budget_tokens=1, max_num_seqs=1)
    with pytest.raises(ShapeError, match="empty"):
        mix_concurrency(LAYOUT, pool(10), [], max_num_seqs=1)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.capacity import DEFAULT_OVERHEAD_BYTES, MemoryBudget, activation_peak_bytes, weights_bytes
from serving.kvcache import KV_DTYPES, cache_layout, footprint, kv_dtype, pool_size
from serving.modelshape import LayerKind, ModelShape, ShapeError, plain_shape, read_shape

FIXTURES = Path(__file__).parents[2] / "fixtures"
MODELS: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in json.loads((FIXTURES / "model_shapes.json").read_text())
}
LOGS: list[dict[str, Any]] = json.loads((FIXTURES / "startup_logs.json").read_text())
GIB = 2**30
FP16, BF16 = KV_DTYPES["fp16"], KV_DTYPES["bf16"]
LLAMA: dict[str, Any] = MODELS["Llama-3.1-8B"]["config"]


def shape_of(name: str) -> ModelShape:
    return read_shape(MODELS[name]["config"])


@pytest.mark.parametrize(
    ("tokens", "sequences", "gib"),
    [
        pytest.param(4096, 1, 2, id="4,096 tokens"),
        pytest.param(128 * 1024, 1, 64, id="128 Ki tokens"),
        pytest.param(128 * 1024, 8, 512, id="batch of 8"),
    ],
)
def test_multi_head_model_of_hidden_size_4096(tokens: int, sequences: int, gib: int) -> None:
    size = footprint(plain_shape(32, 32, 128), FP16, tokens=tokens, sequences=sequences)
    assert size.kv_bytes == gib * GIB
    assert size.per_gpu_bytes == size.kv_bytes


@pytest.mark.parametrize("name", list(MODELS))
def test_bytes_a_token_of_known_models(name: str) -> None:
    assert footprint(shape_of(name), BF16, tokens=1).kv_bytes == MODELS[name]["bytes_per_token"], MODELS[name][
        "bytes_source"
    ]


@pytest.mark.parametrize(
    ("name", "tokens", "kept"),
    [
        pytest.param("Mistral-7B-v0.1", 4096, 4096 * 131072, id="window just full"),
        pytest.param("Mistral-7B-v0.1", 32768, 4096 * 131072, id="every layer stops at the window"),
        pytest.param("gpt-oss-120b", 1000, 18 * 2048 * (128 + 1000), id="half the layers stop"),
        pytest.param("Gemma-3-4B", 8192, 4096 * (29 * 1024 + 5 * 8192), id="29 of 34 layers stop"),
    ],
)
def test_windows_stop_growing(name: str, tokens: int, kept: int) -> None:
    assert footprint(shape_of(name), BF16, tokens=tokens).kv_bytes == kept


@pytest.mark.parametrize(
    ("name", "gpus", "per_gpu", "copies"),
    [
        pytest.param("Llama-3.1-8B", 2, 131072 // 2, 1, id="heads split"),
        pytest.param("Llama-3.1-8B", 16, 131072 // 8, 2, id="more GPUs than heads: copied"),
        pytest.param("Falcon-7B", 4, 8192, 4, id="one head: copied to all"),
        pytest.param("DeepSeek-V3", 8, 70272, 8, id="latent: copied to all"),
    ],
)
def test_tensor_parallel(name: str, gpus: int, per_gpu: int, copies: int) -> None:
    size = footprint(shape_of(name), BF16, tokens=1, tensor_parallel=gpus)
    assert size.per_gpu_bytes == per_gpu
    assert size.per_gpu_bytes * gpus == copies * size.kv_bytes


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShapeError, match="8 KV heads over 3 GPUs"):
        footprint(shape_of("Llama-3.1-8B"), BF16, tokens=1, tensor_parallel=3)


@pytest.mark.parametrize(
    ("dtype", "bytes_a_head"),
    [
        pytest.param("fp32", 1024, id="fp32"),
        pytest.param("bfloat16", 512, id="bf16 by the engine's name"),
        pytest.param("fp8_e4m3", 256, id="fp8: one scale a layer"),
        pytest.param("fp8_per_token_head", 264, id="fp8 with scales a token and head"),
        pytest.param("int8", 264, id="int8: two 32-bit scales a token and head"),
        pytest.param("int4_per_token_head", 136, id="int4"),
    ],
)
def test_cache_dtypes_of_a_head_of_128(dtype: str, bytes_a_head: int) -> None:
    assert footprint(plain_shape(1, 1, 128), kv_dtype(dtype), tokens=1).kv_bytes == bytes_a_head


def test_auto_dtype_is_the_models_and_must_be_known() -> None:
    assert kv_dtype("auto", shape_of("Llama-2-7B").dtype) == FP16
    with pytest.raises(ShapeError, match="does not say its dtype"):
        kv_dtype("auto", None)
    with pytest.raises(ShapeError, match="int3"):
        kv_dtype("int3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"model_type": "mamba"}, "mamba", id="unknown family"),
        pytest.param({"model_type": None}, "lacks model_type", id="no family"),
        pytest.param({"num_hidden_layers": None}, "lacks num_hidden_layers", id="no layers"),
        pytest.param({"num_attention_heads": None}, "lacks num_attention_heads", id="no heads"),
        pytest.param({"num_hidden_layers": "32"}, "whole number", id="not a number"),
        pytest.param({"hidden_size": 4095}, "no multiple", id="head size unclear"),
        pytest.param({"layer_types": ["linear_attention"] * 32}, "linear_attention", id="state of unknown size"),
        pytest.param({"layer_types": ["full_attention"] * 3}, "names 3 layers", id="too few layer types"),
        pytest.param({"model_type": "new_vlm", "text_config": {}}, "new_vlm", id="unknown vision model"),
        pytest.param({"model_type": "idefics3"}, "needs text_config", id="vision model without its text part"),
        pytest.param({"model_type": "deepseek_v3"}, "needs kv_lora_rank", id="latent without its rank"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        read_shape({**LLAMA, **change})


def test_text_part_of_a_vision_model_is_what_caches() -> None:
    shape = shape_of("SmolVLM-256M")
    assert shape.has_vision
    assert (shape.groups[0].layers, shape.groups[0].kv_heads, shape.groups[0].key_size) == (30, 3, 64)


def test_blocks_round_up_and_beat_a_reservation() -> None:
    size = footprint(shape_of("Llama-3.1-8B"), BF16, tokens=17, sequences=3, block_tokens=16, reserve_tokens=8192)
    assert size.paged_bytes == 3 * 32 * 131072
    assert size.paged_waste_bytes == 3 * 15 * 131072
    assert size.contiguous_bytes == 3 * 8192 * 131072
    assert size.saved_bytes == 3 * (8192 - 32) * 131072


def test_hybrid_models_are_cut_into_groups_of_equal_layers() -> None:
    layout = cache_layout(shape_of("Gemma-3-4B"), BF16, block_tokens=16)
    assert [group.kind for group in layout.groups] == [LayerKind.SLIDING] * 6 + [LayerKind.FULL]
    assert {group.layers for group in layout.groups} == {5}
    assert layout.block_bytes == 5 * 16 * 4096
    # 29 sliding layers fill 6 groups of 5: the sixth has a layer of padding.
    assert layout.blocks(16) == 7


def test_kinds_of_nearly_equal_count_are_padded_instead() -> None:
    config = {**LLAMA, "sliding_window": 128, "layer_types": ["sliding_attention"] * 14 + ["full_attention"] * 18}
    layout = cache_layout(read_shape(config), BF16, block_tokens=16)
    assert [(group.kind, group.layers) for group in layout.groups] == [(LayerKind.SLIDING, 18), (LayerKind.FULL, 18)]


def test_sliding_blocks_are_given_back_once_the_window_has_passed() -> None:
    layout = cache_layout(shape_of("Mistral-7B-v0.1"), BF16, block_tokens=16)
    assert [layout.blocks(tokens) for tokens in (4096, 4111, 4112, 10_000)] == [256, 256, 256, 256]
    assert layout.blocks(4097) == 257


def test_pool_counts_tokens_as_the_engine_prints_them() -> None:
    layout = cache_layout(shape_of("SmolVLM-256M"), BF16, block_tokens=128)
    size = pool_size(layout, GIB, max_model_len=4096, in_flight_tokens=256)
    assert size.blocks == GIB // (128 * 23040)
    assert size.tokens == int(size.blocks / 32 * 4096)
    assert size.concurrency == pytest.approx(size.blocks / 32)


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    layout = cache_layout(shape_of("Llama-3.1-8B"), BF16, block_tokens=16)
    with pytest.raises(ShapeError, match="would not start"):
        pool_size(layout, GIB // 2, max_model_len=8192, in_flight_tokens=2048)


def _layout(log: dict[str, Any]) -> tuple[ModelShape, Any]:
    config = log["model"] if isinstance(log["model"], dict) else MODELS[log["model"]]["config"]
    shape = read_shape(config)
    return shape, cache_layout(shape, BF16, block_tokens=16, tensor_parallel=log["tensor_parallel"])


@pytest.mark.parametrize("log", [pytest.param(log, id=log["name"]) for log in LOGS if log["cache_gib"]])
def test_reported_memory_gives_the_reported_tokens(log: dict[str, Any]) -> None:
    """Within 2 %: logs round GiB to two decimals, and releases before 0.32 counted tokens as blocks / groups."""
    _, layout = _layout(log)
    size = pool_size(layout, int(log["cache_gib"] * GIB), max_model_len=16, in_flight_tokens=1)
    assert size.tokens_unwindowed == pytest.approx(log["tokens"], rel=0.02)


@pytest.mark.parametrize("log", [pytest.param(log, id=log["name"]) for log in LOGS if "estimate_error" in log])
def test_estimate_from_gpu_and_config_misses_by_what_is_published(log: dict[str, Any]) -> None:
    """The whole way from the GPU's memory: the error of each is listed in docs/planning.md."""
    shape, layout = _layout(log)
    memory = MemoryBudget(
        total_bytes=int(log["total_gib"] * GIB),
        utilization=log["utilization"],
        weight_bytes=weights_bytes(shape, files_bytes=None, tensor_parallel=log["tensor_parallel"]),
        activation_bytes=activation_peak_bytes(
            shape,
            budget_tokens=log["budget_tokens"],
            max_num_seqs=log["max_num_seqs"],
            tensor_parallel=log["tensor_parallel"],
        ),
        overhead_bytes=DEFAULT_OVERHEAD_BYTES,
    )
    size = pool_size(layout, memory.cache_bytes, max_model_len=16, in_flight_tokens=1)
    assert size.tokens_unwindowed / log["tokens"] - 1 == pytest.approx(log["estimate_error"], abs=0.001)

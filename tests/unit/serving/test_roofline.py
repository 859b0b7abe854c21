from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving.kvcache import KV_DTYPES
from serving.modelshape import ShapeError, plain_shape, read_shape
from serving.roofline import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    MACHINES,
    STEP_OVERHEAD_S,
    find_machine,
    model_cost,
    roofline_step_time,
    step_intensity,
    vision_parameters,
)

MODELS = {
    entry["name"]: read_shape(entry["config"])
    for entry in json.loads((Path(__file__).parents[2] / "fixtures" / "model_shapes.json").read_text())
}
LLAMA, BF16 = MODELS["Llama-3.1-8B"], KV_DTYPES["bf16"]
H100 = MACHINES["h100"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        pytest.param("Llama-3.1-8B", 8.03, id="published as 8.03 B"),
        pytest.param("Llama-2-7B", 6.74, id="published as 6.74 B"),
        pytest.param("Llama-3.1-405B", 405.9, id="published as 405.9 B"),
        pytest.param("Qwen2.5-72B", 72.7, id="published as 72.7 B"),
        pytest.param("Mistral-7B-v0.1", 7.24, id="published as 7.24 B"),
    ],
)
def test_counted_parameters_are_the_published_ones(name: str, billions: float) -> None:
    parameters = MODELS[name].text_parameters
    assert parameters is not None
    assert parameters / 1e9 == pytest.approx(billions, rel=0.002)


def test_costs_of_a_token() -> None:
    cost = model_cost(LLAMA, BF16)
    assert cost.token_flops == 2 * 8029995008
    assert cost.weight_bytes == cost.token_flops
    assert cost.kv_token_bytes == 131072
    assert cost.pair_flops == 4 * 32 * 32 * 128  # 4 x layers x heads x head size
    halved = model_cost(LLAMA, BF16, tensor_parallel=2)
    assert (halved.token_flops, halved.kv_token_bytes) == (cost.token_flops / 2, 65536)


def test_decode_is_memory_bound_and_prefill_compute_bound() -> None:
    cost = model_cost(LLAMA, BF16)
    decode = step_intensity(H100, cost, decode_contexts=[1000] * 8)
    prefill = step_intensity(H100, cost, decode_contexts=[], prefill_tokens=2048)
    mixed = step_intensity(H100, cost, decode_contexts=[1000] * 8, prefill_tokens=512)
    assert not decode.compute_bound and prefill.compute_bound and mixed.compute_bound
    assert decode.flops_per_byte < 8.1 < H100.ratio < prefill.flops_per_byte
    assert decode.flops_per_byte < mixed.flops_per_byte < prefill.flops_per_byte


def test_step_times_are_the_roofline_less_the_efficiencies() -> None:
    cost = model_cost(LLAMA, BF16)
    model = roofline_step_time(H100, cost)
    decode = model.seconds((1, 1, 0, 1000, 0, 0, 0, 0))
    moved = cost.weight_bytes + 1000 * cost.kv_token_bytes
    assert decode == pytest.approx(STEP_OVERHEAD_S + moved / (H100.bytes_per_s * BANDWIDTH_EFFICIENCY))
    prefill = model.seconds((1, 0, 2048, 0, 2048 * 2049 / 2, 2048, 0, 0))
    flops = 2048 * cost.token_flops + 2048 * 2049 / 2 * cost.pair_flops
    assert prefill == pytest.approx(STEP_OVERHEAD_S + flops / (H100.flops_per_s * COMPUTE_EFFICIENCY))
    assert "not measured" in model.source and model.quality is None


def test_an_image_encoder_costs_by_its_matrices() -> None:
    vision = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}
    assert vision_parameters(vision) == 12 * (4 * 768**2 + 2 * 768 * 3072)  # 85 million: SigLIP base
    cost = model_cost(LLAMA, BF16, vision=vision, image_tokens_per_patch=1 / 16)
    assert cost.image_token_flops == 2 * vision_parameters(vision) * 16
    assert roofline_step_time(H100, cost).linear[6] > 0


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ShapeError, match="h100"):
        find_machine("h9000")
    with pytest.raises(ShapeError, match="cannot be counted"):
        model_cost(MODELS["DeepSeek-V3"], BF16)
    with pytest.raises(ShapeError, match="attention heads"):
        model_cost(plain_shape(1, 1, 1), BF16, parameters=10)
    with pytest.raises(ShapeError, match="vision config"):
        vision_parameters({})
    assert model_cost(MODELS["DeepSeek-V3"], BF16, parameters=37_000_000_000).token_flops == 74e9

"""A machine's roofline, and where prefill and decode fall under it.

A kernel takes at least as long as its arithmetic at the machine's peak and as its memory traffic at the machine's
bandwidth (Williams, Waterman and Patterson, CACM 2009). Arithmetic per byte above the machine's ratio of the two is
compute-bound, below it memory-bound. A step reads all weights once whatever it does, so a decode step of few sequences
is memory-bound and a prefill of some hundred tokens compute-bound: hence decodes ride along with a prefill almost for
free (SARATHI, Agrawal et al. 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving.kvcache import KVDtype, shard
from serving.modelshape import ModelShape, ShapeError
from serving.steptime import StepTime

# What real kernels reach of the datasheet's peaks, and what a step costs besides: assumptions, shown with every result.
COMPUTE_EFFICIENCY = 0.6
BANDWIDTH_EFFICIENCY = 0.8
STEP_OVERHEAD_S = 1e-3


@dataclass(frozen=True, slots=True)
class Machine:
    """One accelerator, from its maker's datasheet (`source`): dense 16-bit peak, memory bandwidth and size."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    source: str

    @property
    def ratio(self) -> float:
        """FLOP per byte at which arithmetic and memory take equally long."""
        return self.flops_per_s / self.bytes_per_s


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("t4", 65e12, 320e9, 16 * 10**9, "NVIDIA T4 datasheet"),
        Machine("l4", 121e12, 300e9, 24 * 10**9, "NVIDIA L4 datasheet"),
        Machine("a10", 125e12, 600e9, 24 * 10**9, "NVIDIA A10 datasheet"),
        Machine("l40s", 362e12, 864e9, 48 * 10**9, "NVIDIA L40S datasheet"),
        Machine("rtx3090", 71e12, 936e9, 24 * 10**9, "NVIDIA GA102 whitepaper (FP32 accumulate)"),
        Machine("rtx4090", 165.2e12, 1008e9, 24 * 10**9, "NVIDIA Ada whitepaper (FP32 accumulate)"),
        Machine("a100-40gb", 312e12, 1555e9, 40 * 10**9, "NVIDIA A100 datasheet"),
        Machine("a100-80gb", 312e12, 2039e9, 80 * 10**9, "NVIDIA A100 datasheet (SXM)"),
        Machine("h100", 989.4e12, 3350e9, 80 * 10**9, "NVIDIA H100 datasheet (SXM)"),
        Machine("h200", 989.4e12, 4800e9, 141 * 10**9, "NVIDIA H200 datasheet (SXM)"),
    )
}


def find_machine(name: str) -> Machine:
    """Raises ShapeError when no machine has that name."""
    found = MACHINES.get(name.lower())
    if found is None:
        raise ShapeError(f"GPU {name!r} is not known, allowed: {', '.join(MACHINES)}")
    return found


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one GPU of `tensor_parallel` does for a model: bytes and FLOP per unit of a step's features.

    Attributes:
        weight_bytes: Read once a step.
        token_flops: Per token through the matrices (2 per weight).
        pair_flops: Per pair of query and key in attention (4 per element of a query head, keys and values).
        kv_token_bytes: Keys and values of one token of context.
        image_token_flops: Per image token that the encoder makes; 0 where there is none.
    """

    weight_bytes: float
    token_flops: float
    pair_flops: float
    kv_token_bytes: float
    image_token_flops: float = 0.0


def model_cost(
    shape: ModelShape,
    dtype: KVDtype,
    *,
    tensor_parallel: int = 1,
    parameters: int | None = None,
    weight_bytes: float | None = None,
    vision: Mapping[str, Any] | None = None,
    image_tokens_per_patch: float | None = None,
) -> ModelCost:
    """Costs from the shape; `parameters` (those a token passes through) is needed where they cannot be counted.

    `vision` is the config of a plain vision transformer, with `image_tokens_per_patch` tokens made of one patch.

    Raises:
        ShapeError: A size is missing.
    """
    weights = parameters if parameters is not None else shape.text_parameters
    if weights is None:
        raise ShapeError("the parameters that a token passes through cannot be counted for this family; give them")
    if shape.attention_heads is None:
        raise ShapeError("the number of attention heads is not in the shape")
    per_gpu = shard(shape, tensor_parallel)
    pair = sum(
        2 * group.layers * shape.attention_heads * (group.key_size + (group.value_size or group.key_size))
        for group in shape.groups
    )
    image_flops = 0.0
    if vision is not None:
        image_flops = 2 * vision_parameters(vision) / (image_tokens_per_patch or 1.0)
    return ModelCost(
        weight_bytes=(weight_bytes if weight_bytes is not None else 2.0 * weights) / tensor_parallel,
        token_flops=2 * weights / tensor_parallel,
        pair_flops=pair / tensor_parallel,
        kv_token_bytes=sum(group.layers * group.kv_heads * dtype.cell_bytes(group) for group in per_gpu.groups),
        image_token_flops=image_flops / tensor_parallel,
    )


def vision_parameters(vision: Mapping[str, Any]) -> int:
    """Matrices of a plain vision transformer's layers: attention (4 x width^2) and MLP (2 or 3 x width x inner)."""
    width = vision.get("hidden_size")
    layers = vision.get("num_hidden_layers", vision.get("depth"))
    inner = vision.get("intermediate_size") or (width or 0) * 4
    if not isinstance(width, int) or not isinstance(layers, int):
        raise ShapeError("the vision config lacks hidden_size or its number of layers")
    return layers * (4 * width * width + 2 * width * inner)


def roofline_step_time(machine: Machine, cost: ModelCost) -> StepTime:
    """Step times as the machine's roofline allows, less the efficiencies above."""
    compute = machine.flops_per_s * COMPUTE_EFFICIENCY
    memory = machine.bytes_per_s * BANDWIDTH_EFFICIENCY
    token, pair, kv = cost.token_flops / compute, cost.pair_flops / compute, cost.kv_token_bytes / memory
    return StepTime(
        linear=(STEP_OVERHEAD_S, 0, 0, 0, 0, 0, cost.image_token_flops / compute, 0),
        compute=(0, token, token, pair, pair, 0, 0, 0),
        memory=(cost.weight_bytes / memory, 0, 0, kv, 0, kv, 0, 0),
        source=f"roofline of {machine.name} ({machine.source}), {COMPUTE_EFFICIENCY:.0%} of its arithmetic, "
        f"{BANDWIDTH_EFFICIENCY:.0%} of its bandwidth and {STEP_OVERHEAD_S * 1e3:g} ms a step assumed; not measured",
    )


@dataclass(frozen=True, slots=True)
class Intensity:
    """FLOP and bytes of one step, and which of the two bounds it on a machine."""

    flops: float
    bytes: float
    compute_bound: bool

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity."""
        return self.flops / self.bytes


def step_intensity(
    machine: Machine, cost: ModelCost, *, decode_contexts: list[int], prefill_tokens: int = 0, prefill_start: int = 0
) -> Intensity:
    """A step of decodes with these context lengths, and a prefill chunk of `prefill_tokens` from `prefill_start` on."""
    tokens = len(decode_contexts) + prefill_tokens
    pairs = sum(decode_contexts) + prefill_tokens * prefill_start + prefill_tokens * (prefill_tokens + 1) // 2
    context = sum(decode_contexts) + (prefill_start + prefill_tokens if prefill_tokens else 0)
    flops = cost.token_flops * tokens + cost.pair_flops * pairs
    moved = cost.weight_bytes + cost.kv_token_bytes * context
    return Intensity(flops=flops, bytes=moved, compute_bound=flops / moved > machine.ratio)

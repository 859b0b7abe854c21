"""The engine that a plan is for: step times, settings, size of its cache and the model's rule for pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serving.capacity import DEFAULT_OVERHEAD_BYTES, MemoryBudget, activation_peak_bytes, weights_bytes
from serving.config import SAMPLE_MODEL, ImageTokens, ServerConfig
from serving.kvcache import DEFAULT_BLOCK_TOKENS, cache_layout, kv_dtype, pool_size
from serving.modelfiles import ModelFiles, find_model, image_rule
from serving.modelshape import ModelShape, ShapeError, read_shape
from serving.roofline import Machine, ModelCost, find_machine, model_cost, roofline_step_time
from serving.simulate import EngineSettings
from serving.stepsource import fit_from
from serving.steptime import StepTime


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What says how long a step takes (`fit` or `gpu`), and what is served.

    Attributes:
        fit: A comparison's folder or steps file, or a vLLM log. gpu: A machine of `serving.roofline`.
        model: Folder or hub name; None: the deployment's.
        parameters: Weights that a token passes; None: counted.
        cache_tokens: Size of the KV cache; None: worked out.
    """

    fit: Path | None = None
    gpu: str | None = None
    model: str | None = None
    parameters: int | None = None
    tensor_parallel: int = 1
    cache_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that a simulation needs; `machine` and `cost` only with a roofline."""

    step_time: StepTime
    settings: EngineSettings
    image_tokens: ImageTokens
    machine: Machine | None
    cost: ModelCost | None


def open_model(name: str) -> ModelFiles:
    """A model by folder, file or hub name, or `sample` for the sample model, which is built if it is not there yet."""
    if name == SAMPLE_MODEL:
        from samples.vlm import ensure_checkpoint  # noqa: PLC0415 - only for the sample model

        name = str(ensure_checkpoint())
    return find_model(name)


def make_engine(options: EngineOptions, server: ServerConfig, *, largest_budget: int) -> Engine:
    """Work the options out for a deployment's server.

    Raises:
        ValueError: (`ShapeError` and `FitError` among them) They do not suffice; the message is one line.
    """
    files = open_model(options.model or server.model) if options.model or not server.base_url else None
    if (options.fit is None) == (options.gpu is None):
        raise ValueError("give either --fit (measured steps) or --gpu (a roofline), to say how long a step takes")
    machine, cost = None, None
    if options.fit is not None:
        step_time = fit_from(options.fit)
    else:
        if files is None:
            raise ValueError("--gpu needs a model, to know what a step computes; give --model")
        machine = find_machine(options.gpu or "")
        cost = cost_of(files, tensor_parallel=options.tensor_parallel, parameters=options.parameters)
        step_time = roofline_step_time(machine, cost)
    return Engine(
        step_time=step_time,
        settings=_settings(options, server, files, machine, largest_budget),
        image_tokens=_image_rule(files, server),
        machine=machine,
        cost=cost,
    )


def cost_of(files: ModelFiles, *, tensor_parallel: int = 1, parameters: int | None = None) -> ModelCost:
    """What a step costs with this model.

    Raises:
        ShapeError: A size is missing.
    """
    shape = read_shape(files.config)
    return model_cost(
        shape,
        kv_dtype("auto", shape.dtype),
        tensor_parallel=tensor_parallel,
        parameters=parameters,
        weight_bytes=files.weight_bytes,
        vision=files.config.get("vision_config"),
        image_tokens_per_patch=_tokens_per_patch(files),
    )


def _tokens_per_patch(files: ModelFiles) -> float:
    """Image tokens made of one patch: patches are merged (Qwen-VL) or shuffled (Idefics3) together."""
    vision = files.config.get("vision_config") or {}
    merged = files.config.get("scale_factor") or vision.get("spatial_merge_size") or 1
    return float(1 / merged**2)


def _settings(
    options: EngineOptions,
    server: ServerConfig,
    files: ModelFiles | None,
    machine: Machine | None,
    largest_budget: int,
) -> EngineSettings:
    block = DEFAULT_BLOCK_TOKENS["gpu" if machine is not None else server.device.value]
    if options.cache_tokens is not None:
        blocks = options.cache_tokens // block + 1
    else:
        if files is None:
            raise ValueError("the size of the KV cache is not known; give --cache-tokens")
        shape = read_shape(files.config)
        layout = cache_layout(
            shape, kv_dtype("auto", shape.dtype), block_tokens=block, tensor_parallel=options.tensor_parallel
        )
        cache = _cache_bytes(options, server, files, shape, machine, largest_budget)
        blocks = pool_size(layout, cache, max_model_len=server.max_model_len, in_flight_tokens=largest_budget).blocks
        if len(layout.groups) > 1:
            raise ShapeError("the simulator knows one kind of attention layer; this model mixes kinds")
    return EngineSettings.of_server(server, cache_blocks=blocks, block_tokens=block)


def _cache_bytes(
    options: EngineOptions,
    server: ServerConfig,
    files: ModelFiles,
    shape: ModelShape,
    machine: Machine | None,
    largest_budget: int,
) -> int:
    if machine is None:
        if server.kv_cache_memory_bytes is None:
            raise ValueError("the config does not set kv_cache_memory_bytes; give --cache-tokens")
        return server.kv_cache_memory_bytes
    memory = MemoryBudget(
        total_bytes=machine.memory_bytes,
        utilization=server.gpu_memory_utilization or 0.9,
        weight_bytes=weights_bytes(shape, files_bytes=files.weight_bytes, tensor_parallel=options.tensor_parallel),
        activation_bytes=activation_peak_bytes(
            shape,
            budget_tokens=largest_budget,
            max_num_seqs=server.max_num_seqs,
            tensor_parallel=options.tensor_parallel,
        ),
        overhead_bytes=DEFAULT_OVERHEAD_BYTES,
    )
    return memory.cache_bytes


def _image_rule(files: ModelFiles | None, server: ServerConfig) -> ImageTokens:
    """The model's own rule where it says one, else the config's."""
    if files is None or files.preprocessor is None:
        return server.image_tokens
    try:
        return image_rule(files)
    except ShapeError:
        return server.image_tokens

"""The planning commands of `framechat`: their options; what they do is in ui/plan_kv.py and ui/plan_simulate.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_USAGE = 2
_CONFIGS = Path(__file__).parent.parent / "configs"
DEFAULT_CONFIG = _CONFIGS / "sample.yaml"
DEFAULT_LOAD = _CONFIGS / "load-mixed.yaml"


def register(app: typer.Typer) -> None:
    """Add the planning commands to the `framechat` command."""
    app.command("kv")(kv)
    app.command("simulate")(simulate)


def kv(
    model: Annotated[str | None, typer.Argument(help="Folder, config.json or hub name; or give the shape.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers, all of plain attention.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads a layer.")] = None,
    head_size: Annotated[int | None, typer.Option(help="Elements of a head.")] = None,
    dtype: Annotated[str, typer.Option(help="Cache dtype: auto, fp16, bf16, fp32, fp8, int8, int4, ...")] = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens a sequence, image tokens included.")] = 4096,
    sequences: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "--tp", help="GPUs that share the heads.")] = 1,
    device: Annotated[str, typer.Option(help="gpu or cpu: decides the block size and the steps in flight.")] = "gpu",
    block_size: Annotated[int | None, typer.Option(help="Tokens a block; default: the engine's, 16 or 128.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence; default: --tokens.")] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of one GPU: work out what fits.")] = None,
    utilization: Annotated[float, typer.Option(help="gpu_memory_utilization.")] = 0.9,
    weights_gib: Annotated[float | None, typer.Option(help="Weights on one GPU; default: counted.")] = None,
    activation_gib: Annotated[float | None, typer.Option(help="Activation peak; default: estimated.")] = None,
    overhead_gib: Annotated[float | None, typer.Option(help="CUDA context and graphs; default: 0.75.")] = None,
    server_log: Annotated[Path | None, typer.Option(help="Take the cache's memory from this vLLM log.")] = None,
    budget: Annotated[int, typer.Option(help="max_num_batched_tokens.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="max_num_seqs.")] = 128,
    mix: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:SHARE:PROMPT:OUTPUT[:PREFIX]", help="A class of requests, in tokens. Repeatable."),
    ] = None,
    picture: Annotated[str | None, typer.Option(metavar="WxH", help="Picture size: count its tokens.")] = None,
    every_s: Annotated[float, typer.Option(help="Seconds between two pictures of a camera.")] = 2.0,
    cameras: Annotated[int, typer.Option(help="Cameras.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """How much memory a model's KV cache takes and, with --memory-gib or --server-log, how many requests fit."""
    from ui.plan_kv import KVOptions, run_kv  # noqa: PLC0415 - keeps `--help` quick

    options = KVOptions(
        model=model,
        layers=layers,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        tokens=tokens,
        sequences=sequences,
        tensor_parallel=tensor_parallel,
        device=device,
        block_size=block_size,
        max_model_len=max_model_len,
        memory_gib=memory_gib,
        utilization=utilization,
        weights_gib=weights_gib,
        activation_gib=activation_gib,
        overhead_gib=overhead_gib,
        server_log=server_log,
        budget=budget,
        max_num_seqs=max_num_seqs,
        mix=tuple(mix or ()),
        picture=picture,
        every_s=every_s,
        cameras=cameras,
    )
    try:
        run_kv(options, as_json=as_json)
    except (ValueError, OSError) as error:
        raise _usage_error(error) from None


def simulate(
    load: Annotated[
        Path, typer.Option("--load", help="The load: a YAML file.", show_default="configs/load-mixed.yaml")
    ] = DEFAULT_LOAD,
    budgets: Annotated[str, typer.Option(help="Step budgets in tokens, with commas.")] = "128,256,512,1024,2048",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="vllm, prefill-first, decode-first or fixed-splits. Repeatable.", show_default="vllm"),
    ] = None,
    fit: Annotated[Path | None, typer.Option(help="Measured steps: folder with steps.parquet, or a vLLM log.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Take step times from this GPU's roofline instead.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name; default: the config's model.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Weights a token passes; default: counted.")] = None,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "--tp", help="GPUs that share the model.")] = 1,
    cache_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache; default: worked out.")] = None,
    split_tokens: Annotated[int | None, typer.Option(help="Size of a split with fixed-splits.")] = None,
    front_end_ms: Annotated[float, typer.Option(help="Server time before the engine, a request.")] = 0.0,
    picture_ms: Annotated[float, typer.Option(help="Server time before the engine, a picture.")] = 0.0,
    check: Annotated[bool, typer.Option("--check", help="Fit some arms of --fit DIR, predict the others.")] = False,
    fit_arms: Annotated[str | None, typer.Option(help="With --check: the arms to fit, such as 64,512.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a comparison's folder of what was simulated.")] = None,
    config: Annotated[
        Path, typer.Option("--config", "-c", help="Deployment file: the engine's settings.")
    ] = DEFAULT_CONFIG,
    items: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict TTFT and ITL per class for step budgets, from measured steps (--fit) or a GPU's roofline (--gpu)."""
    from pipeline.config import ConfigError, load_config  # noqa: PLC0415 - keeps `--help` quick
    from serving.compare.tables import ComparisonError  # noqa: PLC0415
    from serving.simulate import FrontEnd, Policy  # noqa: PLC0415
    from ui.plan_check import run_check  # noqa: PLC0415
    from ui.plan_engine import EngineOptions  # noqa: PLC0415
    from ui.plan_simulate import SimulateOptions, parse_budgets, run_simulate  # noqa: PLC0415

    engine = EngineOptions(fit, gpu, model, parameters, tensor_parallel, cache_tokens)
    try:
        if check:
            if fit is None or fit_arms is None or report is not None:
                raise ValueError("--check needs --fit DIR (a comparison) and --fit-arms, such as 64,512; no --report")
            run_check(fit, fit_arms, engine, as_json=as_json)
            return
        if fit_arms is not None:
            raise ValueError("--fit-arms goes with --check")
        options = SimulateOptions(
            load=load,
            budgets=parse_budgets(budgets, "--budgets"),
            policies=tuple(Policy(name) for name in policy or ["vllm"]),
            engine=engine,
            split_tokens=split_tokens,
            front_end=FrontEnd(request_s=front_end_ms / 1e3, picture_s=picture_ms / 1e3),
            report=report,
        )
        run_simulate(options, load_config(config, overrides=list(items or [])), as_json=as_json)
    except (ValueError, OSError, ConfigError, ComparisonError) as error:
        raise _usage_error(error) from None


def _usage_error(error: Exception) -> typer.Exit:
    """Print what is wrong with the input in one line, and return the exit to raise."""
    typer.secho(f"framechat: {' '.join(str(error).split())}", fg=typer.colors.RED, err=True)
    return typer.Exit(EXIT_USAGE)

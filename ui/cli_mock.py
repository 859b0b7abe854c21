"""`framechat mock`: its options; what it does is in serving/mock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ui.cli_plan import DEFAULT_CONFIG, EXIT_USAGE

EXIT_FAILED = 1
HOST = "127.0.0.1"


def register(app: typer.Typer) -> None:
    """Add `mock` to the `framechat` command."""
    app.command("mock")(mock)


def mock(
    gpu: Annotated[str | None, typer.Option(help="Step times from this GPU's roofline, such as l4 or h100.")] = None,
    fit: Annotated[Path | None, typer.Option(help="Or from measured steps: a comparison's folder, or a log.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name; default: the config's model.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Weights a token passes; default: counted.")] = None,
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "--tp", help="GPUs that share the model.")] = 1,
    cache_tokens: Annotated[int | None, typer.Option(help="Size of the KV cache; default: worked out.")] = None,
    budget: Annotated[int | None, typer.Option(help="Step budget in tokens; default: the config's.")] = None,
    policy: Annotated[str, typer.Option(help="vllm, prefill-first, decode-first or fixed-splits.")] = "vllm",
    front_end_ms: Annotated[float, typer.Option(help="Time before the engine, a request.")] = 0.0,
    picture_ms: Annotated[float, typer.Option(help="Time before the engine, a picture.")] = 0.0,
    most_waiting: Annotated[int, typer.Option(help="Requests that may wait; more get HTTP 503.")] = 256,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8100,
    config: Annotated[
        Path, typer.Option("--config", "-c", help="Deployment file: the engine's settings.")
    ] = DEFAULT_CONFIG,
    items: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")] = None,
) -> None:
    """Serve the OpenAI-compatible API with simulated timing and made-up text: any GPU's behaviour without the GPU."""
    from pipeline.config import ConfigError, load_config  # noqa: PLC0415 - keeps `--help` quick
    from serving.command import ServerError  # noqa: PLC0415
    from serving.server import check_port  # noqa: PLC0415
    from ui.plan_engine import EngineOptions  # noqa: PLC0415
    from ui.plan_mock import mock_settings, serve_mock  # noqa: PLC0415

    try:
        if most_waiting < 1:
            raise ValueError(f"--most-waiting is {most_waiting}, allowed: 1 or more")
        settings = mock_settings(
            EngineOptions(fit, gpu, model, parameters, tensor_parallel, cache_tokens),
            load_config(config, overrides=list(items or [])).serving.server,
            budget=budget,
            policy=policy,
            front_end_ms=front_end_ms,
            picture_ms=picture_ms,
            most_waiting=most_waiting,
        )
    except (ValueError, OSError, ConfigError) as error:
        typer.secho(f"framechat: {' '.join(str(error).split())}", fg=typer.colors.RED, err=True)
        raise typer.Exit(EXIT_USAGE) from None
    try:
        check_port(HOST, port, "--port")
    except ServerError as error:
        typer.secho(f"framechat: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(EXIT_FAILED) from None
    serve_mock(settings, HOST, port)

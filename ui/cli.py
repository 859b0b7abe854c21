"""The `framechat` command.

Exit codes: 0 done; 1 a part failed or the main job cannot run; 2 wrong usage, configuration or input; 3 the model
server could not be reached; 130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.config import Config, ConfigError, load_config
from ui import cli_compare, cli_mock, cli_plan

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130
DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "sample.yaml"

app = typer.Typer(
    name="framechat",
    help="Describe the people a camera sees, and chat, on one vLLM server, with the latency of both in view.",
    epilog="Start with `framechat up`. Exit codes: 0 done, 1 a part failed, 2 wrong usage or configuration, "
    "3 model server unreachable, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path,
    typer.Option("--config", "-c", help="Deployment file (see configs/).", show_default="configs/sample.yaml"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. detect.rate_hz=10. Repeatable."),
]
ServerUrlOption = Annotated[
    str | None,
    typer.Option("--server-url", help="Use this running OpenAI-compatible server instead of starting vLLM."),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        "-s",
        help="Camera index, URL, video, folder, picture or `sample`, in place of the configuration's cameras.",
    ),
]


def fail(message: str, code: int) -> typer.Exit:
    """Print a one-line error and return the exit to raise."""
    typer.secho(f"framechat: {message}", fg=typer.colors.RED, err=True)
    return typer.Exit(code)


def configured(
    path: Path, items: list[str] | None, *, source: str | None = None, server_url: str | None = None
) -> Config:
    """Load the configuration with the command line's overrides, or exit 2 with the reason."""
    overrides = list(items or [])
    if server_url is not None:
        overrides.append(f"serving.server.base_url={server_url}")
    try:
        config = load_config(path, overrides=overrides)
        if source is not None:
            config = config.with_source(source)
    except ConfigError as error:
        raise fail(str(error), EXIT_USAGE) from None
    return config


@app.command()
def up(
    config: ConfigOption = DEFAULT_CONFIG,
    source: SourceOption = None,
    server_url: ServerUrlOption = None,
    items: SetOption = None,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Do not start the page.")] = False,
) -> None:
    """Start everything: model server, camera pipeline and page. Ctrl-C stops it all."""
    from ui.supervisor import run_everything  # noqa: PLC0415 - keeps `--help` quick

    settings = configured(config, items, source=source, server_url=server_url)
    raise typer.Exit(run_everything(settings, with_ui=not no_ui))


@app.command()
def serve(config: ConfigOption = DEFAULT_CONFIG, items: SetOption = None) -> None:
    """Start only the model server."""
    from ui.supervisor import run_server  # noqa: PLC0415

    raise typer.Exit(run_server(configured(config, items)))


@app.command()
def watch(
    source: Annotated[str, typer.Argument(help="Camera index, URL, video, folder or picture; `sample`.")],
    config: ConfigOption = DEFAULT_CONFIG,
    server_url: ServerUrlOption = None,
    items: SetOption = None,
    jsonl: Annotated[Path | None, typer.Option("--jsonl", help="Write one JSON object a description here.")] = None,
    as_fast_as_possible: Annotated[bool, typer.Option(help="Play files without pacing.")] = False,
) -> None:
    """Describe the people in SOURCE without a page: one line a description."""
    from pipeline.watch import run_watch  # noqa: PLC0415

    more = [*(items or []), *(["source.as_fast_as_possible=true"] if as_fast_as_possible else [])]
    raise typer.Exit(run_watch(configured(config, more, source=source, server_url=server_url), jsonl=jsonl))


@app.command()
def service(config: ConfigOption = DEFAULT_CONFIG, source: SourceOption = None, items: SetOption = None) -> None:
    """Start only the camera pipeline and its HTTP API."""
    from pipeline.service import run  # noqa: PLC0415

    raise typer.Exit(run(configured(config, items, source=source)))


@app.command("ui")
def page(config: ConfigOption = DEFAULT_CONFIG, items: SetOption = None) -> None:
    """Start only the page; it reads the pipeline's HTTP API."""
    from ui.supervisor import run_page  # noqa: PLC0415

    raise typer.Exit(run_page(configured(config, items)))


@app.command()
def chat(
    config: ConfigOption = DEFAULT_CONFIG,
    server_url: ServerUrlOption = None,
    items: SetOption = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask once and leave.")] = None,
) -> None:
    """Chat in the terminal; after each answer its TTFT and ITL."""
    from ui.terminal_chat import run_chat  # noqa: PLC0415

    raise typer.Exit(run_chat(configured(config, items, server_url=server_url), message=message))


@app.command()
def doctor(config: ConfigOption = DEFAULT_CONFIG, items: SetOption = None) -> None:
    """Say what is installed, what works, what is missing and how to mend it."""
    from ui.doctor import run_doctor  # noqa: PLC0415

    raise typer.Exit(run_doctor(configured(config, items)))


cli_plan.register(app)
cli_mock.register(app)
cli_compare.register(app)


def main() -> None:
    """Entry point; Ctrl-C ends with 130 and no traceback."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()

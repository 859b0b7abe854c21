"""The command `framechat compare`: its options; what it does is in ui/compare_run.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

EXIT_USAGE = 2
_CONFIGS = Path(__file__).parent.parent / "configs"
DEFAULT_CONFIG = _CONFIGS / "sample.yaml"
DEFAULT_LOAD = _CONFIGS / "load-cpu.yaml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


def register(app: typer.Typer) -> None:
    """Add the command to `framechat`."""
    app.command("compare")(compare)


def compare(
    budgets: Annotated[str | None, typer.Option(help="max_num_batched_tokens, with commas; a restart each.")] = None,
    step_budgets: Annotated[
        str | None, typer.Option(help="Tokens of one step, with commas; moved in the running server.")
    ] = None,
    variants: Annotated[Path | None, typer.Option(help="YAML file: name: {setting of serving.server: value}.")] = None,
    load: Annotated[
        Path, typer.Option("--load", help="The load: a YAML file.", show_default="configs/load-cpu.yaml")
    ] = DEFAULT_LOAD,
    rounds: Annotated[
        int | None, typer.Option("--rounds", "--blocks", min=1, max=1000, help="Blocks an arm.", show_default="10")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Instead of --rounds: at least so many requests a class and arm.")
    ] = None,
    block_s: Annotated[
        float | None, typer.Option(min=1, max=86400, help="Length of a block; default: the load's.")
    ] = None,
    warm_up_s: Annotated[
        float | None, typer.Option(min=0, help="Not counted at a block's start; default: a sixth of it, at most 10.")
    ] = None,
    drain_s: Annotated[float, typer.Option(min=1, max=3600, help="For a block's last answers, at most.")] = 30.0,
    rounds_per_start: Annotated[
        int, typer.Option(min=1, max=1000, help="Rounds on one server before the next is started.")
    ] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Of arrivals, lengths, order; default: the load's.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Arrivals from a requests.parquet or a `watch --jsonl` file.")
    ] = None,
    pictures: Annotated[
        str, typer.Option(help="sample, sample-photos, a video, folder or picture, or a `watch --jsonl` file.")
    ] = "sample",
    cache_friendly: Annotated[bool, typer.Option("--cache-friendly", help="Same texts and pictures again.")] = False,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Cap on requests at once; reported.")] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Instead: the highest camera rate that chat's ITL p99 stands.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="Of the result's folder; default: date and time.")] = None,
    resume: Annotated[str | None, typer.Option(metavar="NAME", help="Go on with a comparison.")] = None,
    redraw: Annotated[Path | None, typer.Option("--from", metavar="DIR", help="Only draw its report again.")] = None,
    server_url: Annotated[str | None, typer.Option(help="Load this running server; nothing is restarted.")] = None,
    server_folder: Annotated[
        Path | None, typer.Option(help="Its run folder, if it is ours: for its step budget and step records.")
    ] = None,
    config: Annotated[
        Path, typer.Option("--config", "-c", help="Deployment file.", show_default="configs/sample.yaml")
    ] = DEFAULT_CONFIG,
    items: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")] = None,
) -> None:
    """Run the same mixed load against token budgets and other settings, and say what each costs whom."""
    from pipeline.config import ConfigError, load_config  # noqa: PLC0415 - keeps `--help` quick
    from serving.compare.tables import ComparisonError  # noqa: PLC0415
    from ui.compare_run import CompareOptions, run_compare  # noqa: PLC0415

    try:
        options = CompareOptions(
            budgets=_numbers("--budgets", budgets),
            step_budgets=_numbers("--step-budgets", step_budgets),
            variants=variants,
            load=load,
            rounds=rounds,
            requests=requests,
            block_s=block_s,
            warm_up_s=warm_up_s,
            drain_s=drain_s,
            rounds_per_start=rounds_per_start,
            seed=seed,
            replay=replay,
            pictures=pictures,
            cache_friendly=cache_friendly,
            max_in_flight=max_in_flight,
            find_capacity=find_capacity,
            name=_name("--name", name),
            resume=_name("--resume", resume),
            redraw=redraw,
            server_folder=server_folder,
            command=_shown(sys.argv),
        )
        more = [] if server_url is None else [f"serving.server.base_url={server_url}"]
        settings = load_config(config, overrides=[*(items or []), *more])
        code = run_compare(options, settings)
    except (ValueError, ComparisonError, OSError, ConfigError) as error:
        typer.secho(f"framechat: {' '.join(str(error).split())}", fg=typer.colors.RED, err=True)
        raise typer.Exit(EXIT_USAGE) from None
    raise typer.Exit(code)


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} is {text!r}, allowed: whole numbers with commas, such as 128,512") from None
    if min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise ValueError(f"{option} is {text!r}, allowed: 1 or more each, every one once")
    return numbers


def _name(option: str, text: str | None) -> str | None:
    if text is not None and not _NAME.fullmatch(text):
        raise ValueError(f"{option} is {text!r}, allowed: letters, digits, dots, dashes and underscores, at most 80")
    return text


def _shown(argv: list[str]) -> list[str]:
    """The command line for the record; the server's own variables may hold secrets."""
    shown = ["framechat", *argv[1:]]
    return [re.sub(r"(serving\.server\.env[^=]*)=.*", r"\1=***", item) for item in shown]

"""What `framechat compare` does: work out the arms and the plan, run it, show the table."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from pipeline.config import Config
from serving.compare.arms import (
    MAX_ROUNDS,
    budget_arms,
    check_arms,
    plan_blocks,
    read_variants,
    rounds_for,
    starts,
    step_budget_arms,
)
from serving.compare.bench import Bench, Means
from serving.compare.capacity import CapacitySearch, capacity_lines
from serving.compare.experiment import START_GUESS_S, Comparison, check_lengths, expected_s
from serving.compare.hosts import Host, OwnServer, RunningServer
from serving.compare.machine import machine_facts, versions
from serving.compare.plan import Arm, Experiment, Progress
from serving.compare.report import write_report
from serving.compare.summary import summarise
from serving.compare.tables import ComparisonError, read_experiment, read_results, write_json
from serving.config import ServingConfig
from serving.load.trace import read_trace
from serving.records import now_s
from serving.workload import Workload
from ui.compare_pictures import load_pictures
from ui.compare_table import show_summary
from ui.plan_simulate import read_workload

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
DEFAULT_ROUNDS = 10
_WIDTH = 120
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What `framechat compare` was asked, as on its command line."""

    budgets: tuple[int, ...]
    step_budgets: tuple[int, ...]
    variants: Path | None
    load: Path
    rounds: int | None
    requests: int | None
    block_s: float | None
    warm_up_s: float | None
    drain_s: float
    rounds_per_start: int
    seed: int | None
    replay: Path | None
    pictures: str
    cache_friendly: bool
    max_in_flight: int | None
    find_capacity: bool
    name: str | None
    resume: str | None
    redraw: Path | None
    server_folder: Path | None
    command: list[str]


def run_compare(options: CompareOptions, config: Config) -> int:
    """Run, resume or redraw a comparison; the exit code.

    Raises:
        ValueError: (its kinds included, `ComparisonError` and `OSError`) What was asked cannot be done; the message is
            one line.
    """
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    if options.redraw is not None:
        results = read_results(options.redraw)
        summary = summarise(results)
        write_json(options.redraw / "summary.json", summary)
        write_report(results, summary)
        show_summary(console, summary, options.redraw)
        return 0
    parent = config.comparisons.folder.expanduser().absolute()
    if options.resume is not None:
        folder = parent / options.resume
        experiment = read_experiment(folder)
        resumed = Config.model_validate(experiment.config)
        # The server's own variables may hold secrets and are not kept: they come from the deployment file again.
        server = resumed.serving.server.model_copy(update={"env": config.serving.server.env})
        config = resumed.model_copy(update={"serving": resumed.serving.model_copy(update={"server": server})})
        options = replace(options, pictures=experiment.pictures)
    else:
        folder = parent / (options.name or time.strftime("%Y%m%d-%H%M%S"))
        if (folder / "experiment.json").exists():
            raise ComparisonError(f"{folder} is there already; --resume {folder.name}, or choose another --name")
        experiment = make_experiment(options, config, folder.name)
    return _run(options, config, experiment, folder, console)


def make_experiment(options: CompareOptions, config: Config, name: str) -> Experiment:
    """The comparison that was asked for.

    Raises:
        ValueError: It cannot be; the message is one line.
    """
    serving = config.serving
    workload = _workload(options, serving)
    arms = check_arms(_arms(options, serving), serving)
    seed = workload.seed
    warm_up_s = options.warm_up_s if options.warm_up_s is not None else min(10.0, workload.duration_s / 6)
    if warm_up_s >= workload.duration_s:
        raise ValueError(f"--warm-up-s is {warm_up_s:g}, allowed: less than a block ({workload.duration_s:g} s)")
    if options.rounds is not None and options.requests is not None:
        raise ValueError("--rounds and --requests are both given, allowed: one of them")
    trace = None if options.replay is None else read_trace(options.replay)
    rounds = options.rounds or DEFAULT_ROUNDS
    if options.requests is not None:
        rounds = rounds_for(workload, requests=options.requests, warm_up_s=warm_up_s, seed=seed, trace=trace)
    plan = plan_blocks(arms, serving, rounds=rounds, rounds_per_start=options.rounds_per_start, seed=seed)
    if options.find_capacity:
        plan = []  # what is run depends on what is found
    problem = None
    if serving.server.base_url is None:
        seeds = [seed * MAX_ROUNDS + round_ for round_ in range(rounds)]
        problem = check_lengths(workload, seeds, serving.server)
    if problem is not None:
        raise ValueError(problem)
    tree = config.model_dump(mode="json")
    tree["serving"]["server"]["env"] = {}
    by_name = {arm.name: arm for arm in arms}
    return Experiment(
        name=name,
        created_s=now_s(),
        command=options.command,
        config=tree,
        workload=workload,
        classes={name: serving.classes[name] for name in workload.classes},
        arms=arms,
        plan=plan,
        seed=seed,
        block_s=workload.duration_s,
        warm_up_s=warm_up_s,
        drain_s=options.drain_s,
        cache_friendly=options.cache_friendly,
        max_in_flight=options.max_in_flight,
        planned_s=expected_s(plan, by_name, serving, load_s=workload.duration_s, drain_s=options.drain_s),
        attached=serving.server.base_url is not None,
        steps=serving.server.scheduler_plugin
        and (serving.server.base_url is None or options.server_folder is not None),
        pictures=options.pictures,
        replay=None if options.replay is None else str(options.replay),
        notes=_notes(arms, serving),
        versions=versions(),
        machine=machine_facts(),
    )


def _workload(options: CompareOptions, serving: ServingConfig) -> Workload:
    workload = read_workload(options.load)
    unknown = sorted(set(workload.classes) - set(serving.classes))
    if unknown:
        raise ValueError(
            f"{options.load.name} has class {', '.join(unknown)}, allowed: those of serving.classes "
            f"({', '.join(serving.classes)})"
        )
    changes: dict[str, object] = {}
    if options.block_s is not None:
        changes["duration_s"] = options.block_s
    if options.seed is not None:
        changes["seed"] = options.seed
    return workload.model_copy(update=changes)


def _arms(options: CompareOptions, serving: ServingConfig) -> list[Arm]:
    attached = serving.server.base_url is not None
    arms = [*budget_arms(options.budgets), *step_budget_arms(options.step_budgets, attached=attached)]
    if options.variants is not None:
        arms += read_variants(options.variants)
    if not arms and attached:
        arms = [Arm(name="as it runs", kind="variant")]
    return arms


def _notes(arms: list[Arm], serving: ServingConfig) -> list[str]:
    notes = []
    threshold = serving.server.long_prefill_token_threshold
    if threshold and serving.server.base_url is None and any(arm.kind != "variant" for arm in arms):
        notes.append(
            f"the deployment's long_prefill_token_threshold ({threshold}) is off in the budget arms, for it would hide "
            "what the budget does; compare it as a variant"
        )
    if serving.server.base_url is not None:
        notes.append("the server was running already and is not ours to restart: its other settings are as they were")
    return notes


def _run(options: CompareOptions, config: Config, experiment: Experiment, folder: Path, console: Console) -> int:
    serving = config.serving
    pictured = any(load.pictures is not None for load in experiment.workload.classes.values())
    key = os.environ.get(serving.server.api_key_env) or None
    host: Host
    if serving.server.base_url is None:
        host = OwnServer(folder / "servers")
    else:
        host = RunningServer(serving.server, api_key=key, folder=options.server_folder)
    means = Means(
        serving=serving,
        host=host,
        pictures=load_pictures(options.pictures) if pictured else None,
        picture_first=config.describe.picture_first,
        trace=None if experiment.replay is None else read_trace(Path(experiment.replay)),
        api_key=key,
    )
    if options.find_capacity:
        return _find_capacity(experiment, folder, means, console)
    _announce(console, experiment, folder, serving)
    comparison = Comparison(folder, experiment, means, on_progress=_Progress(console), on_block=write_report)
    summary = asyncio.run(_until_stopped(comparison.run()))
    interrupted = summary is None
    summary = summarise(comparison.results) if summary is None else summary
    show_summary(console, summary, folder)
    if interrupted:
        console.print(f"Interrupted; go on with: framechat compare --resume {folder.name}")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if all(arm.reason is not None for arm in comparison.experiment.arms) else 0


def _find_capacity(experiment: Experiment, folder: Path, means: Means, console: Console) -> int:
    search = CapacitySearch(
        folder, experiment, Bench(experiment, means), say=lambda line: console.print(line, soft_wrap=True)
    )
    write_json(folder / "experiment.json", experiment)
    console.print(f"Blocks of {experiment.block_s:g} s, about 6 to 8 of them an arm; results in {folder}")
    found = asyncio.run(_until_stopped(search.run()))
    for line in capacity_lines(search.found):
        console.print(line, soft_wrap=True)
    results = read_results(folder)
    write_report(results, summarise(results))
    if found is None:
        console.print(f"Interrupted; go on with: framechat compare --find-capacity --resume {folder.name}")
        return EXIT_INTERRUPTED
    return EXIT_FAILED if all(item.arm.reason is not None for item in found.arms) else 0


async def _until_stopped(work: Coroutine[Any, Any, _T]) -> _T | None:
    """Do it; None when Ctrl-C or SIGTERM ended it, which lets what is being written be finished."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _announce(console: Console, experiment: Experiment, folder: Path, serving: ServingConfig) -> None:
    running = [arm for arm in experiment.arms if arm.reason is None]
    arms, blocks = _counted(len(running), "arm"), _counted(len(experiment.plan), "block")
    console.print(f"{arms}, {blocks} of {experiment.block_s:g} s, in {folder}", soft_wrap=True)
    count = starts(experiment.plan, {arm.name: arm for arm in running}, serving)
    console.print(
        f"About {_duration(experiment.planned_s)}"
        + ("" if experiment.attached else f", {_counted(count, 'server start')} of about {START_GUESS_S:g} s among it")
    )
    for arm in experiment.arms:
        if arm.reason is not None:
            console.print(f"{arm.name} is refused: {arm.reason}", soft_wrap=True)
    for note in experiment.notes:
        console.print(note, soft_wrap=True)


class _Progress:
    """Prints a line where something changed, not one a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def __call__(self, progress: Progress) -> None:
        where = "" if progress.block is None else f"block {progress.blocks_done + 1}/{progress.blocks_total}, "
        arm = "" if progress.arm is None else f"{progress.arm}: "
        what = progress.message or progress.state
        line = f"{where}{arm}{what}"
        if line == self._last:
            return
        self._last = line
        left = "" if progress.remaining_s is None else f" ({_duration(progress.remaining_s)} left)"
        self._console.print(f"{line}{left}", soft_wrap=True)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 5 else f"{minutes} min {rest} s" if minutes else f"{rest} s"

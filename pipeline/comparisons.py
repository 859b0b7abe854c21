"""Comparisons of token budgets: the one that runs as a child of the service, and the past ones in their folder.

A comparison's figures are only worth something on a machine that does nothing else. So while one runs the product
stands still: cameras pause, descriptions wait, chat says why (:mod:`pipeline.maintenance`). Step budgets can be
compared on the running server, which keeps its other settings; everything else starts servers of its own, and then the
product's server is stopped and comes back afterwards, whatever becomes of the comparison. What runs is `framechat
compare` in a process of its own, the same as by hand: it can be resumed there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from pathlib import Path

import yaml

from pipeline.api_compare import ComparisonView, RunningComparison, StartComparison
from pipeline.childprocess import child_environment
from pipeline.config import ENV_PREFIX, Config
from pipeline.errors import ApiError
from pipeline.maintenance import Maintenance
from serving.compare.tables import ComparisonError, read_experiment, read_progress
from serving.process import GuardedProcess, describe_exit, tail
from serving.workload import Workload

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$")
_GRACE_S = 30.0
_LONGEST_S = 24 * 3600.0
_LOG_LINES = 40
_ERROR_MARK = "framechat: "
_LIVE_STATES = frozenset({"starting", "running", "draining"})
MOST_LISTED = 50
REPORT = "report.html"
SUMMARY = "summary.json"
CONFIG, LOAD, LOG = "config.yaml", "load.yaml", "log"


class Comparisons:
    """Starts, watches and lists comparisons. At most one runs. Belongs to one event loop."""

    def __init__(self, config: Config, maintenance: Maintenance) -> None:
        self._config = config
        self._maintenance = maintenance
        self._folder = config.comparisons.folder.expanduser().absolute()
        self._task: asyncio.Task[None] | None = None
        self._process: GuardedProcess | None = None
        self._stopped = False
        self._now = RunningComparison()

    @property
    def running(self) -> bool:
        """One is being prepared, runs, or is being cleared away."""
        return self._task is not None and not self._task.done()

    def why_not(self) -> str:
        """Why none can be started from here; empty when one can."""
        return self._maintenance.why_no_restart()

    def start(self, wanted: StartComparison) -> None:
        """Begin: pause the product, run the comparison, bring the product back.

        Raises:
            ApiError: Not possible here, one runs already, or the server is being changed.
        """
        refusal = self.why_not() or self._maintenance.why_not()
        if self.running:
            refusal = "a comparison runs already; stop it or wait for its end"
        if refusal:
            raise ApiError(409, refusal)
        _check(wanted, self._config)
        self._stopped = False
        name = time.strftime("%Y%m%d-%H%M%S")
        self._now = RunningComparison(phase="preparing", name=name)
        self._task = asyncio.get_running_loop().create_task(self._run(name, wanted))

    async def stop(self) -> None:
        """End the comparison that runs; its finished blocks stay, and `framechat compare --resume` goes on with it.

        Raises:
            ApiError: None runs.
        """
        if not self.running:
            raise ApiError(409, "no comparison runs")
        self._stopped = True
        if self._process is not None:
            await self._process.stop()

    async def close(self) -> None:
        """The service stops: so does the comparison."""
        if self._task is not None:
            self._stopped = True
            if self._process is not None:
                await self._process.stop()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def now(self) -> RunningComparison:
        """The comparison that runs, or how the last one of this service ended. Reads files: not for the event loop."""
        now = self._now
        comparison = None
        if now.name is not None:
            with contextlib.suppress(ApiError):
                comparison = self.view(now.name)
        return now.model_copy(update={"comparison": comparison, "change": self._maintenance.view})

    def all(self) -> list[ComparisonView]:
        """Those in the folder, the newest first, at most `MOST_LISTED`. Reads files."""
        found = []
        for path in sorted(self._folder.glob("*/experiment.json"), key=_age_key, reverse=True)[:MOST_LISTED]:
            with contextlib.suppress(ApiError):
                found.append(self.view(path.parent.name))
        return found

    def view(self, name: str) -> ComparisonView:
        """One comparison. Reads files.

        Raises:
            ApiError: There is none of that name, or it cannot be read.
        """
        folder = self._place(name)
        try:
            experiment = read_experiment(folder)
        except ComparisonError as error:
            raise ApiError(404, str(error)) from None
        progress = read_progress(folder)
        done = len(list(folder.glob("blocks/[0-9]*/block.json")))
        state: str = progress.state if progress is not None else "interrupted"
        if state in _LIVE_STATES and progress is not None and not _alive(progress.pid):
            state = "interrupted"
        if done >= len(experiment.plan):
            state = "done"
        kinds = list(dict.fromkeys(arm.kind for arm in experiment.arms))
        return ComparisonView(
            name=name,
            created_s=experiment.created_s,
            state=state,
            arms=[arm.name for arm in experiment.arms],
            kind=", ".join(kinds),
            blocks_done=done,
            blocks_total=len(experiment.plan),
            remaining_s=progress.remaining_s if progress is not None and state in _LIVE_STATES else None,
            message=progress.message if progress is not None else "",
            has_report=(folder / REPORT).is_file(),
        )

    def file(self, name: str, which: str) -> Path | None:
        """A result's file; None while it is not there.

        Raises:
            ApiError: There is no comparison of that name.
        """
        path = self._place(name) / which
        return path if path.is_file() else None

    def _place(self, name: str) -> Path:
        if not _NAME.match(name):
            raise ApiError(404, f"comparison {name[:80]!r} does not exist; GET /comparisons lists them")
        folder = self._folder / name
        if not (folder / "experiment.json").is_file() or folder.resolve().parent != self._folder.resolve():
            raise ApiError(404, f"comparison {name!r} does not exist; GET /comparisons lists them")
        return folder

    # --- one run -----------------------------------------------------------------------------------------------------

    async def _run(self, name: str, wanted: StartComparison) -> None:
        folder = self._folder / name
        lent = wanted.kind == "running"
        detail = ""
        try:
            await self._maintenance.begin("a comparison of token budgets runs", stop_server=not lent)
            try:
                if not self._stopped:
                    self._now = RunningComparison(phase="running", name=name)
                    await asyncio.to_thread(self._write_setting, folder, wanted.workload)
                    code = await self._child(name, wanted, folder)
                    detail = "" if code == 0 or self._stopped else await self._why(code, folder)
                self._now = RunningComparison(phase="restoring", name=name)
            finally:
                await asyncio.shield(self._maintenance.end())
        except (ApiError, OSError) as error:
            detail = str(error)
        if self._stopped:
            self._now = RunningComparison(phase="ended", detail="stopped; its finished blocks are kept", name=name)
        else:
            self._now = RunningComparison(phase="failed" if detail else "ended", detail=detail, name=name)
        if not (folder / "experiment.json").is_file():
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _write_setting(self, folder: Path, workload: Workload | None) -> None:
        """The configuration in force and the load, as files for the child; without secrets."""
        folder.mkdir(parents=True, mode=0o700)
        tree = self._config.model_dump(mode="json")
        (folder / CONFIG).write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), "utf-8")
        if workload is not None:
            tree = workload.model_dump(mode="json")
            (folder / LOAD).write_text(yaml.safe_dump(tree, sort_keys=False), "utf-8")

    async def _child(self, name: str, wanted: StartComparison, folder: Path) -> int:
        env = {key: value for key, value in child_environment().items() if not key.startswith(ENV_PREFIX)}
        self._process = GuardedProcess(
            self.command(name, wanted, folder), log_path=folder / LOG, env=env, grace_s=_GRACE_S
        )
        await self._process.start()
        try:
            return await self._process.wait()
        finally:
            await asyncio.shield(self._process.stop())
            self._process = None

    def command(self, name: str, wanted: StartComparison, folder: Path) -> list[str]:
        """What is run, as one would by hand."""
        option = "--budgets" if wanted.kind == "budgets" else "--step-budgets"
        command = [sys.executable, "-m", "ui.cli", "compare", option, ",".join(str(item) for item in wanted.budgets)]
        command += ["--config", str(folder / CONFIG), "--name", name]
        command += ["--block-s", f"{wanted.block_s:g}", "--rounds", str(wanted.rounds)]
        if wanted.workload is not None:
            command += ["--load", str(folder / LOAD)]
        if wanted.kind == "running":
            command += ["--server-url", self._config.serving.server.endpoint]
            command += ["--server-folder", str(self._maintenance.run_folder)]
        return command

    async def _why(self, code: int, folder: Path) -> str:
        """Why the child failed: its own error line, or why every arm was refused."""
        lines = await asyncio.to_thread(tail, folder / LOG, _LOG_LINES)
        said = [line.removeprefix(_ERROR_MARK) for line in lines if line.startswith(_ERROR_MARK)]
        with contextlib.suppress(ComparisonError):
            said += [f"{arm.name} is refused: {arm.reason}" for arm in read_experiment(folder).arms if arm.reason]
        return f"the comparison {describe_exit(code)}" + (f": {said[0][:300]}" if said else "")


def _check(wanted: StartComparison, config: Config) -> None:
    """What can be refused before anything stops."""
    if len(set(wanted.budgets)) != len(wanted.budgets):
        raise ApiError(422, f"budgets are {wanted.budgets}, allowed: every budget once")
    least = config.serving.server.max_num_seqs
    if min(wanted.budgets) < least:
        raise ApiError(
            422,
            f"budgets hold {min(wanted.budgets)}, allowed: at least max_num_seqs ({least}), for every running sequence "
            "may need one token of each step",
        )
    load_s = len(wanted.budgets) * wanted.rounds * wanted.block_s
    if load_s > _LONGEST_S:
        raise ApiError(
            422, f"budgets x rounds x block_s is {load_s / 3600:.0f} h of load, allowed: {_LONGEST_S / 3600:.0f} h"
        )
    if wanted.workload is not None:
        unknown = sorted(set(wanted.workload.classes) - set(config.serving.classes))
        if unknown:
            known = ", ".join(config.serving.classes)
            raise ApiError(422, f"workload.classes holds {', '.join(unknown)}, allowed: {known}")


def _alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _age_key(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0

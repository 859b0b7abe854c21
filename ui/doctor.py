"""`framechat doctor`: what is installed, what works, what is missing and how to mend it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.addresses import mask_source
from pipeline.config import Config
from ui import checks_deployment as deployment
from ui import checks_environment as environment
from ui import checks_machine as machine
from ui.findings import Finding, Level, missing

Check = Callable[[Config], list[Finding]]
CHECKS: tuple[Check, ...] = (
    machine.check_python,
    machine.check_cpu,
    machine.check_gpu,
    environment.check_app,
    environment.check_opencv,
    environment.check_server,
    environment.check_preload,
    deployment.check_attached_server,
    deployment.check_model,
    deployment.check_detector,
    deployment.check_cameras,
    deployment.check_ports,
    machine.check_disk,
)
_MAX_WHY_CHARS = 200
_STYLE = {Level.OK: "green", Level.NOTE: "yellow", Level.MISSING: "bold red"}


def examine(config: Config, checks: Sequence[Check]) -> list[Finding]:
    """Every check's findings, in order. Most checks wait for a process or an answer, so they run side by side."""
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        return [finding for findings in pool.map(lambda check: _look(check, config), checks) for finding in findings]


def _look(check: Check, config: Config) -> list[Finding]:
    try:
        return check(config)
    except subprocess.TimeoutExpired as error:
        why = f"no answer within {error.timeout:g} s"
    except Exception as error:  # whatever it is, the other checks' findings are wanted
        why = mask_source(" ".join(f"{type(error).__name__}: {error}".split()))[:_MAX_WHY_CHARS]
    area = check.__name__.removeprefix("check_").replace("_", " ")
    return [missing(area, f"could not be checked ({why})", "make setup, then framechat doctor again")]


def run_doctor(config: Config, console: Console | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Print the table; 1 when something is missing without which this deployment cannot run, else 0."""
    console = console or Console()
    findings = examine(config, checks)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "what", "found, and how to mend it"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        style = _STYLE[finding.level]
        mend = f"\n[{style}]to mend:[/] {escape(finding.mend)}" if finding.mend else ""
        table.add_row(f"[{style}]{finding.level}[/]", escape(finding.area), escape(finding.text) + mend)
    console.print(table)
    absent = sum(finding.level is Level.MISSING for finding in findings)
    if absent:
        console.print(f"\n[bold red]{absent} missing: this deployment cannot run yet.[/]")
        return 1
    console.print("\n[green]This deployment can run: framechat up[/]")
    return 0

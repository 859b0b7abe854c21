"""Makes the virtual environments a deployment needs: `.venv` (the app) and `.venv-vllm` (the model server).

`make` calls this with the system's Python before anything is installed, so it uses the standard library alone. Both
environments are made side by side from the lock files of this folder. A stamp in each records what it was made from;
while that stays the same, nothing is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from environment import (
    ROOT,
    Environment,
    build,
    create,
    install,
    is_current,
    locked_requirement,
    read_stamp,
    starts_afresh,
)
from needs import (
    KEYS,
    SERVER_URL_ADVICE,
    SetupError,
    parse_arguments,
    read_needs,
    refuse_missing_libraries,
    refuse_missing_venv,
    server_refusal,
)

# What a fresh environment takes on disk, with room for pip's copies of the downloads. CPU: measured 2.2 and 3.3 GB
# installed. GPU: an estimate from the sizes of the CUDA wheels.
SIZE_BYTES = {
    ("app", "cpu"): 4 * 10**9,
    ("server", "cpu"): 6 * 10**9,
    ("app", "gpu"): 12 * 10**9,
    ("server", "gpu"): 20 * 10**9,
}


def _build_in_thread(environment: Environment) -> None:
    try:
        build(environment)
    except BaseException as error:
        environment.error = error


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line for each change and each half minute."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._began_s = self._said_s = time.monotonic()
        self._last = ""

    @property
    def elapsed_s(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began_s

    def show(self, what: str) -> None:
        """Show what is being done, and for how long."""
        line = f"setup: {self.elapsed_s:4.0f} s  {what}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="", flush=True)
        elif what != self._last or time.monotonic() - self._said_s > 30:
            print(line, flush=True)
            self._said_s = time.monotonic()
        self._last = what

    def end(self) -> None:
        """Leave the line that is rewritten."""
        if self._terminal and self._last:
            print()
        self._last = ""


def build_all(environments: list[Environment], progress: Progress) -> None:
    """Make `environments` side by side and show the progress; the first failure ends the others.

    Raises:
        SetupError: One failed.
    """
    threads = {one.name: threading.Thread(target=_build_in_thread, args=(one,), daemon=True) for one in environments}
    for thread in threads.values():
        thread.start()
    failed = None
    try:
        while failed is None and (busy := [one for one in environments if threads[one.name].is_alive()]):
            progress.show(", ".join(f"{one.name}: {one.doing}" for one in busy))
            threads[busy[0].name].join(0.25)
            failed = next((one.error for one in environments if one.error is not None), None)
    finally:
        for one in environments:
            one.stopped = True
            if one.process is not None and one.process.poll() is None:
                with contextlib.suppress(OSError):
                    one.process.terminate()
            threads[one.name].join(10)
    failed = failed or next((one.error for one in environments if one.error is not None), None)
    if failed is not None:
        raise failed


def _settings(app: Environment, config: Path) -> dict[str, object]:
    """The file's values of `KEYS`, read with the app environment's PyYAML, which is installed if need be."""
    if not config.is_file():
        raise SetupError(f"{config}: no such file; name a file in configs/")
    code = (
        "import functools, json, sys, yaml\n"
        "tree = yaml.safe_load(open(sys.argv[1], encoding='utf-8'))\n"
        "step = lambda node, key: node.get(key) if isinstance(node, dict) else None\n"
        "print(json.dumps({key: functools.reduce(step, key.split('.'), tree) for key in sys.argv[2:]}, default=str))"
    )

    def ask() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(app.python), "-c", code, str(config), *KEYS], capture_output=True, text=True, check=False, timeout=60
        )

    afresh = starts_afresh(app)
    if afresh or "No module named 'yaml'" in (answer := ask()).stderr:
        if afresh:
            refuse_missing_libraries()
            create(app)
        lock = app.lock.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            only = Path(folder) / "pyyaml.txt"
            only.write_text(locked_requirement(lock, "pyyaml"), encoding="utf-8")
            app.doing = "installing PyYAML"
            install(app, "--require-hashes", "-r", only)
        answer = ask()
    if answer.returncode != 0:
        raise SetupError(f"{config}: is not YAML ({answer.stderr.strip().splitlines()[-1]})")
    return dict(json.loads(answer.stdout))


def _refuse_low_disk(environments: list[Environment]) -> None:
    fresh = [one for one in environments if not one.python.exists() or starts_afresh(one)]
    needed = sum(SIZE_BYTES[one.name, one.device] for one in fresh)
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        raise SetupError(
            f"{free / 1e9:.1f} GB free in {ROOT}, but the {' and '.join(one.name for one in fresh)} environment needs "
            f"about {needed / 1e9:.0f} GB; free some, or move the project to a larger disk"
        )


def _wanted(options: argparse.Namespace) -> list[Environment]:
    """The environments that the deployment needs, whatever is there already."""
    app = Environment("app", ROOT / ".venv", "cpu")
    # The CUDA build of torch computes on a CPU too: an app environment that holds it serves both.
    if read_stamp(app.folder).get("device") == "gpu":
        app.device = "gpu"
    if options.app_only:
        return [app]
    arguments = parse_arguments(os.environ.get("FRAMECHAT_ARGUMENTS", "") if options.to_run else "")
    needs = read_needs(_settings(app, arguments.config or options.config), arguments, os.environ)
    if needs.detector_device == "gpu":
        app.device = "gpu"
    if needs.external_server:
        return [app]
    refusal = server_refusal(platform.system(), platform.machine())
    if refusal is None:
        server = Environment("server", ROOT / ".venv-vllm", needs.device)
        if options.to_test:  # what is there is tested; tests/integration/served.py asks for the same device
            server.device = read_stamp(server.folder).get("device", server.device)
        return [app, server]
    if options.to_run:
        raise SetupError(f"{refusal}; {SERVER_URL_ADVICE}")
    print(f"setup: {refusal}: installing the app alone; {SERVER_URL_ADVICE}")
    return [app]


def _prepare(options: argparse.Namespace, progress: Progress) -> None:
    refuse_missing_venv()
    missing = [one for one in _wanted(options) if not is_current(one)]
    if not missing:
        return
    refuse_missing_libraries()
    _refuse_low_disk(missing)
    build_all(missing, progress)
    progress.end()
    plural = "s" if len(missing) > 1 else ""
    names = " and ".join(one.name for one in missing)
    print(f"setup: {names} environment{plural} ready in {progress.elapsed_s:.0f} s", flush=True)


def main() -> int:
    """Entry point: 0 done, 1 with one line on standard error, 130 interrupted."""
    parser = argparse.ArgumentParser(description="Make the virtual environments that a deployment needs.")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "sample.yaml", help="deployment file")
    parser.add_argument("--app-only", action="store_true", help="no model server, whatever the deployment says")
    parser.add_argument("--to-run", action="store_true", help="the deployment is started next: it must be possible")
    parser.add_argument("--to-test", action="store_true", help="keep the model server's build that is there")
    options = parser.parse_args()
    progress = Progress()
    try:
        _prepare(options, progress)
    except SetupError as error:
        progress.end()
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        progress.end()
        print(f"setup: {error.strerror or error}: {error.filename or ROOT}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.end()
        print("setup: interrupted; the next make goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

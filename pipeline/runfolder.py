"""One folder a run: the logs of its processes, the configuration in force, the model server's state."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from pipeline.config import Config, ConfigError

KEPT_RUNS = 20
MODEL_SERVER_LOG = "model-server.log"
_CONFIG_NAME = "config.yaml"
_LATEST = "latest"
_LOCK_NAME = ".lock"
_held: list[FileLock] = []  # those of this process's run folders


def make_run_folder(config: Config) -> Path:
    """A new folder `<run_folder>/<date-time>`, which `<run_folder>/latest` points to; older ones are thinned out.

    Raises:
        ConfigError: It cannot be made.
    """
    parent = config.run_folder.expanduser().absolute()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(100):
            folder = parent / (stamp if number == 0 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)  # logs may quote what people typed
                break
        else:
            raise FileExistsError(17, "name is taken")
        _hold(folder)
        link = parent / f".{_LATEST}.{os.getpid()}"
        link.symlink_to(folder.name)
        link.replace(parent / _LATEST)
    except OSError as error:
        raise ConfigError(f"run_folder {parent}: cannot be written ({error.strerror}); set run_folder") from error
    _thin_out(parent)
    return folder


def _hold(folder: Path) -> None:
    """Lock it until this process ends in whatever way."""
    lock = FileLock(folder / _LOCK_NAME)
    with contextlib.suppress(NotImplementedError, OSError):  # a file system without locks
        lock.acquire()
        _held.append(lock)


def _in_use(folder: Path) -> bool:
    """Whether the run goes on: many short ones may have begun since a long one did."""
    try:
        with FileLock(folder / _LOCK_NAME, timeout=0):
            return False
    except Timeout:
        return True
    except (NotImplementedError, OSError):  # a file system without locks
        return False


def _thin_out(parent: Path) -> None:
    """Keep the newest runs, and those that go on; names sort by time."""
    runs = sorted(path for path in parent.glob("[0-9]*-[0-9]*") if (path / _CONFIG_NAME).is_file())
    for old in runs[:-KEPT_RUNS]:
        if not _in_use(old):
            shutil.rmtree(old, ignore_errors=True)


def write_config(config: Config, folder: Path) -> Path:
    """Write the configuration in force, overrides included, for the other processes of this run.

    Secrets are named in the configuration (`api_key_env`, `password_env`), not held by it. Only `serving.server.env`
    may hold some, and nobody but the model server needs it: its values are left out.

    Raises:
        ConfigError: It cannot be written.
    """
    tree: dict[str, Any] = config.model_dump(mode="json")
    tree["serving"]["server"]["env"] = {}
    path = folder / _CONFIG_NAME
    try:
        with path.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            yaml.safe_dump(tree, file, sort_keys=False, allow_unicode=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); set run_folder") from error
    return path

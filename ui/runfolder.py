"""One folder a run: the logs of its processes, the configuration in force, the model server's state."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import Config, ConfigError

KEPT_RUNS = 20
_CONFIG_NAME = "config.yaml"
_LATEST = "latest"


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
        link = parent / f".{_LATEST}.{os.getpid()}"
        link.symlink_to(folder.name)
        link.replace(parent / _LATEST)
    except OSError as error:
        raise ConfigError(f"run_folder {parent}: cannot be written ({error.strerror}); set run_folder") from error
    _thin_out(parent)
    return folder


def _thin_out(parent: Path) -> None:
    """Keep the newest runs; names sort by time."""
    runs = sorted(path for path in parent.glob("[0-9]*-[0-9]*") if (path / _CONFIG_NAME).is_file())
    for old in runs[:-KEPT_RUNS]:
        shutil.rmtree(old, ignore_errors=True)


def write_config(config: Config, folder: Path) -> Path:
    """Write the configuration in force, overrides included, for the other processes of this run.

    Secrets are named in the configuration (`api_key_env`, `password_env`), not held by it. Only `serving.server.env`
    may hold some, and nobody but the model server needs it: its values are left out.
    """
    tree: dict[str, Any] = config.model_dump(mode="json")
    tree["serving"]["server"]["env"] = {}
    path = folder / _CONFIG_NAME
    with path.open("w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        yaml.safe_dump(tree, file, sort_keys=False, allow_unicode=True)
    return path

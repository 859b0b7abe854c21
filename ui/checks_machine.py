"""The doctor's checks of the machine: Python, processor, GPU, disk."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from pipeline.config import Config
from samples.vlm import cache_folder
from serving.config import Device
from ui.findings import Finding, last_line, missing, note, ok

SUPPORTED = ((3, 11), (3, 14))
NEEDED_FREE_BYTES = 10**9  # a run's log, store and the sample model
_SERVER_ELSEWHERE = "use a server elsewhere: framechat up --server-url http://HOST:8000/v1"


def check_python(_config: Config) -> list[Finding]:
    """The Python that runs this, which is the app environment's."""
    version = platform.python_version()
    if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
        return [missing("python", version, "allowed: 3.11 to 3.14; make clean setup PYTHON=python3.12")]
    if sys.prefix == sys.base_prefix:
        return [note("python", f"{version}, outside a virtual environment", "make setup, then .venv/bin/framechat")]
    return [ok("python", f"{version} in {sys.prefix}")]


def cpu_flags(cpuinfo: str) -> set[str]:
    """The instruction sets in the text of /proc/cpuinfo (x86 says flags, ARM says Features)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def judge_cpu(machine: str, flags: set[str], *, serves_on_cpu: bool) -> Finding:
    """Whether vLLM's CPU build can run here. `flags`: see `cpu_flags`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    text = (
        f"{machine}, {cores} cores, {' '.join(flag for flag in known if flag in flags) or 'no vector extensions known'}"
    )
    if not serves_on_cpu or machine not in ("x86_64", "AMD64") or "avx512f" in flags:
        return ok("cpu", text)
    if "avx2" in flags:
        return note("cpu", f"{text}; no AVX-512, so the model is slower", "a CPU with AVX-512, or a GPU")
    return missing("cpu", f"{text}; vLLM's CPU build needs AVX2 or AVX-512", _SERVER_ELSEWHERE)


def check_cpu(config: Config) -> list[Finding]:
    """Cores and instruction sets."""
    server = config.serving.server
    serves_on_cpu = server.base_url is None and server.device is Device.CPU
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [ok("cpu", f"{platform.machine()}, {os.cpu_count()} cores")]
    return [judge_cpu(platform.machine(), cpu_flags(text), serves_on_cpu=serves_on_cpu)]


def check_gpu(config: Config) -> list[Finding]:
    """NVIDIA GPUs and their driver, by nvidia-smi."""
    server = config.serving.server
    wants = [
        name
        for name, wanted in (
            ("serving.server.device: gpu", server.base_url is None and server.device is Device.GPU),
            (f"detect.device: {config.detect.device}", config.detect.device not in ("cpu", "mps")),
        )
        if wanted
    ]
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        gpus = [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []
        why = "" if gpus else f"nvidia-smi: {last_line(answer.stdout + answer.stderr)}"
    except FileNotFoundError:
        gpus, why = [], "no nvidia-smi"
    except OSError as error:
        gpus, why = [], f"nvidia-smi cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        gpus, why = [], "nvidia-smi does not answer"
    if gpus:
        return [ok("gpu", f"{gpu} (memory, driver)") for gpu in gpus]
    if wants:
        return [
            missing(
                "gpu",
                f"none ({why}), but {' and '.join(wants)}",
                "install NVIDIA's driver, or a configuration for the CPU: --config configs/sample.yaml",
            )
        ]
    return [ok("gpu", "none, and none is asked for")]


def check_disk(config: Config) -> list[Finding]:
    """Room where descriptions, logs and the caches go."""
    findings = []
    seen: set[int] = set()
    for name, folder in (
        ("store", config.store.folder),
        ("runs", config.run_folder),
        ("cache", cache_folder()),
    ):
        place = _existing(folder.absolute())
        device = place.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(place).free
        text = f"{free / 1e9:.1f} GB free in {place} ({name})"
        if not os.access(place, os.W_OK):
            findings.append(missing("disk", f"{place} ({name}) cannot be written", f"chown or move {folder}"))
        elif free < NEEDED_FREE_BYTES:
            findings.append(missing("disk", text, f"free {NEEDED_FREE_BYTES / 1e9:.0f} GB"))
        elif free < config.store.max_bytes:
            findings.append(note("disk", f"{text}, less than store.max_bytes", "free some, or lower store.max_bytes"))
        else:
            findings.append(ok("disk", text))
    return findings


def _existing(folder: Path) -> Path:
    """The nearest folder on the way to `folder` that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder

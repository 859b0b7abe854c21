from __future__ import annotations

import pytest
from needs import (
    Needs,
    SetupError,
    parse_arguments,
    read_needs,
    refuse_missing_libraries,
    server_refusal,
)

DEVICE = "FRAMECHAT__SERVING__SERVER__DEVICE"
URL = "FRAMECHAT__SERVING__SERVER__BASE_URL"


@pytest.mark.parametrize(
    ("system", "machine", "named"),
    [
        pytest.param("Linux", "x86_64", None, id="linux-x86"),
        pytest.param("Linux", "aarch64", None, id="linux-arm"),
        pytest.param("Linux", "riscv64", "riscv64", id="linux-other"),
        pytest.param("Darwin", "arm64", "macOS", id="mac"),
        pytest.param("Windows", "AMD64", "Windows", id="windows"),
    ],
)
def test_where_vllm_has_a_build(system: str, machine: str, named: str | None) -> None:
    refusal = server_refusal(system, machine)
    assert (refusal is None) if named is None else (refusal is not None and named in refusal)


OURS, THEIRS, GPU = Needs("cpu", False, "cpu"), Needs("cpu", True, "cpu"), Needs("gpu", False, "gpu")


@pytest.mark.parametrize(
    ("settings", "arguments", "environ", "expected"),
    [
        pytest.param({}, "", {}, OURS, id="defaults"),
        pytest.param({"serving.server.device": "gpu"}, "", {}, GPU, id="file"),
        pytest.param({"serving.server.device": "gpu"}, "", {DEVICE: "cpu"}, OURS, id="environment"),
        pytest.param({}, "--set serving.server.device=gpu", {DEVICE: "cpu"}, GPU, id="set-wins"),
        pytest.param({"serving.server.base_url": "http://h/v1"}, "", {}, THEIRS, id="url-in-file"),
        pytest.param({}, "--server-url http://h/v1", {}, THEIRS, id="url-argument"),
        pytest.param({}, "--server-url=http://h/v1 --no-ui", {}, THEIRS, id="url-equals"),
        pytest.param({}, "", {URL: "http://h/v1"}, THEIRS, id="url-in-environment"),
        pytest.param(
            {"serving.server.base_url": "http://h/v1"},
            "--set serving.server.base_url=null",
            {},
            OURS,
            id="url-undone",
        ),
        pytest.param({"detect.device": "cuda:0"}, "", {}, Needs("cpu", False, "gpu"), id="detector-on-gpu"),
        pytest.param({"detect.device": 0}, "", {}, Needs("cpu", False, "gpu"), id="detector-on-gpu-by-number"),
        pytest.param({"detect.device": "mps"}, "", {}, OURS, id="detector-on-apple"),
        pytest.param({}, "--set detect.rate_hz=3 --no-ui -s 0", {}, OURS, id="other-arguments"),
    ],
)
def test_needs(settings: dict[str, object], arguments: str, environ: dict[str, str], expected: Needs) -> None:
    assert read_needs(settings, parse_arguments(arguments), environ) == expected


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(SetupError, match=r"serving\.server\.device = 'tpu', allowed: cpu, gpu"):
        read_needs({"serving.server.device": "tpu"}, parse_arguments(""), {})


def test_arguments_that_are_no_command_line_are_refused() -> None:
    with pytest.raises(SetupError, match="not a command line"):
        parse_arguments("--set 'open")


def test_a_missing_library_names_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")

    def load(name: str) -> None:
        if name == "libGL.so.1":
            raise OSError(name)

    with pytest.raises(SetupError, match=r"libGL\.so\.1; install: apt install libgl1 libglib2\.0-0"):
        refuse_missing_libraries(load)


def test_all_libraries_there_is_silent() -> None:
    refuse_missing_libraries(lambda _name: None)

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from serving.command import (
    ServerError,
    build_command,
    build_environment,
    cpu_dtype,
    default_cpu_threads,
    model_argument,
    preload_libraries,
    server_python,
)
from serving.config import Device, ServerConfig

PYTHON = Path("/venv/bin/python")


def value_of(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_every_setting_reaches_the_command_line() -> None:
    config = ServerConfig(
        host="127.0.0.2",
        port=8123,
        served_model_name="watcher",
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_num_scheduled_tokens=300,
        long_prefill_token_threshold=128,
        scheduling_policy="priority",
        dtype="float32",
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=2**30,
        max_images_per_request=3,
        enforce_eager=True,
        log_steps=True,
        extra_args=["--mm-processor-cache-gb", "1", "--max-num-queued-reqs=64"],
    )
    command = build_command(config, python=PYTHON, model="/models/m")
    assert command[:6] == [str(PYTHON), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m"]
    expected = {
        "--host": "127.0.0.2",
        "--port": "8123",
        "--served-model-name": "watcher",
        "--max-model-len": "2048",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "512",
        "--max-num-scheduled-tokens": "300",
        "--long-prefill-token-threshold": "128",
        "--scheduling-policy": "priority",
        "--dtype": "float32",
        "--gpu-memory-utilization": "0.9",
        "--kv-cache-memory-bytes": str(2**30),
    }
    assert {flag: value_of(command, flag) for flag in expected} == expected
    assert json.loads(value_of(command, "--limit-mm-per-prompt"))["image"] == 3
    assert {"--enable-chunked-prefill", "--enable-prefix-caching"} <= set(command)
    assert {"--enforce-eager", "--enable-logging-iteration-details"} <= set(command)
    assert command[-3:] == ["--mm-processor-cache-gb", "1", "--max-num-queued-reqs=64"]


def test_what_is_not_set_is_left_to_vllm() -> None:
    command = build_command(ServerConfig(device=Device.GPU), python=PYTHON, model="m")
    for flag in (
        "--max-num-scheduled-tokens",
        "--long-prefill-token-threshold",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
        "--enforce-eager",
        "--enable-logging-iteration-details",
    ):
        assert flag not in command, flag
    assert value_of(command, "--dtype") == "auto"


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        pytest.param({"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}, "--no-enable-chunked-prefill",
                     id="unchunked"),
        pytest.param({"enable_prefix_caching": False}, "--no-enable-prefix-caching", id="no prefix cache"),
    ],
)  # fmt: skip
def test_switched_off(setting: dict[str, object], flag: str) -> None:
    assert flag in build_command(ServerConfig.model_validate(setting), python=PYTHON, model="m")


def test_the_sample_model_has_its_name_and_others_their_own() -> None:
    assert value_of(build_command(ServerConfig(), python=PYTHON, model="/cache/x"), "--served-model-name") == "sample"
    other = build_command(ServerConfig(model="org/model"), python=PYTHON, model="org/model")
    assert "--served-model-name" not in other


def test_the_api_key_travels_in_the_environment_only() -> None:
    config = ServerConfig(api_key_env="MY_KEY")
    env = build_environment(config, python=PYTHON, environ={"MY_KEY": "s3cret"})
    assert env["VLLM_API_KEY"] == "s3cret"
    assert "MY_KEY" not in env
    assert "s3cret" not in " ".join(build_command(config, python=PYTHON, model="m"))
    assert "VLLM_API_KEY" not in build_environment(config, python=PYTHON, environ={})


def test_the_environment_of_the_app_stays_with_the_app() -> None:
    given = {"VIRTUAL_ENV": "/app", "PYTHONPATH": "/app", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"}
    env = build_environment(ServerConfig(env={"VLLM_LOGGING_LEVEL": "DEBUG"}), python=PYTHON, environ=given)
    assert "VIRTUAL_ENV" not in env
    assert "PYTHONPATH" not in env
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert (env["PATH"], env["VLLM_LOGGING_LEVEL"]) == ("/bin", "DEBUG")
    assert env["HF_HUB_OFFLINE"] == "1", "the sample model needs no hub"
    assert "HF_HUB_OFFLINE" not in build_environment(ServerConfig(model="org/m"), python=PYTHON, environ={})


def test_libiomp_of_the_server_environment_is_preloaded(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert library in preload_libraries(python)
    env = build_environment(ServerConfig(), python=python, environ={"LD_PRELOAD": "/mine.so"})
    assert env["LD_PRELOAD"].split(":")[0] == "/mine.so"
    assert str(library) in env["LD_PRELOAD"].split(":")
    gpu = build_environment(ServerConfig(device=Device.GPU), python=python, environ={})
    assert "LD_PRELOAD" not in gpu


@pytest.mark.parametrize(
    ("setting", "joined"),
    [
        pytest.param({}, True, id="CPU"),
        pytest.param({"device": "gpu"}, False, id="GPU"),
        pytest.param({"extra_args": ["--tensor-parallel-size", "2"]}, False, id="two workers"),
        pytest.param({"extra_args": ["--distributed_executor_backend=mp"]}, False, id="as the user wants"),
    ],
)
def test_engine_and_worker_in_one_process(setting: dict[str, object], joined: bool) -> None:
    config = ServerConfig.model_validate(setting | {"cpu_threads": 3})
    command = build_command(config, python=PYTHON, model="m")
    env = build_environment(config, python=PYTHON, environ={})
    assert ("uni" in command) is joined
    assert env.get("VLLM_ENABLE_V1_MULTIPROCESSING") == ("0" if joined else None)
    assert env.get("OMP_NUM_THREADS") == ("3" if joined else None)


def test_the_users_openmp_settings_win() -> None:
    env = build_environment(ServerConfig(), python=PYTHON, environ={"OMP_NUM_THREADS": "7"})
    assert env["OMP_NUM_THREADS"] == "7"
    env = build_environment(ServerConfig(env={"OMP_NUM_THREADS": "5"}), python=PYTHON, environ={"OMP_NUM_THREADS": "7"})
    assert env["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("cores", "threads"), [pytest.param(1, 1, id="one"), pytest.param(2, 2, id="two"), pytest.param(8, 7, id="eight")]
)
def test_default_cpu_threads(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert default_cpu_threads() == threads


@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        pytest.param("flags : fpu avx2 f16c", "auto", "float32", id="AVX2 only"),
        pytest.param("flags : fpu avx2 avx512f avx512_bf16", "auto", "auto", id="AVX-512 with bfloat16"),
        pytest.param("flags : fpu avx2 avx512f", "auto", "auto", id="AVX-512"),
        pytest.param("Features : fp asimd bf16", "auto", "auto", id="ARM"),
        pytest.param("flags : fpu avx2", "bfloat16", "bfloat16", id="asked for"),
    ],
)
def test_cpu_dtype(tmp_path: Path, flags: str, dtype: str, expected: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{flags}\n")
    assert cpu_dtype(dtype, cpuinfo=cpuinfo) == expected


def test_cpu_dtype_without_cpuinfo(tmp_path: Path) -> None:
    assert cpu_dtype("auto", cpuinfo=tmp_path / "none") == "auto"


def test_a_missing_server_environment_is_told_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="make setup"):
        server_python(ServerConfig(python=tmp_path / "bin" / "python"))


def test_a_virtual_environments_python_is_not_resolved(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(os.__file__)
    assert server_python(ServerConfig(python=link)) == link


def test_model_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_argument("mine") == str(tmp_path / "mine"), "vLLM runs elsewhere: a folder becomes absolute"
    assert model_argument("org/model") == "org/model"

"""What each deployment of configs/ would start: the resolved command, nothing run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config import load_config
from serving.command import build_command, build_environment

CONFIGS = Path(__file__).parents[3] / "configs"
COMMON = {
    "--host": "127.0.0.1",
    "--port": "8000",
    "--scheduling-policy": "fcfs",
    "--dtype": "auto",
    "--limit-mm-per-prompt": json.dumps({"image": 2, "video": 0}),
    "--enable-chunked-prefill": None,
    "--enable-prefix-caching": None,
    "--enable-prompt-tokens-details": None,
    "--disable-uvicorn-access-log": None,
}
ON_CPU = {"--kv-cache-memory-bytes": "1073741824", "--enforce-eager": None, "--distributed-executor-backend": "uni"}
QWEN = {
    "--model": "Qwen/Qwen3-VL-8B-Instruct",
    "--max-model-len": "16384",
    "--max-num-seqs": "64",
    "--max-num-batched-tokens": "2048",
    "--long-prefill-token-threshold": "1024",
    "--mm-processor-cache-gb": "4",
}
DEPLOYMENTS: dict[str, dict[str, str | None]] = {
    "sample": {
        **ON_CPU,
        "--model": "sample",
        "--served-model-name": "sample",
        "--max-model-len": "4096",
        "--max-num-seqs": "16",
        "--max-num-batched-tokens": "256",
        "--long-prefill-token-threshold": "96",
    },
    "smolvlm-cpu": {
        **ON_CPU,
        "--model": "HuggingFaceTB/SmolVLM-256M-Instruct",
        "--max-model-len": "4096",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "128",
        "--long-prefill-token-threshold": "64",
        "--mm-processor-kwargs": json.dumps({"size": {"longest_edge": 1024}}),
    },
    "gpu-qwen3-vl": {**QWEN, "--gpu-memory-utilization": "0.9"},
    "gpu-4-rtsp": {**QWEN, "--gpu-memory-utilization": "0.8"},
}


def flags_of(command: list[str]) -> dict[str, str | None]:
    """Each flag with its value; a flag given twice is an error."""
    found: dict[str, str | None] = {}
    words = iter(command)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            assert found, word
            last = list(found)[-1]
            assert found[last] is None, f"{last} has two values"
            found[last] = word
            continue
        assert name not in found, f"{name} is given twice"
        found[name] = value if equals else None
    return found


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_command_of_a_deployment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.command.cpu_dtype", lambda dtype: dtype)  # depends on the CPU
    server = load_config(CONFIGS / f"{name}.yaml", environ={}).serving.server
    command = build_command(server, python=Path("/venv/bin/python"), model=server.model)
    assert command[:4] == ["/venv/bin/python", "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert flags_of(command[4:]) == COMMON | DEPLOYMENTS[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("sample", {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, id="sample"),
        pytest.param("smolvlm-cpu", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, id="from a hub"),
        pytest.param("gpu-qwen3-vl", {}, id="one GPU"),
        pytest.param("gpu-4-rtsp", {}, id="four cameras"),
    ],
)
def test_the_environment_of_a_deployment(name: str, expected: dict[str, str]) -> None:
    server = load_config(CONFIGS / f"{name}.yaml", environ={}).serving.server
    env = build_environment(server, python=Path("/venv/bin/python"), environ={"FRAMECHAT_API_KEY": "k"})
    watched = ("HF_HUB_OFFLINE", "VLLM_ENABLE_V1_MULTIPROCESSING")
    assert {key: env[key] for key in watched if key in env} == expected
    assert env["VLLM_API_KEY"] == "k"
    assert "FRAMECHAT_API_KEY" not in env

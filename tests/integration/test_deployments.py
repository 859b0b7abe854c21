"""vLLM's own parser takes the command of every deployment, and makes of it what was meant."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pipeline.config import load_config
from samples.vlm import server_python
from serving.command import build_command
from tests.unit.serving.test_deployments import CONFIGS, DEPLOYMENTS

pytestmark = pytest.mark.integration

_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for command in json.load(sys.stdin):
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    validate_parsed_serve_args(options)
    names = ("model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
             "gpu_memory_utilization", "enforce_eager", "kv_cache_memory_bytes", "mm_processor_kwargs",
             "mm_processor_cache_gb", "enable_chunked_prefill")
    print(json.dumps({name: getattr(options, name) for name in names}))
"""


@pytest.fixture(scope="module")
def parsed() -> dict[str, dict[str, object]]:
    """What the parser makes of each deployment's command."""
    servers = {name: load_config(CONFIGS / f"{name}.yaml", environ={}).serving.server for name in DEPLOYMENTS}
    commands = [build_command(server, python=Path("python"), model=server.model)[4:] for server in servers.values()]
    done = subprocess.run(
        [str(server_python()), "-P", "-c", _PARSE],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(servers, lines, strict=True))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_vllm_understands_the_command(name: str, parsed: dict[str, dict[str, object]]) -> None:
    server = load_config(CONFIGS / f"{name}.yaml", environ={}).serving.server
    found = parsed[name]
    for key in ("model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold"):
        assert found[key] == getattr(server, key), key
    for key in ("enforce_eager", "enable_chunked_prefill", "kv_cache_memory_bytes"):
        assert found[key] == getattr(server, key), key
    if server.gpu_memory_utilization is not None:
        assert found["gpu_memory_utilization"] == server.gpu_memory_utilization
    if name == "smolvlm-cpu":
        assert found["mm_processor_kwargs"] == {"size": {"longest_edge": 1024}}
    if name.startswith("gpu"):
        assert found["mm_processor_cache_gb"] == 4

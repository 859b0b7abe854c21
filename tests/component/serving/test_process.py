"""Processes under their guard: nothing may outlive its starter, however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from serving.process import GuardedProcess, describe_exit, tail

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups and subreapers as Linux has them")

# A parent with a child in a session of its own that ignores SIGTERM: the hardest one to get rid of.
STUBBORN = """
import os, signal, subprocess, sys, time
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("child", os.getpid(), flush=True)
else:
    print("parent", os.getpid(), flush=True)
    subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def stubborn(tmp_path: Path) -> Path:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    return script


def pids_in(log: Path) -> dict[str, int]:
    pairs = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def started(log: Path, name: str) -> int:
    for _ in range(1000):
        if name in (pids := pids_in(log)):
            return pids[name]
        await asyncio.sleep(0.01)
    pytest.fail(f"did not start: {tail(log)}")


async def both(log: Path) -> dict[str, int]:
    return {name: await started(log, name) for name in ("parent", "child")}


async def all_gone(pids: list[int], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"left: {[pid for pid in pids if not gone(pid)]}"
        await asyncio.sleep(0.01)


async def test_stop_ends_descendants_in_other_sessions(stubborn: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = GuardedProcess([sys.executable, str(stubborn)], log_path=log, grace_s=0.2)
    await process.start()
    pids = await both(log)
    await process.stop()
    assert [name for name, pid in pids.items() if not gone(pid)] == []
    assert not process.running


async def test_a_killed_command_takes_its_children_along(stubborn: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = GuardedProcess([sys.executable, str(stubborn)], log_path=log, grace_s=0.2)
    await process.start()
    pids = await both(log)
    os.kill(pids["parent"], signal.SIGKILL)
    code = await asyncio.wait_for(process.wait(), 20)
    assert describe_exit(code) == "ended by SIGKILL"
    assert gone(pids["child"])


async def test_a_killed_guard_takes_its_command_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = GuardedProcess(
        [sys.executable, "-c", "import os, time; print('parent', os.getpid(), flush=True); time.sleep(600)"],
        log_path=log,
    )
    await process.start()
    parent = await started(log, "parent")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGKILL
    await all_gone([parent])


async def test_kill_9_of_the_starter_leaves_nothing(stubborn: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    starter = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from serving.process import GuardedProcess
        async def main():
            process = GuardedProcess([sys.executable, {str(stubborn)!r}], log_path=Path({str(log)!r}), grace_s=0.2)
            await process.start()
            await process.wait()
        asyncio.run(main())
    """)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", starter, cwd=Path(__file__).parents[3])
    try:
        pids = await both(log)
    finally:
        process.kill()
        await process.wait()
    await all_gone(list(pids.values()))


async def test_output_and_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "folder" / "log"
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    process = GuardedProcess([sys.executable, "-c", code], log_path=log)
    await process.start()
    assert await process.wait() == 3
    assert sorted(tail(log)) == ["err", "out"]


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = GuardedProcess(["/no/such/program"], log_path=log)
    await process.start()
    assert await process.wait() == 127
    assert tail(log) == ["/no/such/program: cannot be run (No such file or directory)"]


async def test_stop_before_start_and_twice(tmp_path: Path) -> None:
    process = GuardedProcess([sys.executable, "-c", "pass"], log_path=tmp_path / "log")
    await process.stop()
    await process.start()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.stop(), 20)
    await process.stop()
    assert not process.running


@pytest.mark.parametrize(
    ("code", "words"),
    [
        pytest.param(0, "ended with exit code 0", id="done"),
        pytest.param(2, "ended with exit code 2", id="usage"),
        pytest.param(137, "ended by SIGKILL", id="killed, through the guard"),
        pytest.param(-9, "ended by SIGKILL", id="killed"),
        pytest.param(128 + 200, "ended with exit code 328", id="no such signal"),
    ],
)
def test_describe_exit(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_tail_of_a_long_file_and_of_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_text("\n".join(f"line {number}\n" for number in range(50_000)))
    assert tail(log, 2) == ["line 49998", "line 49999"]

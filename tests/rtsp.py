"""A live RTSP camera on loopback for tests and measurements, where GStreamer's bindings are installed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.frame import Frame

SYSTEM_PYTHON = "/usr/bin/python3"
_SCRIPT = Path(__file__).parent / "rtsp_server.py"
_NEEDED = "import gi; gi.require_version('GstRtspServer', '1.0'); from gi.repository import GstRtspServer"


def missing() -> str:
    """What keeps the camera from being served; "" when nothing does."""
    if not Path(SYSTEM_PYTHON).exists():
        return f"no {SYSTEM_PYTHON}"
    tried = subprocess.run([SYSTEM_PYTHON, "-c", _NEEDED], capture_output=True, check=False)
    return (
        "" if tried.returncode == 0 else "apt-get install gir1.2-gst-rtsp-server-1.0 python3-gi gstreamer1.0-plugins-*"
    )


@contextlib.contextmanager
def rtsp_camera(
    *, port: int = 0, fps: int = 25, user: str | None = None, password: str = ""
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve; gives the address and the server's process."""
    login = ["--user", user, "--password-env", "RTSP_TEST_PASSWORD"] if user else []
    process = subprocess.Popen(
        [SYSTEM_PYTHON, str(_SCRIPT), "--port", str(port), "--fps", str(fps), *login],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RTSP_TEST_PASSWORD": password},
    )
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"the RTSP server did not start on port {port}")
        yield f"rtsp://127.0.0.1:{int(line)}/live", process
    finally:
        process.kill()
        process.communicate()


def age_ms(frame: Frame) -> float:
    """How long ago the server drew this picture: encoding, network, decoding and waiting are all inside."""
    made = 0
    for line in range(4):
        for bit in range(8):
            square = frame.image[line * 16 + 4 : line * 16 + 12, bit * 16 + 4 : bit * 16 + 12]
            made |= int(square.mean() > 127) << (line * 8 + bit)
    return float((int(time.monotonic() * 1000) - made) & 0xFFFFFFFF)

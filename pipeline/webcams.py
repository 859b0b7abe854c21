"""Which webcams this machine has."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from pipeline.api import Device

_VIDIOC_QUERYCAP = 0x80685600  # linux/videodev2.h: _IOR('V', 0, struct v4l2_capability), 104 bytes
_CAPTURE = 0x00000001 | 0x00001000  # V4L2_CAP_VIDEO_CAPTURE, V4L2_CAP_VIDEO_CAPTURE_MPLANE
_HAS_DEVICE_CAPS = 0x80000000


def list_webcams(system: Path = Path("/sys/class/video4linux"), devices: Path = Path("/dev")) -> list[Device]:
    """The cameras that give pictures, in order of index; Linux only, elsewhere an empty list.

    A camera often has a second device for its metadata: that one is left out. A device that may not be opened is
    listed when it is its camera's first.
    """
    found = []
    for entry in system.glob("video*") if system.is_dir() else ():
        number = re.fullmatch(r"video(\d+)", entry.name)
        if number is None:
            continue
        path = devices / entry.name
        captures = _captures(path)
        if captures is None:
            captures = _text(entry / "index") in ("", "0")
        if captures:
            found.append(Device(index=int(number.group(1)), path=str(path), name=_text(entry / "name") or entry.name))
    return sorted(found, key=lambda device: device.index)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _captures(path: Path) -> bool | None:
    """Whether the device says that it captures video; None when it cannot be asked."""
    import fcntl  # noqa: PLC0415 - not on every system

    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        answer = fcntl.ioctl(fd, _VIDIOC_QUERYCAP, bytes(104))
    except OSError:
        return None
    finally:
        os.close(fd)
    # driver[16] card[32] bus_info[32] version capabilities device_caps reserved[3]
    capabilities, device_caps = struct.unpack_from("=II", answer, 84)
    return bool((device_caps if capabilities & _HAS_DEVICE_CAPS else capabilities) & _CAPTURE)

"""Whether a source can work, as far as can be said without opening it."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.addresses import kind_of, mask_source
from pipeline.config import CameraConfig


def check_source(camera: CameraConfig) -> str | None:
    """Why this source cannot work, one line, as far as can be said without opening it; None when it may."""
    try:
        kind = kind_of(camera.source)
    except ValueError as error:
        return f"source {mask_source(camera.source)}: {error}"
    if kind in ("file", "pictures") and not Path(camera.source).exists():
        return f"source {camera.source}: no such file or folder"
    if camera.password_env and camera.password_env not in os.environ:
        return f"camera {camera.name}: the environment variable {camera.password_env} (password_env) is not set"
    if camera.password_env and kind != "url":
        return f"camera {camera.name}: password_env is for rtsp:// and http:// addresses only"
    return None

"""How reading one camera goes, as the reader's owner sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """How reading goes.

    Attributes:
        state: `connecting`, `live`, `lost` (will be tried again unless `finished`) or `ended`.
        detail: What went wrong or is waited for, one line, no credentials.
        finished: No further frame will come.
        failed: It finished because of an error, `detail`.
        frames: Frames published by the reader.
        dropped: Frames replaced by a newer one before anybody took them.
        damaged: Pictures skipped: undecodable, uniform, or too large.
        fps: Measured over the last seconds; None until two frames came.
        frame_age_p95_ms: From a frame's arrival to `wait_frame` handing it out; None until one was.
        reconnects: How often the reader was started again.
    """

    state: Literal["connecting", "live", "lost", "ended"]
    detail: str = ""
    finished: bool = False
    failed: bool = False
    frames: int = 0
    dropped: int = 0
    damaged: int = 0
    fps: float | None = None
    frame_age_p95_ms: float | None = None
    reconnects: int = 0
    width_px: int = 0
    height_px: int = 0

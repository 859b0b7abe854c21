"""The process that reads one camera: `python -m pipeline.reader_process FD`, settings on stdin, events on stdout.

It is its own process so that a read that hangs can be killed. It ends by itself when its stdin closes, that is, when
its parent is gone for whatever reason. Passwords come from its environment and never leave it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pipeline.addresses import mask_source
from pipeline.decode import (
    Damaged,
    DecodeError,
    Image,
    Item,
    MediaClock,
    Picture,
    Stream,
    is_uniform,
    one_line,
    pictures,
    turned,
    webcam,
)
from pipeline.sharedframes import SLOTS, SharedFrames

_ALIVE_EVERY_S = 0.5
_LATE_S = 0.5  # a paced file later than this starts counting anew instead of rushing
_LIVE_OPTIONS = {"fflags": "nobuffer", "flags": "low_delay"}
_WHITELIST = "http,https,httpproxy,tcp,udp,rtp,rtsp,rtsps,tls,crypto,srtp"


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """What the parent tells the process. `skip` pictures of a file have been seen already (it is a restart)."""

    kind: Literal["webcam", "url", "pictures", "file"]
    source: str
    username: str | None
    password_env: str | None
    rotate: int
    loop: bool
    every_frame: bool  # each frame waits until there is room; no pacing
    open_timeout_s: float
    read_timeout_s: float
    max_side_px: int
    picture_s: float
    first_index: int = 0
    first_scene: int = 0
    first_cut: int = 0
    media_base_s: float = 0.0
    skip: int = 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def address(settings: ReaderSettings, environ: dict[str, str]) -> str:
    """The URL with user name and password, percent-encoded; `{password}` in it stands for the password."""
    url = settings.source
    password = environ.get(settings.password_env, "") if settings.password_env else ""
    if "{password}" in url:
        return url.replace("{password}", quote(password, safe=""))
    if settings.username is None and not password:
        return url
    scheme, _, rest = url.partition("://")
    host = rest.split("/", 1)[0]
    if "@" in host:
        user, _, rest = rest.partition("@")
        user = settings.username or user
    else:
        user = settings.username or ""
    return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{rest}"


class OwnLog:
    """Our own words into the process's log, never an address's password. Libraries' words do not go there.

    Args:
        fd: The log, or what stands for it where there is none.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._secrets: tuple[str, ...] = ()

    def hide_password_of(self, settings: ReaderSettings, environ: Mapping[str, str]) -> None:
        """From now on, in whichever shape it is written."""
        password = environ.get(settings.password_env, "") if settings.password_env else ""
        self._secrets = (quote(password, safe=""), password) if password else ()

    def write(self, text: str) -> None:
        """Add lines; a log that cannot be written is no reason to stop."""
        text = mask_source(text)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        with contextlib.suppress(OSError):
            os.write(self._fd, f"{text.rstrip()}\n".encode(errors="replace"))


class Reader:
    """Publishes one source's pictures until it ends, fails, or the parent goes away."""

    def __init__(self, settings: ReaderSettings, frames: SharedFrames, emit: Callable[[dict[str, Any]], None]) -> None:
        self.settings = settings
        self.frames = frames
        self.emit = emit
        self.room = threading.Semaphore(SLOTS - 1)
        self._index = settings.first_index
        self._scene, self._cut = settings.first_scene, settings.first_cut  # see `Frame`
        self._pace_from: tuple[float, float] | None = None  # monotonic and media time that belong together
        self._shape: tuple[int, ...] | None = None
        self._alive_at = 0.0

    def run(self) -> None:
        """Read to the end.

        Raises:
            DecodeError: The source failed.
        """
        settings = self.settings
        if settings.kind == "webcam":
            items = webcam(int(settings.source) if settings.source.isdigit() else settings.source)
            self._opened(live=True, fps=None)
            self._publish_all(items, paced=False)
            return
        base, skip, first = settings.media_base_s, settings.skip, True
        while first or settings.loop:
            self._pace_from = None
            if not first:
                self._scene += 1
                self._cut += 1
            last, live = self._one_pass(base, skip, announce=first)
            if live:
                raise DecodeError("the stream ended")
            if last is None and not (first and skip):
                raise DecodeError("holds no picture that can be used")
            base, skip, first = (last if last is not None else base) + 0.04, 0, False

    def _one_pass(self, base_s: float, skip: int, *, announce: bool) -> tuple[float | None, bool]:
        """Play once; the media time of the last picture, and whether it turned out to be live."""
        settings = self.settings
        if settings.kind == "pictures":
            if announce:
                self._opened(live=False, fps=None)
            stills = pictures(Path(settings.source), picture_s=settings.picture_s, max_side_px=settings.max_side_px)
            return self._publish_all(stills, paced=True, base_s=base_s, skip=skip), False
        stream = self._stream()
        fps = stream.open()
        if announce:
            self._opened(live=stream.live, fps=fps)
        clock = MediaClock(fps)

        def items() -> Iterator[Item]:
            for found in stream.frames(time.monotonic):
                if isinstance(found, Damaged):
                    yield found
                else:
                    media = clock.next(found[1]) if stream.paced else None
                    yield Picture(found[0], media)

        try:
            return self._publish_all(items(), paced=stream.paced, base_s=base_s, skip=skip), stream.live
        finally:
            stream.close()

    def _stream(self) -> Stream:
        settings = self.settings
        network = settings.kind == "url"
        if network:
            url = address(settings, dict(os.environ))
            options = {**_LIVE_OPTIONS, "protocol_whitelist": _WHITELIST}
            if url.startswith("rtsp"):
                options["rtsp_transport"] = "tcp"
        else:
            url = f"file:{Path(settings.source).absolute()}"
            options = {"protocol_whitelist": "file"}
        return Stream(
            url,
            options,
            live=network,
            open_timeout_s=settings.open_timeout_s,
            read_timeout_s=settings.read_timeout_s,
            max_side_px=settings.max_side_px,
            threads="AUTO" if settings.every_frame else None,
        )

    def _opened(self, *, live: bool, fps: float | None) -> None:
        self.emit({"event": "open", "live": live, "declared_fps": fps})

    def _publish_all(self, items: Iterator[Item], *, paced: bool, base_s: float = 0.0, skip: int = 0) -> float | None:
        """Publish what comes; the media time of the last good picture, None when there was none."""
        last = None
        for number, item in enumerate(items, start=1):
            if number <= skip:
                if isinstance(item, Picture) and item.media_s is not None:
                    last = base_s + item.media_s
                self._alive(time.monotonic())
                continue
            if isinstance(item, Damaged):
                self._damaged(item.why, base_s, number)
                continue
            if is_uniform(item.image):
                self._damaged("uniform, nothing to see", base_s, number)
                continue
            media_s = base_s + item.media_s if item.media_s is not None else None
            if paced and media_s is not None and not self.settings.every_frame:
                self._wait_until_due(media_s)
            if self.settings.every_frame:
                while not self.room.acquire(timeout=_ALIVE_EVERY_S):
                    self.emit({"event": "alive"})
            self._publish(item, media_s, base_s, number)
            last = media_s if media_s is not None else 0.0
        return last

    def _damaged(self, why: str, base_s: float, number: int) -> None:
        self.emit({"event": "damaged", "why": why, "base_s": base_s, "number": number})

    def _alive(self, now: float) -> None:
        if now - self._alive_at > _ALIVE_EVERY_S:
            self._alive_at = now
            self.emit({"event": "alive"})

    def _wait_until_due(self, media_s: float) -> None:
        now = time.monotonic()
        if self._pace_from is None:
            self._pace_from = (now, media_s)
        due = self._pace_from[0] + media_s - self._pace_from[1]
        if now - due > _LATE_S:
            self._pace_from = (now, media_s)
            return
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(left, _ALIVE_EVERY_S))
            if left > _ALIVE_EVERY_S:
                self.emit({"event": "alive"})

    def _publish(self, item: Picture, media_s: float | None, base_s: float, number: int) -> None:
        arrived = time.monotonic()
        image: Image = turned(item.image, self.settings.rotate)
        if item.new_scene or (self._shape is not None and image.shape != self._shape):
            self._scene += 1
            self._cut += int(item.new_scene)
        self._shape = image.shape
        self.frames.write(self._index, image)
        self.emit(
            {
                "event": "frame",
                "index": self._index,
                "height": image.shape[0],
                "width": image.shape[1],
                "arrived": arrived,
                "media_s": media_s,
                "base_s": base_s,
                "scene": self._scene,
                "cut": self._cut,
                "number": number,
            }
        )
        self._index += 1


def _watch_parent(reader: Reader) -> None:
    """Every byte on stdin makes room for one frame; its end is the parent's end."""
    while True:
        data = os.read(0, 4096)
        if not data:
            os._exit(0)
        reader.room.release(len(data))


def _read_settings() -> ReaderSettings:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(0)
        line += byte
    return ReaderSettings(**json.loads(line))


def main() -> None:
    """Run until the end of the source; the last event says how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us in order
    events, log = os.dup(1), os.dup(2)
    faulthandler.enable(log, all_threads=False)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # libraries write here: warnings, and addresses with passwords
    os.dup2(nowhere, 2)
    own_log = OwnLog(log)
    lock = threading.Lock()

    def emit(event: dict[str, Any]) -> None:
        data = json.dumps(event).encode() + b"\n"
        with lock:
            while data:
                data = data[os.write(events, data) :]

    try:
        settings = _read_settings()
        own_log.hide_password_of(settings, os.environ)
        frames = SharedFrames(settings.max_side_px * settings.max_side_px * 3, fd=int(sys.argv[1]))
        reader = Reader(settings, frames, emit)
        threading.Thread(target=_watch_parent, args=(reader,), daemon=True).start()
        emit({"event": "hello"})
        reader.run()
    except DecodeError as error:
        own_log.write(str(error))
        emit({"event": "error", "why": str(error)})
    except BrokenPipeError:
        os._exit(0)
    except Exception as error:  # anything else is a fault of ours: said in one line, without addresses
        own_log.write(traceback.format_exc())
        emit({"event": "error", "why": f"the reader failed: {type(error).__name__}: {one_line(error)}"})
    else:
        emit({"event": "end"})
    os._exit(0)


if __name__ == "__main__":
    main()

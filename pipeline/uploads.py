"""Uploaded videos: streamed to disk within a bound, and kept only if they open."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from pathlib import Path

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pipeline.config import CameraConfig, Config, SourceConfig
from pipeline.errors import ApiError
from pipeline.source import open_source

_NAME = re.compile(r"^[0-9a-f]{32}\.[a-z0-9]{1,5}$")
_OPEN_TIMEOUT_S = 15.0
_MOST_UNUSED = 4  # uploads that no camera watches (yet)


class _File:
    """Collects the first file part of a multipart body."""

    def __init__(self) -> None:
        self.name = ""
        self.chunks: list[bytes] = []
        self.found = False
        self._inside = False
        self._header: list[bytes] = []
        self._value: list[bytes] = []

    def callbacks(self) -> dict[str, object]:
        """For the parser."""
        return {
            "on_header_field": lambda data, start, end: self._header.append(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.append(data[start:end]),
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._part_end,
        }

    def _header_end(self) -> None:
        field, value = b"".join(self._header).lower(), b"".join(self._value)
        self._header, self._value = [], []
        if field == b"content-disposition" and not self.found:
            _, options = parse_options_header(value)
            if b"filename" in options:
                self.found = self._inside = True
                self.name = options[b"filename"].decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._inside:
            self.chunks.append(data[start:end])

    def _part_end(self) -> None:
        self._inside = False


def _changed_s(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # another upload has just made room
        return 0.0


class Uploads:
    """The folder of uploaded videos. They live as long as a camera of this run uses them."""

    def __init__(self, config: Config) -> None:
        self.folder = (config.store.folder / "uploads").resolve()
        self._max_bytes = config.service.max_upload_bytes
        self._timeout_s = max(_OPEN_TIMEOUT_S, config.source.open_timeout_s)

    def clear(self, keep: set[str]) -> None:
        """Remove what an earlier run left, but for the sources in `keep`. Blocks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            if (_NAME.match(file.name) or file.suffix == ".part") and str(file) not in keep:
                file.unlink(missing_ok=True)

    def remove(self, source: str) -> None:
        """Remove an uploaded video; any other source is left alone. Blocks."""
        file = Path(source)
        if file.parent == self.folder and _NAME.match(file.name):
            file.unlink(missing_ok=True)

    def make_room(self, in_use: set[str]) -> None:
        """Remove all but the newest uploads that no camera watches. Blocks."""
        spare = [file for file in self.folder.iterdir() if _NAME.match(file.name) and str(file) not in in_use]
        spare.sort(key=_changed_s)
        for file in spare[: -_MOST_UNUSED + 1]:
            file.unlink(missing_ok=True)

    async def receive(self, request: Request) -> Path:
        """Take the video out of a multipart request.

        Raises:
            ApiError: No file in it, too large, no space, or no video that can be read.
        """
        part = self.folder / f"{uuid.uuid4().hex}.part"
        try:
            name = await self._stream(request, part)
            suffix = Path(name).suffix.lower()
            final = part.with_suffix(suffix if re.match(r"^\.[a-z0-9]{1,5}$", suffix) else ".video")
            await asyncio.to_thread(part.rename, final)
            problem = await asyncio.to_thread(self._check, final)
            if problem:
                await asyncio.to_thread(final.unlink, missing_ok=True)
                raise ApiError(422, f"{Path(name).name[:120]}: {problem}; upload a video that plays, e.g. MP4 (H.264)")
        except OSError as error:
            raise ApiError(507, f"the video cannot be kept: {error.strerror}; free space in store.folder") from error
        finally:
            await asyncio.to_thread(part.unlink, missing_ok=True)
        return final

    async def _stream(self, request: Request, target: Path) -> str:
        _, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary")
        if not boundary:
            raise ApiError(422, "file: missing; send a multipart form with the video as `file`")
        form = _File()
        written = 0
        try:
            parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
            with await asyncio.to_thread(target.open, "wb") as file:
                async for chunk in request.stream():
                    parser.write(chunk)
                    data = b"".join(form.chunks)
                    form.chunks.clear()
                    written += len(data)
                    if data:
                        await asyncio.to_thread(file.write, data)
            parser.finalize()
        except FormParserError as error:
            raise ApiError(422, "the upload is not a multipart form; send the video as `file`") from error
        if not form.found or not written:
            raise ApiError(422, "file: missing or empty; send a multipart form with the video as `file`")
        return form.name.replace("\\", "/")

    def _check(self, file: Path) -> str:
        """What is wrong with a video; empty when a picture can be read from it."""
        camera = CameraConfig(name="upload", source=str(file))
        settings = SourceConfig(open_timeout_s=self._timeout_s, read_timeout_s=self._timeout_s)
        with open_source(camera, settings) as reader:
            deadline = time.monotonic() + 2 * self._timeout_s
            while time.monotonic() < deadline:
                if reader.wait_frame(-1, 0.5) is not None:
                    return ""
                status = reader.status()
                if status.finished or status.state == "lost":
                    return "holds no picture that can be read"
        return "could not be opened in time"

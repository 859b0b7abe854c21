"""The folder of thumbnails: JPEG files, each under its final name only once it is whole and synced."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.database import StoreError

ORPHAN_AGE_S = 3600.0
_FOLDERS = 256  # spread over folders 00..ff by a sum over the id
_PART_SUFFIX = ".part"


class Thumbnails:
    """Thumbnails by description id. Every method blocks and may be called from any thread.

    Raises:
        StoreError: The folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._next_folder = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}; set store.folder to a writable folder") from error

    def add(self, description_id: str, jpeg: bytes) -> None:
        """Write a thumbnail; once this returns it survives a kill.

        Raises:
            StoreError: The disk is full or the folder cannot be written.
        """
        target = self._file(description_id)
        part = target.with_suffix(_PART_SUFFIX)
        try:
            target.parent.mkdir(exist_ok=True)
            with part.open("wb") as file:
                file.write(jpeg)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError as error:
            raise StoreError(f"{target.parent}: {error.strerror}; free disk space or set store.folder") from error

    def find(self, description_id: str) -> Path | None:
        """The file; None when there is none. Any string may be asked for."""
        if not description_id.isalnum() or len(description_id) > 64:
            return None
        file = self._file(description_id)
        return file if file.is_file() else None

    def remove(self, description_id: str) -> None:
        """Remove the file, if it is there."""
        self._file(description_id).unlink(missing_ok=True)

    def sweep(self, known: Callable[[list[str]], set[str]], limit: int) -> int:
        """Look through the next one of the folders and remove old files that nobody knows; returns how many.

        Args:
            known: Which of some ids (at most `limit`) have a description.
            limit: At most so many files are removed.
        """
        folder = self._folder / f"{self._next_folder:02x}"
        self._next_folder = (self._next_folder + 1) % _FOLDERS
        if not folder.is_dir():
            return 0
        before = time.time() - ORPHAN_AGE_S
        old = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < before:
                        old.append(Path(entry.path))
        names = [file.stem for file in old]
        kept: set[str] = set()
        for start in range(0, len(names), limit):
            kept |= known(names[start : start + limit])
        orphans = [file for file in old if file.suffix == _PART_SUFFIX or file.stem not in kept][:limit]
        for file in orphans:
            file.unlink(missing_ok=True)
        return len(orphans)

    def _file(self, description_id: str) -> Path:
        return self._folder / _folder_of(description_id) / f"{description_id}.jpg"


def _folder_of(description_id: str) -> str:
    """A stable spread over 256 folders, whatever the ids look like."""
    return f"{sum(ord(letter) * (31 + place) for place, letter in enumerate(description_id)) % _FOLDERS:02x}"

"""What was done to the list of cameras while the service ran, so that a restart shows the same ones.

Passwords are never among it: a camera's settings name the environment variable that holds its password.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pydantic import ValidationError
from sqlalchemy import delete, select
from sqlalchemy.dialects.sqlite import insert as upsert

from pipeline.config import CameraConfig
from pipeline.database import Database
from pipeline.schema import cameras

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredCamera:
    """A camera that was added, or (`removed`) one of the configuration that was removed."""

    camera_id: str
    camera: CameraConfig
    removed: bool


class CameraStore:
    """Cameras added and removed. Every method blocks and may be called from any thread; each may raise StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def keep(self, stored: StoredCamera) -> None:
        """Remember one; what was remembered of the same id is replaced."""
        row = {"camera": stored.camera.model_dump_json(), "removed": stored.removed}
        with self._database.writing() as connection:
            connection.execute(
                upsert(cameras)
                .values(camera_id=stored.camera_id, **row)
                .on_conflict_do_update(index_elements=["camera_id"], set_=row)
            )

    def forget(self, camera_id: str) -> None:
        """Remember nothing of this id."""
        with self._database.writing() as connection:
            connection.execute(delete(cameras).where(cameras.c.camera_id == camera_id))

    def cameras(self) -> list[StoredCamera]:
        """Everything remembered, in the order of the ids; what this version cannot read is left out."""
        found = []
        with self._database.reading() as connection:
            for row in connection.execute(select(cameras).order_by(cameras.c.camera_id)):
                try:
                    camera = CameraConfig.model_validate_json(row.camera)
                except ValidationError:
                    _log.warning("camera %s of an earlier run cannot be read and is left out", row.camera_id)
                    continue
                found.append(StoredCamera(row.camera_id, camera, row.removed))
        return found

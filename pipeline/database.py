"""The one SQLite file of a deployment: opening it, its schema, and what its errors are called."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from pipeline.schema import APPLICATION_ID, DDL_FULL_TEXT, SCHEMA_VERSION, metadata

DATABASE_NAME = "framechat.sqlite3"
_BUSY_TIMEOUT_S = 10.0


class StoreError(RuntimeError):
    """The store cannot be used; the message is one line that names the file and the mend."""


class Database:
    """Connections to the database in `folder`. Any thread may ask for one; one at a time writes.

    Raises:
        StoreError: The folder or the file cannot be used, or a newer FrameChat wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / DATABASE_NAME
        self._write = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: {error.strerror}; set store.folder to a writable folder") from error
        self._engine = create_engine(
            f"sqlite:///{self.path}", connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False}
        )
        event.listen(self._engine, "connect", _configure)
        with self._told():
            _create(self._engine, self.path)

    def close(self) -> None:
        """Close every connection; the write-ahead log is folded into the file."""
        self._engine.dispose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection to read with.

        Raises:
            StoreError: It cannot be read.
        """
        with self._told(), self._engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction, synced when it ends.

        Raises:
            StoreError: The disk is full or the file cannot be written.
        """
        with self._write, self._told(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn the driver's errors into one line that names the file."""
        try:
            yield
        except SQLAlchemyError as error:
            cause = str(getattr(error, "orig", None) or error).splitlines()[0]
            mend = "move the file away to start afresh" if isinstance(error, DatabaseError) else "see store.folder"
            if "full" in cause or "readonly" in cause or "unable to open" in cause or "I/O" in cause:
                mend = "check the free space and the permissions of store.folder"
            elif "locked" in cause:
                mend = "another program holds the database; end it"
            raise StoreError(f"{self.path}: {cause}; {mend}") from error


def _configure(connection: Any, _record: Any) -> None:
    """Pragmas of every connection. FULL syncs each commit, so that a power cut loses no stored description either."""
    cursor = connection.cursor()
    for pragma in (
        "auto_vacuum = INCREMENTAL",  # takes effect while the database is empty
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        f"journal_size_limit = {16 * 2**20}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _create(engine: Engine, path: Path) -> None:
    with engine.begin() as connection:
        version = int(connection.execute(text("PRAGMA user_version")).scalar() or 0)
        owner = int(connection.execute(text("PRAGMA application_id")).scalar() or 0)
        tables = int(connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar() or 0)
    if (tables and owner != APPLICATION_ID) or version > SCHEMA_VERSION:
        was = f"schema {version} of a newer FrameChat" if owner == APPLICATION_ID else "not a FrameChat database"
        raise StoreError(f"{path}: {was} (this one writes schema {SCHEMA_VERSION}); set store.folder to another folder")
    if version == SCHEMA_VERSION:
        return
    with engine.connect() as connection:
        # One transaction: a kill half-way leaves the file as it was, not half a schema.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        metadata.create_all(connection)  # only what is missing: schema 1 had no chats, documents and cameras
        for statement in DDL_FULL_TEXT if version == 0 else ():
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.commit()

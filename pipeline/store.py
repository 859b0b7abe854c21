"""Where descriptions, thumbnails and request records live: SQLite (WAL, FTS5) and a folder of JPEG files.

A description is stored when `Store.add_description` has returned: its thumbnail lies under its final name before the
row is committed, and the commit is synced, so a kill at any moment loses no stored description and leaves no row
without its picture. What it can leave are files without a row; `Store.sweep` removes them.

Every method blocks and may be called from any thread; call them off the event loop.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, Row, create_engine, delete, event, func, insert, select, text
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from pipeline.api import DescriptionView
from pipeline.config import StoreConfig
from pipeline.schema import APPLICATION_ID, DDL_FULL_TEXT, SCHEMA_VERSION, descriptions, metadata, requests
from serving.records import ErrorKind, Gap, Outcome, RequestError, RequestRecord

DATABASE_NAME = "framechat.sqlite3"
MAX_RESULTS = 500
ORPHAN_AGE_S = 3600.0
_BUSY_TIMEOUT_S = 10.0
_FOLDERS = 256  # thumbnails are spread over folders 00..ff by the hash that starts their name
_PART_SUFFIX = ".part"
_ROW_BYTES = 1024  # a description's share of the database, for deciding how many must go
_VACUUM_PAGES = 2000


class StoreError(RuntimeError):
    """The store cannot be used; the message is one line that names the file and the mend."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What one call of `Store.sweep` removed. `more`: the limit was reached, call again."""

    descriptions: int = 0
    requests: int = 0
    orphans: int = 0
    more: bool = False


def fts_query(words: str) -> str | None:
    """A full-text query that asks for every word of `words`, the last one as a prefix; None when there is no word.

    FTS5's own syntax is taken literally, so that no input can be a syntax error. "Quoted words" stay a phrase.
    """
    clean = words.encode("utf-8", "ignore").decode("utf-8").replace("\0", " ")
    terms: list[str] = []
    for number, part in enumerate(clean.split('"')):
        terms += [part] if number % 2 else part.split()  # odd parts were inside quotes
    kept = [term.strip() for term in terms if any(letter.isalnum() for letter in term)]
    if not kept:
        return None
    return " AND ".join(f'"{term}"' for term in kept) + ("" if clean.rstrip().endswith('"') else "*")


class Store:
    """Descriptions, thumbnails and request records of one deployment.

    Raises:
        StoreError: The folder or the database cannot be used, or a newer FrameChat wrote it.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.path = config.folder / DATABASE_NAME
        self._thumbnails = config.folder / "thumbnails"
        self._write = threading.Lock()
        self._next_folder = 0
        try:
            self._thumbnails.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{config.folder}: {error.strerror}; set store.folder to a writable folder") from error
        self._engine = create_engine(
            f"sqlite:///{self.path}", connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False}
        )
        event.listen(self._engine, "connect", _configure)
        with _told(self.path):
            _create(self._engine, self.path)

    def close(self) -> None:
        """Close every connection; the write-ahead log is folded into the database."""
        self._engine.dispose()

    # --- writing -----------------------------------------------------------------------------------------------

    def add_description(self, view: DescriptionView, thumbnail: bytes | None) -> None:
        """Store one ended description and its JPEG; once this returns it survives a kill.

        Raises:
            StoreError: The disk is full or the database cannot be written.
        """
        if thumbnail is not None:
            self._write_thumbnail(view.description_id, thumbnail)
        row = view.model_dump(exclude={"thumbnail", "box"})
        row |= dict(zip(("x1", "y1", "x2", "y2"), view.box, strict=True))
        row["thumbnail_bytes"] = None if thumbnail is None else len(thumbnail)
        with self._writing() as connection:
            connection.execute(insert(descriptions), row)

    def add_request(self, record: RequestRecord) -> None:
        """Store what one request did, with every gap; its text is not kept here.

        Raises:
            StoreError: The disk is full or the database cannot be written.
        """
        row = {
            "request_id": record.request_id,
            "traffic_class": record.traffic_class,
            "model": record.model,
            "due_s": record.due_s,
            "sent_s": record.sent_s,
            "first_token_s": record.first_token_s,
            "last_token_s": record.last_token_s,
            "finished_s": record.finished_s,
            "outcome": record.outcome.value,
            "gaps": [[round(gap.end_s, 6), round(gap.duration_s, 6), gap.tokens] for gap in record.gaps],
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "tokens_counted": record.tokens_counted,
            "finish_reason": record.finish_reason,
            "error_kind": None if record.error is None else record.error.kind.value,
            "error_message": None if record.error is None else record.error.message,
            "error_status": None if record.error is None else record.error.status,
            "reason": record.reason,
        }
        with self._writing() as connection:
            connection.execute(insert(requests), row)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._write, _told(self.path), self._engine.begin() as connection:
            yield connection

    def _write_thumbnail(self, description_id: str, jpeg: bytes) -> None:
        target = self._thumbnail_file(description_id)
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

    def _thumbnail_file(self, description_id: str) -> Path:
        return self._thumbnails / _folder_of(description_id) / f"{description_id}.jpg"

    # --- reading -----------------------------------------------------------------------------------------------

    def search(
        self,
        words: str = "",
        *,
        limit: int = 50,
        camera_id: str | None = None,
        before_s: float | None = None,
        states: Sequence[str] = (),
    ) -> list[DescriptionView]:
        """Stored descriptions, newest frame first; with `words`, those whose text or camera has every one of them.

        Args:
            words: What the user typed; any text is acceptable.
            limit: At most so many, capped at 500.
            camera_id: Only this camera's.
            before_s: Only frames older than this, to page on.
            states: Only these outcomes; empty means all.
        """
        query = select(descriptions).order_by(descriptions.c.frame_s.desc()).limit(max(0, min(limit, MAX_RESULTS)))
        parameters: dict[str, Any] = {}
        if words.strip():
            match = fts_query(words)
            if match is None:
                return []
            found = text("row_id IN (SELECT rowid FROM descriptions_text WHERE descriptions_text MATCH :match)")
            query, parameters = query.where(found), {"match": match}
        if camera_id is not None:
            query = query.where(descriptions.c.camera_id == camera_id)
        if before_s is not None:
            query = query.where(descriptions.c.frame_s < before_s)
        if states:
            query = query.where(descriptions.c.state.in_(states))
        with _told(self.path), self._engine.connect() as connection:
            return [_view(row) for row in connection.execute(query, parameters)]

    def description(self, description_id: str) -> DescriptionView | None:
        """One stored description."""
        query = select(descriptions).where(descriptions.c.description_id == description_id)
        with _told(self.path), self._engine.connect() as connection:
            row = connection.execute(query).first()
        return None if row is None else _view(row)

    def thumbnail(self, description_id: str) -> Path | None:
        """The thumbnail's file; None when there is none. Any string may be asked for."""
        if not description_id.isalnum() or len(description_id) > 64:
            return None
        file = self._thumbnail_file(description_id)
        return file if file.is_file() else None

    def requests(
        self, *, since_s: float = 0.0, traffic_class: str | None = None, limit: int = 10_000
    ) -> list[RequestRecord]:
        """Stored request records, oldest first, due at or after `since_s`."""
        query = select(requests).where(requests.c.due_s >= since_s).order_by(requests.c.due_s).limit(limit)
        if traffic_class is not None:
            query = query.where(requests.c.traffic_class == traffic_class)
        with _told(self.path), self._engine.connect() as connection:
            return [_record(row) for row in connection.execute(query)]

    def size_bytes(self) -> int:
        """Bytes in use: the database's used pages and the thumbnails."""
        with _told(self.path), self._engine.connect() as connection:
            return _used_bytes(connection)

    def check(self) -> str:
        """SQLite's own integrity check and the full-text index's: `ok`, or what is wrong."""
        with self._write, _told(self.path), self._engine.begin() as connection:
            connection.execute(text("INSERT INTO descriptions_text(descriptions_text) VALUES('integrity-check')"))
            return str(connection.execute(text("PRAGMA integrity_check")).scalar())

    # --- retention ---------------------------------------------------------------------------------------------

    def sweep(self, now_s: float, *, limit: int = 500) -> Swept:
        """Remove what is too old, then the oldest while the store is too large; at most `limit` rows of each kind.

        One thumbnail folder in 256 is looked through for files without a row at each call.
        """
        oldest_s = now_s - self.config.max_age_days * 86_400
        with self._writing() as connection:
            gone = _delete_descriptions(connection, _oldest(connection, limit, before_s=oldest_s))
            request_count = _delete_requests(connection, limit, until_s=oldest_s)
            excess = _used_bytes(connection) - self.config.max_bytes
            if excess > 0:
                too_many = _enough(_oldest(connection, limit - len(gone)), excess)
                gone += _delete_descriptions(connection, too_many)
                # Requests go along with the descriptions of their time; alone only when no description is left.
                until_s = max((row.frame_s for row in too_many), default=now_s)
                request_count += _delete_requests(connection, limit - request_count, until_s=until_s)
        for row in gone:
            self._thumbnail_file(row.description_id).unlink(missing_ok=True)
        if gone or request_count:
            with self._writing() as connection:
                # The driver must be drained: this pragma frees one page a step and yields no rows that SQLAlchemy sees.
                raw = connection.connection.cursor()
                raw.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
                raw.fetchall()
        return Swept(
            descriptions=len(gone),
            requests=request_count,
            orphans=self._sweep_orphans(limit),
            more=len(gone) >= limit or request_count >= limit,
        )

    def _sweep_orphans(self, limit: int) -> int:
        folder = self._thumbnails / f"{self._next_folder:02x}"
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
        known: set[str] = set()
        with _told(self.path), self._engine.connect() as connection:
            for start in range(0, len(names), limit):
                some = names[start : start + limit]
                query = select(descriptions.c.description_id).where(descriptions.c.description_id.in_(some))
                known |= set(connection.execute(query).scalars())
        orphans = [file for file in old if file.suffix == _PART_SUFFIX or file.stem not in known][:limit]
        for file in orphans:
            file.unlink(missing_ok=True)
        return len(orphans)


def _folder_of(description_id: str) -> str:
    """A stable spread over 256 folders, whatever the ids look like."""
    return f"{sum(ord(letter) * (31 + place) for place, letter in enumerate(description_id)) % _FOLDERS:02x}"


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
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
        raise StoreError(f"{path}: {cause}; {mend}") from error


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
        # One transaction: a kill half-way leaves an empty database, not half a schema.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        metadata.create_all(connection)
        for statement in DDL_FULL_TEXT:
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.commit()


def _used_bytes(connection: Connection) -> int:
    pages, free, page_bytes = (
        int(connection.execute(text(f"PRAGMA {name}")).scalar() or 0)
        for name in ("page_count", "freelist_count", "page_size")
    )
    pictures = connection.execute(select(func.coalesce(func.sum(descriptions.c.thumbnail_bytes), 0))).scalar()
    return (pages - free) * page_bytes + int(pictures or 0)


@dataclass(frozen=True, slots=True)
class _Old:
    description_id: str
    frame_s: float
    bytes: int


def _oldest(connection: Connection, limit: int, *, before_s: float | None = None) -> list[_Old]:
    columns = (descriptions.c.description_id, descriptions.c.frame_s, descriptions.c.thumbnail_bytes)
    query = select(*columns).order_by(descriptions.c.frame_s).limit(max(0, limit))
    if before_s is not None:
        query = query.where(descriptions.c.frame_s < before_s)
    return [_Old(row[0], row[1], (row[2] or 0) + _ROW_BYTES) for row in connection.execute(query)]


def _enough(candidates: Sequence[_Old], excess_bytes: int) -> list[_Old]:
    """The first of `candidates` that together free `excess_bytes`."""
    chosen = []
    for row in candidates:
        if excess_bytes <= 0:
            break
        chosen.append(row)
        excess_bytes -= row.bytes
    return chosen


def _delete_descriptions(connection: Connection, rows: list[_Old]) -> list[_Old]:
    names = [row.description_id for row in rows]
    if names:
        connection.execute(delete(descriptions).where(descriptions.c.description_id.in_(names)))
    return rows


def _delete_requests(connection: Connection, limit: int, *, until_s: float) -> int:
    oldest = select(requests.c.request_id).where(requests.c.due_s <= until_s).order_by(requests.c.due_s)
    oldest = oldest.limit(max(0, limit))
    return connection.execute(delete(requests).where(requests.c.request_id.in_(oldest))).rowcount


def _view(row: Row[Any]) -> DescriptionView:
    fields = dict(row._mapping)
    box = (fields.pop("x1"), fields.pop("y1"), fields.pop("x2"), fields.pop("y2"))
    fields.pop("row_id")
    has_thumbnail = fields.pop("thumbnail_bytes") is not None
    thumbnail = f"/thumbnails/{fields['description_id']}.jpg" if has_thumbnail else ""
    return DescriptionView(**fields, box=box, thumbnail=thumbnail)


def _record(row: Row[Any]) -> RequestRecord:
    fields = dict(row._mapping)
    kind, message, status = (fields.pop(name) for name in ("error_kind", "error_message", "error_status"))
    fields["gaps"] = tuple(
        Gap(end_s=end, duration_s=duration, tokens=tokens) for end, duration, tokens in fields["gaps"]
    )
    fields["outcome"] = Outcome(fields["outcome"])
    error = None if kind is None else RequestError(kind=ErrorKind(kind), message=message, status=status)
    return RequestRecord(**fields, error=error)

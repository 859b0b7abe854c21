"""Where descriptions, thumbnails and request records live: SQLite (WAL, FTS5) and a folder of JPEG files.

A description is stored when `Store.add_description` has returned: its thumbnail lies under its final name before the
row is committed, and the commit is synced, so a kill at any moment loses no stored description and leaves no row
without its picture. What it can leave are files without a row; `Store.sweep` removes them.

Every method blocks and may be called from any thread; call them off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Row, insert, select, text

from pipeline.api import DescriptionView
from pipeline.config import StoreConfig
from pipeline.database import Database
from pipeline.retention import Swept, sweep, used_bytes
from pipeline.schema import descriptions, requests
from pipeline.thumbnails import Thumbnails
from serving.records import ErrorKind, Gap, Outcome, RequestError, RequestRecord

MAX_RESULTS = 500


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
        self._thumbnails = Thumbnails(config.folder / "thumbnails")
        self.database = Database(config.folder)

    def close(self) -> None:
        """Close every connection."""
        self.database.close()

    # --- writing -----------------------------------------------------------------------------------------------

    def add_description(self, view: DescriptionView, thumbnail: bytes | None) -> None:
        """Store one ended description and its JPEG; once this returns it survives a kill.

        Raises:
            StoreError: The disk is full or the database cannot be written.
        """
        if thumbnail is not None:
            self._thumbnails.add(view.description_id, thumbnail)
        row = view.model_dump(exclude={"thumbnail", "box"})
        row |= dict(zip(("x1", "y1", "x2", "y2"), view.box, strict=True))
        row["thumbnail_bytes"] = None if thumbnail is None else len(thumbnail)
        with self.database.writing() as connection:
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
        with self.database.writing() as connection:
            connection.execute(insert(requests), row)

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
        with self.database.reading() as connection:
            return [_view(row) for row in connection.execute(query, parameters)]

    def description(self, description_id: str) -> DescriptionView | None:
        """One stored description."""
        query = select(descriptions).where(descriptions.c.description_id == description_id)
        with self.database.reading() as connection:
            row = connection.execute(query).first()
        return None if row is None else _view(row)

    def thumbnail(self, description_id: str) -> Path | None:
        """The thumbnail's file; None when there is none. Any string may be asked for."""
        return self._thumbnails.find(description_id)

    def requests(
        self, *, since_s: float = 0.0, traffic_class: str | None = None, limit: int = 10_000
    ) -> list[RequestRecord]:
        """Stored request records, oldest first, due at or after `since_s`."""
        query = select(requests).where(requests.c.due_s >= since_s).order_by(requests.c.due_s).limit(limit)
        if traffic_class is not None:
            query = query.where(requests.c.traffic_class == traffic_class)
        with self.database.reading() as connection:
            return [_record(row) for row in connection.execute(query)]

    def size_bytes(self) -> int:
        """Bytes in use: the database's used pages and the thumbnails."""
        with self.database.reading() as connection:
            return used_bytes(connection)

    def check(self) -> str:
        """SQLite's own integrity check and the full-text index's: `ok`, or what is wrong."""
        with self.database.writing() as connection:
            connection.execute(text("INSERT INTO descriptions_text(descriptions_text) VALUES('integrity-check')"))
            return str(connection.execute(text("PRAGMA integrity_check")).scalar())

    def sweep(self, now_s: float, *, limit: int = 500) -> Swept:
        """Apply the retention once; see `pipeline.retention.sweep`."""
        return sweep(self.database, self._thumbnails, self.config, now_s, limit)


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

"""What the store forgets: what is too old, then the oldest of everything while the whole is too large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select, text

from pipeline.config import StoreConfig
from pipeline.database import Database
from pipeline.schema import chat_turns, chats, descriptions, documents, requests
from pipeline.thumbnails import Thumbnails

_ROW_BYTES = 1024  # a row's share of the database beside its long texts, for deciding how many must go
_VACUUM_PAGES = 2000
_DAY_S = 86_400

_KINDS = {
    "description": (descriptions, descriptions.c.description_id, descriptions.c.frame_s),
    "chat": (chats, chats.c.session_id, chats.c.used_s),
    "document": (documents, documents.c.document_id, documents.c.used_s),
}
_TURN_BYTES = (
    select(func.coalesce(func.sum(func.length(chat_turns.c.turn)), 0))
    .where(chat_turns.c.session_id == chats.c.session_id)
    .scalar_subquery()
)
_BYTES = {
    "description": func.coalesce(descriptions.c.thumbnail_bytes, 0),
    "chat": _TURN_BYTES,
    "document": func.length(documents.c.text),
}


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep removed. `more`: the limit was reached, call again."""

    descriptions: int = 0
    requests: int = 0
    chats: int = 0
    documents: int = 0
    orphans: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Old:
    kind: str
    key: str
    at_s: float
    bytes: int


def used_bytes(connection: Connection) -> int:
    """Bytes in use: the database's used pages and the thumbnails."""
    pages, free, page_bytes = (
        int(connection.execute(text(f"PRAGMA {name}")).scalar() or 0)
        for name in ("page_count", "freelist_count", "page_size")
    )
    pictures = connection.execute(select(func.coalesce(func.sum(descriptions.c.thumbnail_bytes), 0))).scalar()
    return (pages - free) * page_bytes + int(pictures or 0)


def sweep(database: Database, thumbnails: Thumbnails, config: StoreConfig, now_s: float, limit: int) -> Swept:
    """Apply `max_age_days` and `max_bytes` of `config`; at most `limit` items and `limit` requests go at each call.

    A chat and a document are as old as their last use. One thumbnail folder is looked through for files without a row.
    """
    oldest_s = now_s - config.max_age_days * _DAY_S
    with database.writing() as connection:
        gone = _delete(connection, _oldest(connection, limit, before_s=oldest_s))
        request_count = _delete_requests(connection, limit, until_s=oldest_s)
        excess = used_bytes(connection) - config.max_bytes
        if excess > 0 and len(gone) < limit:
            too_many = _enough(_oldest(connection, limit - len(gone)), excess)
            gone += _delete(connection, too_many)
            # Requests go along with the descriptions of their time; alone only when nothing else is left.
            until_s = max((row.at_s for row in too_many), default=now_s)
            request_count += _delete_requests(connection, limit - request_count, until_s=until_s)
    for row in gone:
        if row.kind == "description":
            thumbnails.remove(row.key)
    if gone or request_count:
        with database.writing() as connection:
            # The driver must be drained: this pragma frees one page a step and yields no rows that SQLAlchemy sees.
            raw = connection.connection.cursor()
            raw.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")
            raw.fetchall()
    counts = {kind: sum(row.kind == kind for row in gone) for kind in _KINDS}
    return Swept(
        descriptions=counts["description"],
        requests=request_count,
        chats=counts["chat"],
        documents=counts["document"],
        orphans=thumbnails.sweep(lambda names: _known(database, names), limit),
        more=len(gone) >= limit or request_count >= limit,
    )


def _known(database: Database, names: list[str]) -> set[str]:
    query = select(descriptions.c.description_id).where(descriptions.c.description_id.in_(names))
    with database.reading() as connection:
        return set(connection.execute(query).scalars())


def _oldest(connection: Connection, limit: int, *, before_s: float | None = None) -> list[_Old]:
    """The oldest items of every kind together."""
    found = []
    for kind, (_, key, at_s) in _KINDS.items():
        query = select(key, at_s, _BYTES[kind]).order_by(at_s).limit(max(0, limit))
        if before_s is not None:
            query = query.where(at_s < before_s)
        found += [_Old(kind, row[0], row[1], int(row[2]) + _ROW_BYTES) for row in connection.execute(query)]
    return sorted(found, key=lambda item: item.at_s)[: max(0, limit)]


def _enough(candidates: Sequence[_Old], excess_bytes: int) -> list[_Old]:
    """The first of `candidates` that together free `excess_bytes`."""
    chosen = []
    for row in candidates:
        if excess_bytes <= 0:
            break
        chosen.append(row)
        excess_bytes -= row.bytes
    return chosen


def _delete(connection: Connection, rows: list[_Old]) -> list[_Old]:
    for kind, (table, key, _) in _KINDS.items():
        names = [row.key for row in rows if row.kind == kind]
        if names:
            connection.execute(delete(table).where(key.in_(names)))
    return rows


def _delete_requests(connection: Connection, limit: int, *, until_s: float) -> int:
    oldest = select(requests.c.request_id).where(requests.c.due_s <= until_s).order_by(requests.c.due_s)
    oldest = oldest.limit(max(0, limit))
    return connection.execute(delete(requests).where(requests.c.request_id.in_(oldest))).rowcount

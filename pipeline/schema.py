"""The tables of the store."""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, Column, Float, Index, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 1
APPLICATION_ID = 0x46436861  # "FCha", in the database's header: nobody else's file is taken for ours

metadata = MetaData()

descriptions = Table(
    "descriptions",
    metadata,
    Column("row_id", Integer, primary_key=True),
    Column("description_id", String, nullable=False, unique=True),
    Column("camera_id", String, nullable=False),
    Column("camera", String, nullable=False),
    Column("person_id", String, nullable=False),
    Column("track_id", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("frame_s", Float, nullable=False),
    Column("due_s", Float, nullable=False),
    Column("sent_s", Float),
    Column("first_token_s", Float),
    Column("last_token_s", Float),
    Column("frame_age_ms", Float),
    Column("waiting_ms", Float),
    Column("ttft_ms", Float),
    Column("total_ms", Float),
    Column("text", Text, nullable=False),
    Column("x1", Float, nullable=False),
    Column("y1", Float, nullable=False),
    Column("x2", Float, nullable=False),
    Column("y2", Float, nullable=False),
    Column("thumbnail_bytes", Integer),
    Column("prompt_tokens", Integer),
    Column("cached_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("finish_reason", String),
    Column("model", String, nullable=False),
)
Index("descriptions_by_time", descriptions.c.frame_s)
Index("descriptions_by_camera", descriptions.c.camera_id, descriptions.c.frame_s)

requests = Table(
    "requests",
    metadata,
    Column("request_id", String, primary_key=True),
    Column("traffic_class", String, nullable=False),
    Column("model", String, nullable=False),
    Column("due_s", Float, nullable=False),
    Column("sent_s", Float),
    Column("first_token_s", Float),
    Column("last_token_s", Float),
    Column("finished_s", Float, nullable=False),
    Column("outcome", String, nullable=False),
    Column("gaps", JSON, nullable=False),  # [[end_s, duration_s, tokens], ...]
    Column("prompt_tokens", Integer),
    Column("cached_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("tokens_counted", Boolean, nullable=False),
    Column("finish_reason", String),
    Column("error_kind", String),
    Column("error_message", String),
    Column("error_status", Integer),
    Column("reason", String),
)
Index("requests_by_time", requests.c.due_s)

DDL_FULL_TEXT = (
    "CREATE VIRTUAL TABLE descriptions_text USING fts5(text, camera, content='descriptions', content_rowid='row_id', "
    "tokenize='unicode61 remove_diacritics 2')",
    "CREATE TRIGGER descriptions_added AFTER INSERT ON descriptions BEGIN "
    "INSERT INTO descriptions_text(rowid, text, camera) VALUES (new.row_id, new.text, new.camera); END",
    "CREATE TRIGGER descriptions_removed AFTER DELETE ON descriptions BEGIN "
    "INSERT INTO descriptions_text(descriptions_text, rowid, text, camera) "
    "VALUES ('delete', old.row_id, old.text, old.camera); END",
)

"""The tables of the store."""

from __future__ import annotations

from sqlalchemy import JSON, Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

SCHEMA_VERSION = 2
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

chats = Table(
    "chats",
    metadata,
    Column("session_id", String, primary_key=True),
    Column("created_s", Float, nullable=False),
    Column("used_s", Float, nullable=False),
)
Index("chats_by_use", chats.c.used_s)

chat_turns = Table(
    "chat_turns",
    metadata,
    Column("turn_id", Integer, primary_key=True),
    Column("session_id", ForeignKey("chats.session_id", ondelete="CASCADE"), nullable=False),
    Column("answer_id", String, nullable=False),  # of the answer that this is, or that answers it
    Column("turn", Text, nullable=False),  # an api.ChatTurn as JSON
    Column("told", Boolean, nullable=False),  # the next prompt may hold it
    Column("document_id", String),
    Column("had_picture", Boolean, nullable=False),
)
Index("chat_turns_by_session", chat_turns.c.session_id, chat_turns.c.turn_id)
Index("chat_turns_by_answer", chat_turns.c.answer_id)
Index("chat_turns_by_document", chat_turns.c.document_id)

documents = Table(
    "documents",
    metadata,
    Column("document_id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("text", Text, nullable=False),
    Column("used_s", Float, nullable=False),
)
Index("documents_by_use", documents.c.used_s)

cameras = Table(
    "cameras",
    metadata,
    Column("camera_id", String, primary_key=True),
    Column("camera", Text, nullable=False),  # a config.CameraConfig as JSON, which never holds a password
    Column("removed", Boolean, nullable=False),  # one of the configuration that was removed; else one that was added
)

DDL_FULL_TEXT = (
    "CREATE VIRTUAL TABLE descriptions_text USING fts5(text, camera, content='descriptions', content_rowid='row_id', "
    "tokenize='unicode61 remove_diacritics 2')",
    "CREATE TRIGGER descriptions_added AFTER INSERT ON descriptions BEGIN "
    "INSERT INTO descriptions_text(rowid, text, camera) VALUES (new.row_id, new.text, new.camera); END",
    "CREATE TRIGGER descriptions_removed AFTER DELETE ON descriptions BEGIN "
    "INSERT INTO descriptions_text(descriptions_text, rowid, text, camera) "
    "VALUES ('delete', old.row_id, old.text, old.camera); END",
)

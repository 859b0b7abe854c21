"""What is asked of the model: one chat-completions request of one traffic class."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def text_part(text: str) -> dict[str, Any]:
    """A text part of a message's content."""
    return {"type": "text", "text": text}


def picture_part(jpeg: bytes) -> dict[str, Any]:
    """A picture part of a message's content: the JPEG itself, as a data URL."""
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What is asked of the model, and when it was due.

    Attributes:
        messages: In OpenAI's format; the constant part first, so that prefix caching works.
        due_s: On the clock of `now_s`: frame picked, Enter pressed, scheduled arrival.
        request_id: Also sent as `X-Request-Id`; vLLM's own id is `chatcmpl-` and this.
        json_schema: The answer must be JSON of this schema (the server's structured output).
        priority: Sent only when not 0; lower is served first by a server with that policy.
        extra_body: Further keys of the request, as the server knows them.
    """

    traffic_class: str
    messages: list[dict[str, Any]]
    max_tokens: int
    due_s: float
    temperature: float = 0.0
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    json_schema: dict[str, Any] | None = None
    priority: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `openai`'s chat completions, model and stream options not among them."""
        extra = dict(self.extra_body)
        if self.priority:
            extra["priority"] = self.priority
        arguments: dict[str, Any] = {
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "extra_headers": {"X-Request-Id": self.request_id},
            "extra_body": extra,
        }
        if self.json_schema is not None:
            schema = {"name": "answer", "schema": self.json_schema, "strict": True}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        return arguments

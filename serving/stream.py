"""What the events of one chat-completions stream mean: which carry tokens, how many, and how the stream ended.

No clock and no network here: every event comes with its arrival time, so the figures can be tested exactly.

How tokens are counted. A server that is asked for `continuous_usage_stats` (vLLM) reports the running number of
completion tokens in each chunk; the difference to the last one is what the chunk carries, whatever its text: several
tokens, a token that completes no character, or none (the role-only first chunk). A server that reports no running
count is taken to send one token in each chunk that carries text; `RequestRecord.tokens_counted` tells which it was.
"""

from __future__ import annotations

import json
from typing import Any

from serving.records import ErrorKind, Gap, Outcome, RequestError, RequestRecord, TokenEvent
from serving.sse import ServerEvent

_DONE = "[DONE]"
_ABNORMAL_FINISH = frozenset({"abort", "error"})  # vLLM's words for a request that it gave up
MESSAGE_CHARS = 300


class StreamError(Exception):
    """The stream said or showed that the request failed."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def one_line(text: object) -> str:
    """`text` as a single line of at most `MESSAGE_CHARS` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 1] + "…"


def error_text(body: object) -> str:
    """The human part of an error body in any of the shapes in use: OpenAI's, FastAPI's, or plain text."""
    while isinstance(body, dict):
        inner = next((body[key] for key in ("error", "message", "detail") if body.get(key)), None)
        if inner is None:
            return one_line(json.dumps(body))
        body = inner
    if isinstance(body, list) and body and all(isinstance(item, dict) and "msg" in item for item in body):
        return one_line("; ".join(f"{'.'.join(map(str, item.get('loc', ())))}: {item['msg']}" for item in body))
    return one_line(body)


def _whole(value: object) -> int | None:
    """`value` as a token count, or None when it is not one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class StreamReader:
    """The state of one stream.

    Attributes:
        first_token_s, last_token_s: Arrival of the first and the last token-bearing chunk.
        gaps: Gaps between consecutive token-bearing chunks.
        tokens: Tokens counted so far.
        tokens_counted: The server reports a running count (None until the first token shows it).
        prompt_tokens, cached_tokens, completion_tokens: The server's latest usage.
        finish_reason: Set once the server gave one.
        ended: `[DONE]` was seen.
    """

    def __init__(self, max_tokens: int) -> None:
        # A server may count a few more than it was allowed (end token, hidden reasoning); twice as many is a runaway.
        self._limit_tokens = 2 * max_tokens + 16
        self._text: list[str] = []
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps: list[Gap] = []
        self.tokens = 0
        self.tokens_counted: bool | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self.ended = False

    @property
    def text(self) -> str:
        """The answer so far, reasoning excluded."""
        return "".join(self._text)

    def feed(self, at_s: float, event: ServerEvent) -> list[TokenEvent]:
        """Take one event that arrived at `at_s`; return the token events in it (none, one, or two).

        Raises:
            StreamError: The event is an error, or is no part of a chat-completions stream.
        """
        if self.ended:
            return []
        if event.data.strip() == _DONE:
            self.ended = True
            return []
        try:
            chunk = json.loads(event.data)
        except ValueError:
            if event.name not in ("", "message", "error"):
                return []  # somebody's heartbeat
            kind = ErrorKind.SERVER if event.name == "error" else ErrorKind.PROTOCOL
            raise StreamError(RequestError(kind, f"the stream holds {one_line(event.data)!r}, not JSON")) from None
        if not isinstance(chunk, dict):
            raise StreamError(RequestError(ErrorKind.PROTOCOL, f"the stream holds {one_line(event.data)}, no chunk"))
        if chunk.get("error") or event.name == "error":
            raise StreamError(_stream_error(chunk))
        usage = chunk.get("usage")
        running = self._take_usage(usage) if isinstance(usage, dict) else None
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return []
        return self._take_choice(at_s, choices[0], running)

    def record(
        self,
        *,
        request_id: str,
        traffic_class: str,
        model: str,
        due_s: float,
        sent_s: float | None,
        finished_s: float,
        outcome: Outcome,
        error: RequestError | None = None,
        reason: str | None = None,
    ) -> RequestRecord:
        """The record of the request whose stream this was: what is given, and what was read so far."""
        return RequestRecord(
            request_id=request_id,
            traffic_class=traffic_class,
            model=model,
            due_s=due_s,
            finished_s=finished_s,
            outcome=outcome,
            sent_s=sent_s,
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            gaps=tuple(self.gaps),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            tokens_counted=bool(self.tokens_counted),
            finish_reason=self.finish_reason,
            error=error,
            reason=reason,
            text=self.text,
        )

    def _take_usage(self, usage: dict[str, Any]) -> int | None:
        """Note the usage; return the completion tokens it reports."""
        completion = _whole(usage.get("completion_tokens"))
        if completion is not None:
            self.completion_tokens = completion
        prompt = _whole(usage.get("prompt_tokens"))
        if prompt is not None:
            self.prompt_tokens = prompt
        details = usage.get("prompt_tokens_details")
        cached = _whole(details.get("cached_tokens")) if isinstance(details, dict) else None
        if cached is not None:
            self.cached_tokens = cached
        return completion

    def _take_choice(self, at_s: float, choice: dict[str, Any], running: int | None) -> list[TokenEvent]:
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        content = delta.get("content") or delta.get("refusal") or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        content, reasoning = str(content), str(reasoning)
        tokens = self._count(running, bool(content or reasoning or delta.get("tool_calls")))
        self._text.append(content)
        events = []
        if tokens or content or reasoning:
            events.append(TokenEvent(at_s, tokens, content or reasoning, reasoning=not content and bool(reasoning)))
        if content and reasoning:
            events.insert(0, TokenEvent(at_s, 0, reasoning, reasoning=True))
        if tokens:
            if self.last_token_s is None:
                self.first_token_s = at_s
            else:
                self.gaps.append(Gap(at_s, at_s - self.last_token_s, tokens))
            self.last_token_s = at_s
        finish = choice.get("finish_reason")
        if finish in _ABNORMAL_FINISH:
            raise StreamError(RequestError(ErrorKind.SERVER, f"the server gave the request up ({finish})"))
        if finish:
            self.finish_reason = str(finish)
        return events

    def _count(self, running: int | None, has_text: bool) -> int:
        """Tokens in this chunk, by the running count where there is one.

        The first chunk with a token decides which kind of server this is, so that a total which comes only at the end
        is never taken for the last chunk's.
        """
        if self.tokens_counted is None:
            if running:
                self.tokens_counted = True
            elif has_text:
                self.tokens_counted = False
        tokens = max(0, (running or 0) - self.tokens) if self.tokens_counted else int(has_text)
        self.tokens += tokens
        if self.tokens > self._limit_tokens:
            message = f"the server sent {self.tokens} tokens and does not stop at max_tokens"
            raise StreamError(RequestError(ErrorKind.PROTOCOL, message))
        return tokens


def _stream_error(chunk: dict[str, Any]) -> RequestError:
    body = chunk.get("error")
    code = body.get("code") if isinstance(body, dict) else chunk.get("code")
    status = _whole(code)
    return RequestError(ErrorKind.SERVER, f"the server reported in the stream: {error_text(chunk)}", status)

"""What one request did, in the words of the design: due, sent, tokens, gaps, end.

All times are seconds on the clock of :func:`now_s`, so differences are exact within a process and comparable
between the processes of one machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum

_EPOCH_OFFSET_S = time.time() - time.monotonic()


def now_s() -> float:
    """Seconds since the epoch on a clock that never steps backwards (wall time at import + monotonic time).

    Two processes of one machine agree, but for steps of the wall clock (not slews) between their starts.
    """
    return _EPOCH_OFFSET_S + time.monotonic()


def monotonic_to_s(monotonic_s: float) -> float:
    """A `time.monotonic()` of any process of this machine, on the clock of :func:`now_s`."""
    return _EPOCH_OFFSET_S + monotonic_s


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SKIPPED = "skipped"


class ErrorKind(StrEnum):
    """Why a request failed, in terms a caller can act on."""

    CONNECT = "connect"  # nothing answered, or the connection broke before the first byte
    TIMEOUT_CONNECT = "timeout_connect"
    TIMEOUT_FIRST_TOKEN = "timeout_first_token"  # noqa: S105 - not a password
    TIMEOUT_GAP = "timeout_gap"
    REJECTED = "rejected"  # HTTP 4xx: the request itself is wrong
    OVERLOADED = "overloaded"  # HTTP 429 or 503: try later
    SERVER = "server"  # HTTP 5xx, or an error event inside a 200 stream
    CUT = "cut"  # the stream ended without a finish reason
    PROTOCOL = "protocol"  # what came was not a chat-completions stream


@dataclass(frozen=True, slots=True)
class RequestError:
    """One failed request's cause. `message` is one line and holds no secret."""

    kind: ErrorKind
    message: str
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two consecutive token-bearing chunks; `tokens` came with the later one."""

    end_s: float
    duration_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token-bearing chunk as it arrived.

    `text` may be empty (a token that completes no character). `tokens` is 0 where text came without a new token: the
    other half of a chunk that carries both reasoning and answer, or text that the server had held back.
    """

    at_s: float
    tokens: int
    text: str
    reasoning: bool = False


def tpot_s(first_token_s: float | None, last_token_s: float | None, completion_tokens: int | None) -> float | None:
    """Time per output token, (last - first) / (tokens - 1); None below two tokens or without usage."""
    if first_token_s is None or last_token_s is None or completion_tokens is None or completion_tokens < 2:
        return None
    return (last_token_s - first_token_s) / (completion_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from the moment it was due to its end.

    Attributes:
        request_id: Our id; also sent to the server, so that its log can be joined to ours.
        traffic_class: `camera`, `chat`, `document`, or any class that the config names.
        due_s: When the request was due: frame picked, Enter pressed, scheduled arrival.
        sent_s: When it was handed to the HTTP client; None when it never was (skipped or cancelled while waiting).
        first_token_s: Arrival of the first chunk that carries a token.
        last_token_s: Arrival of the last chunk that carries a token.
        finished_s: When the outcome was known.
        gaps: Every gap between token-bearing chunks, in order.
        prompt_tokens, cached_tokens, completion_tokens: From the server's usage; None when it sent none.
        tokens_counted: The server reported its running token count, so that every gap's `tokens` is exact; False means
            one token was assumed for each chunk that carries text.
        finish_reason: The server's (`stop`, `length`, ...); a stream without one is not a success.
        text: What was generated, reasoning excluded.
    """

    request_id: str
    traffic_class: str
    model: str
    due_s: float
    finished_s: float
    outcome: Outcome
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps: tuple[Gap, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_counted: bool = False
    finish_reason: str | None = None
    error: RequestError | None = None
    reason: str | None = None  # why it was skipped or cancelled
    text: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from due: queueing, network, tokenization, scheduling and prefill are inside."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, by :func:`tpot_s`."""
        return tpot_s(self.first_token_s, self.last_token_s, self.completion_tokens)

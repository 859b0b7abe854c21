"""What a chat's prompt holds: as much of the conversation as the model can read, and in words what was left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.config import Config
from pipeline.documents import Document
from pipeline.tokens import MESSAGE_TOKENS, TokenCounter, estimate_tokens, most_tokens
from serving.request import picture_part, text_part

_DOCUMENT_START = "Document:\n"
_SPARE_TOKENS = 32  # what a chat template puts around the whole


class PromptError(ValueError):
    """A turn that does not fit what the model can read, whatever is left out; one line with the figures."""


@dataclass(slots=True, eq=False)
class Spoken:
    """One side's turn as the model is told it."""

    role: Literal["user", "assistant"]
    text: str
    document: Document | None = None
    picture: bytes | None = None
    attachment: str = ""
    picture_dropped: bool = False  # it had one, too old to be shown again
    counted: int | None = field(default=None)  # exact tokens, once asked for

    def words(self) -> str:
        """All its text. The document precedes the question, so that the next question finds it cached."""
        return self.text if self.document is None else f"{_DOCUMENT_START}{self.document.text}\n\n{self.text}"

    def message(self, *, with_picture: bool) -> dict[str, Any]:
        """The turn in OpenAI's format."""
        if self.picture is None or not with_picture:
            return {"role": self.role, "content": self.words()}
        return {"role": self.role, "content": [text_part(self.words()), picture_part(self.picture)]}


@dataclass(frozen=True, slots=True)
class Built:
    """Messages to send.

    Attributes:
        left_out: How many of the oldest turns are not among them.
        note: What was left out, in words; empty when nothing was.
        has_document: The prompt holds a document.
    """

    messages: list[dict[str, Any]]
    left_out: int
    note: str
    has_document: bool


class PromptBuilder:
    """Fits conversations into the model's length.

    Args:
        max_model_len: The model's length in tokens as known now; None when nobody can say.
        model: The served model's name as known now.
    """

    def __init__(
        self,
        config: Config,
        counter: TokenCounter,
        *,
        max_model_len: Callable[[], int | None],
        model: Callable[[], str | None],
    ) -> None:
        self._system = config.chat.system_prompt
        self._max_history = config.chat.max_history_messages
        self._max_pictures = config.serving.server.max_images_per_request
        one = config.serving.server.image_tokens.count(
            config.describe.picture_width_px, config.describe.picture_height_px
        )
        self._picture_tokens = one + one // 8 + _SPARE_TOKENS  # separators between tiles
        self._counter = counter
        self._max_model_len = max_model_len
        self._model = model

    async def build(self, history: Sequence[Spoken], now: Spoken, max_tokens: int, *, gone: int = 0) -> Built:
        """Messages for `now` after as much of `history` as fits beside an answer of `max_tokens`.

        Args:
            history: Turns so far, oldest first; `gone` more were before them and are not kept any more.
            now: The user's new turn.
            max_tokens: What the answer may take.
            gone: Only told of.

        Raises:
            PromptError: `now` alone does not fit.
        """
        turns = [*history, now]
        allowed = max(1, self._max_history)
        kept = turns[-allowed:]
        limit = self._max_model_len()
        if limit is not None:
            room = limit - max_tokens - _SPARE_TOKENS - most_tokens(self._system)
            # What fits even at a token a byte needs no counting, so that a short chat's first token waits for nothing.
            counts = [most_tokens(turn.words()) for turn in kept]
            if sum(counts) + sum(self._overhead(turn) for turn in kept) > room:
                counts = [await self._count(turn) for turn in kept]
            kept = kept[self._first_that_fits(kept, counts, room) :]
            if not kept:
                raise PromptError(self._too_long(now, counts[-1] + self._overhead(now), room))
        while kept[0].role == "assistant":
            kept = kept[1:]
        pictures = [turn for turn in kept if turn.picture is not None][-self._max_pictures :]
        left_out = len(turns) - len(kept)
        hidden = sum(turn.picture is not None or turn.picture_dropped for turn in kept) - len(pictures)
        notes = []
        if left_out + gone:
            notes.append(f"the {left_out + gone} oldest messages were left out to fit what the model reads")
        if hidden:
            notes.append(f"only the newest {self._max_pictures} pictures were shown to the model")
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*system, *(turn.message(with_picture=turn in pictures) for turn in kept)]
        for turn in kept:
            if turn.picture is not None and turn not in pictures:
                turn.picture, turn.picture_dropped = None, True
        return Built(messages, left_out, "; ".join(notes), any(turn.document is not None for turn in kept))

    def _overhead(self, turn: Spoken) -> int:
        return MESSAGE_TOKENS + (self._picture_tokens if turn.picture is not None else 0)

    async def _count(self, turn: Spoken) -> int:
        if turn.counted is None:
            count, exact = await self._counter.count(turn.words(), self._model())
            if not exact:
                return count
            turn.counted = count
        return turn.counted

    def _first_that_fits(self, turns: Sequence[Spoken], counts: Sequence[int], room: int) -> int:
        """Index of the oldest turn that can stay; `len(turns)` when not even the newest fits."""
        first = len(turns)
        for index in range(len(turns) - 1, -1, -1):
            room -= counts[index] + self._overhead(turns[index])
            if room < 0:
                break
            first = index
        return first

    def _too_long(self, now: Spoken, tokens: int, room: int) -> str:
        if now.document is None:
            return f"the message is about {tokens:,} tokens, allowed: {max(0, room):,}; shorten it"
        document = now.counted or estimate_tokens(now.words())
        return (
            f"document {now.document.name} with the question is about {document:,} tokens, allowed: {max(0, room):,} "
            "(the model's length less the answer's); upload a part of it"
        )

"""What a chat's prompt holds, and what is left out of it, to the token."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pipeline.config import Config
from pipeline.documents import Document
from pipeline.prompt import PromptBuilder, PromptError, Spoken
from pipeline.tokens import MESSAGE_TOKENS, TokenCounter, estimate_tokens

SPARE = 32


class Counter:
    """A token a letter of the text; `exact` as told."""

    def __init__(self, *, exact: bool = True) -> None:
        self.exact = exact
        self.asked: list[str] = []

    async def count(self, text: str, _model: str | None) -> tuple[int, bool]:
        self.asked.append(text)
        return len(text), self.exact


def builder(limit: int | None, counter: Counter | None = None, **chat: Any) -> PromptBuilder:
    settings = {"chat": {"system_prompt": "", **chat}}
    counter = counter or Counter()
    return PromptBuilder(
        Config.model_validate(settings), cast(TokenCounter, counter), max_model_len=lambda: limit, model=lambda: "m"
    )


def talk(*texts: str) -> list[Spoken]:
    """Question, answer, question, ..."""
    return [Spoken("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]


def told(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages]


async def test_everything_is_kept_while_nobody_knows_the_models_length() -> None:
    built = await builder(None, system_prompt="Be brief.").build(talk("a", "b"), Spoken("user", "c"), 100)
    assert built.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert (built.left_out, built.note, built.has_document) == (0, "", False)


async def test_the_newest_messages_are_kept_and_never_an_answer_without_its_question() -> None:
    built = await builder(None, max_history_messages=2).build(talk("a", "b"), Spoken("user", "c"), 100, gone=4)
    assert told(built.messages) == ["c"]  # "b" would come first
    assert built.left_out == 2
    assert built.note == "the 6 oldest messages were left out to fit what the model reads"


@pytest.mark.parametrize(("spare", "kept"), [(0, ["old question", "old answer", "new"]), (-1, ["new"])])
async def test_what_fits_to_the_token(spare: int, kept: list[str]) -> None:
    turns = talk("old question", "old answer")
    needed = sum(len(text) for text in ("old question", "old answer", "new")) + 3 * MESSAGE_TOKENS
    built = await builder(needed + spare + SPARE + 20).build(turns, Spoken("user", "new"), 20)
    assert told(built.messages) == kept


async def test_nothing_is_counted_where_bytes_fit_and_each_text_once_where_not() -> None:
    counter = Counter()
    now = Spoken("user", "é" * 10)  # 20 bytes
    builds = builder(20 + MESSAGE_TOKENS + SPARE + 5, counter)
    await builds.build([], now, 5)
    assert counter.asked == []
    for _ in range(2):
        await builds.build([], now, 6)
    assert counter.asked == [now.text]
    guessing = Counter(exact=False)
    builds = builder(20 + MESSAGE_TOKENS + SPARE + 5, guessing)
    for _ in range(2):
        await builds.build([], Spoken("user", now.text), 6)
    assert len(guessing.asked) == 2  # an estimate is not kept


async def test_a_message_that_does_not_fit_is_refused_with_the_figures() -> None:
    with pytest.raises(PromptError, match=r"^the message is about 1,008 tokens, allowed: 448; shorten it$"):
        await builder(500).build([], Spoken("user", "x" * 1000), 20)
    with pytest.raises(PromptError, match="allowed: 0;"):
        await builder(10).build([], Spoken("user", "x" * 1000), 20)
    document = Document("d", "plan.txt", "x" * 1000)
    words = r"^document plan.txt with the question is about 1,018 tokens, allowed: 448 .*upload a part of it$"
    with pytest.raises(PromptError, match=words):
        await builder(500).build([], Spoken("user", "Where?", document), 20)


async def test_a_refused_document_is_estimated_where_nobody_counts() -> None:
    now = Spoken("user", "Where?", Document("d", "plan.txt", "x" * 1000))
    with pytest.raises(PromptError, match=f"about {estimate_tokens(now.words()):,} tokens"):
        await builder(500, Counter(exact=False)).build([], now, 20)


async def test_a_document_precedes_its_question() -> None:
    built = await builder(None).build([], Spoken("user", "Where?", Document("d", "plan.txt", "At the gate.")), 20)
    assert told(built.messages) == ["Document:\nAt the gate.\n\nWhere?"]
    assert built.has_document


async def test_only_the_newest_pictures_are_shown_and_older_ones_let_go() -> None:
    history = [Spoken("user", "1", picture=b"one"), Spoken("assistant", "a"), Spoken("user", "2", picture=b"two")]
    now = Spoken("user", "3", picture=b"three")
    builds = builder(None)  # two pictures a request
    built = await builds.build([*history, Spoken("assistant", "b")], now, 20)
    kinds = [type(message["content"]).__name__ for message in built.messages]
    assert kinds == ["str", "str", "list", "str", "list"]
    assert built.note == "only the newest 2 pictures were shown to the model"
    assert (history[0].picture, history[0].picture_dropped) == (None, True)
    again = await builds.build(history, Spoken("user", "4"), 20)
    assert again.note == "only the newest 2 pictures were shown to the model"  # it is still told


async def test_a_picture_takes_its_room() -> None:
    counter = Counter()
    server = Config().serving.server
    tokens = server.image_tokens.count(512, 1024)
    room = 1 + MESSAGE_TOKENS + tokens + tokens // 8 + SPARE
    fits = await builder(room + SPARE + 5, counter).build([], Spoken("user", "?", picture=b"jpeg"), 5)
    assert len(fits.messages) == 1
    with pytest.raises(PromptError):
        await builder(room + SPARE + 4, counter).build([], Spoken("user", "?", picture=b"jpeg"), 5)

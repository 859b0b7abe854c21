from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from serving.config import ClassConfig
from serving.load.contents import Contents, Turn, with_noise
from serving.load.words import Words, find_words
from serving.workload import ClassLoad, Pictures, PlannedRequest
from tests.scripted_server import Received, Script, ScriptedServer, Send, problem

WORDS = Words(tuple(f"w{number}" for number in range(50)), exact=True)
CLASSES = {
    "camera": ClassConfig(ttft_p95_ms=1, itl_p99_ms=1, max_tokens=8, extra_body={"cut": False}, priority=2),
    "chat": ClassConfig(ttft_p95_ms=1, itl_p99_ms=1, max_tokens=8, temperature=0.7),
}
SIZE = Pictures(width_px=64, height_px=48)


class Grey:
    def picture(self, number: int, width_px: int, height_px: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.full((height_px, width_px, 3), 40 + number % 100, dtype=np.uint8)


def contents(**changes: Any) -> Contents:
    return Contents(WORDS, CLASSES, {}, Grey(), **changes)


def chat(number: int = 0, tokens: int = 12, **changes: Any) -> PlannedRequest:
    return PlannedRequest(number, "chat", 0.0, tokens, 8, **changes)


def camera(number: int = 0) -> PlannedRequest:
    return PlannedRequest(number, "camera", 0.0, 6, 8, pictures=SIZE)


def test_a_text_has_the_words_that_were_planned_and_a_shared_start() -> None:
    first = contents().prepare(chat(0, 20, prefix="chat/1", prefix_tokens=8)).text.split()
    second = contents().prepare(chat(1, 30, prefix="chat/1", prefix_tokens=8)).text.split()
    other = contents().prepare(chat(2, 30, prefix="chat/2", prefix_tokens=8)).text.split()
    assert (len(first), len(second)) == (20, 30)
    assert first[:8] == second[:8]
    assert first[8:16] != second[8:16]
    assert other[:8] != first[:8]


def test_a_later_turn_says_only_what_is_new() -> None:
    prepared = contents().prepare(chat(3, 50, history_tokens=40, prefix="chat/1", prefix_tokens=8))
    assert len(prepared.text.split()) == 10
    history = [Turn("user", "before"), Turn("assistant", "said")]
    request = contents().request(prepared, 5.0, history)
    assert [message["content"] for message in request.messages] == ["before", "said", prepared.text]
    assert request.due_s == 5.0


def test_nothing_is_said_or_shown_twice_across_requests_blocks_and_runs() -> None:
    made = [
        contents(block=block, nonce=nonce).prepare(camera(number))
        for number in (0, 1)
        for block in (0, 1)
        for nonce in (7, 8)
    ]
    assert len({item.text for item in made}) == len(made)
    assert len({item.pictures for item in made}) == len(made)
    assert len({item.request_id for item in made}) == len(made)


def test_one_seed_makes_the_same_request_again() -> None:
    assert contents(block=1, nonce=7).prepare(camera(3)) == contents(block=1, nonce=7).prepare(camera(3))


def test_cache_friendly_says_and_shows_the_same_again() -> None:
    made = [contents(block=block, cache_friendly=True).prepare(camera(number)) for number in (0, 5) for block in (0, 1)]
    assert len({item.text for item in made}) == 1
    assert len({item.pictures for item in made}) == 1


def test_noise_outlives_the_jpeg_and_leaves_the_picture() -> None:
    grey = np.full((48, 64, 3), 90, dtype=np.uint8)
    noisy = [with_noise(grey, np.random.default_rng(seed)) for seed in (1, 2)]
    assert (grey == 90).all()
    prepared = contents().prepare(camera(50))
    (jpeg,) = prepared.pictures
    shown = np.asarray(Image.open(io.BytesIO(jpeg)))
    assert shown.shape == (48, 64, 3)
    assert shown[:16, :16].std() > 30
    assert shown[24:, 24:].std() < 2
    assert (noisy[0] != noisy[1]).any()


@pytest.mark.parametrize("first", [False, True])
def test_a_picture_goes_before_or_after_the_text(first: bool) -> None:
    content = contents(picture_first=first)
    parts = content.request(content.prepare(camera()), 0.0).messages[0]["content"]
    assert [part["type"] for part in parts] == (["image_url", "text"] if first else ["text", "image_url"])


def test_a_class_may_send_its_own_extra_body() -> None:
    def extra(**changes: Any) -> dict[str, Any]:
        content = contents(**changes)
        return dict(content.request(content.prepare(camera()), 0.0).extra_body)

    own = Contents(WORDS, CLASSES, {"camera": ClassLoad(extra_body={"cut": True})}, Grey())
    assert extra() == {"cut": False, "ignore_eos": True}
    assert extra(exact_output=False) == {"cut": False}
    assert own.request(own.prepare(camera()), 0.0).extra_body == {"cut": True, "ignore_eos": True}


@pytest.mark.parametrize(
    ("use", "planned", "sent"),
    [
        pytest.param(False, 5, 0, id="a server in order of arrival would refuse it"),
        pytest.param(True, 5, 5, id="the load's"),
        pytest.param(True, 0, 2, id="the class's"),
    ],
)
def test_priorities(use: bool, planned: int, sent: int) -> None:
    content = contents(use_priority=use)
    request = PlannedRequest(0, "camera", 0.0, 6, 8, priority=planned)
    assert content.request(content.prepare(request), 0.0).priority == sent


def test_pictures_without_a_source_are_a_clear_error() -> None:
    with pytest.raises(ValueError, match="camera has pictures"):
        Contents(WORDS, CLASSES, {}).prepare(camera())


def tokenizer(tokens: dict[str, int]) -> Any:
    """A vocabulary in which a word is one token, or as many as `tokens` says."""

    def pick(request: Received) -> Script:
        words = request.body["prompt"].split()
        count = sum(tokens.get(word, 1) for word in words)
        return Script([Send(f'{{"count": {count}}}'.encode())], headers={"content-type": "application/json"})

    return pick


async def test_words_of_several_tokens_are_left_out() -> None:
    with ScriptedServer(tokenizer({"water": 2, "you": 3})) as server:
        words = await find_words(server.endpoint, "scripted")
    assert words.exact
    assert not {"water", "you"} & set(words.words)
    assert "time" in words.words


async def test_words_that_are_one_token_only_after_a_space_are_left_out() -> None:
    def pick(request: Received) -> Script:
        words = request.body["prompt"].split()
        return tokenizer({})(request) if words[0] != "study" else tokenizer({"study": 2})(request)

    with ScriptedServer(pick) as server:
        words = await find_words(server.endpoint, "scripted")
    assert words.exact
    assert "study" not in words.words
    assert "street" in words.words


async def test_a_server_that_does_not_tokenize_gives_common_words_that_are_marked() -> None:
    with ScriptedServer(problem(404, {"error": "no such page"})) as server:
        words = await find_words(server.endpoint, "scripted")
    assert not words.exact
    assert len(words.words) > 100


async def test_a_vocabulary_that_cuts_everything_is_not_called_exact() -> None:
    with ScriptedServer(lambda request: tokenizer(dict.fromkeys(request.body["prompt"].split(), 2))(request)) as server:
        words = await find_words(server.endpoint, "scripted")
    assert not words.exact

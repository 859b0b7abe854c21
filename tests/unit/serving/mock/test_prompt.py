from __future__ import annotations

import io
import json
from typing import Any

import pytest
from PIL import Image

from serving.config import ImageTokens
from serving.mock.prompt import PromptError, block_contents, json_tokens, read_prompt, split_tokens, written_tokens
from serving.request import picture_part, text_part

RULE = ImageTokens()


def jpeg(width_px: int, height_px: int, shade: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width_px, height_px), (shade, 0, 0)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param("", 0, id="empty"),
        pytest.param("hello there again", 3, id="words"),
        pytest.param("internationalization", 3, id="a long word"),
        pytest.param("in 2026, at 9.", 7, id="digits and signs"),
        pytest.param("你好 ~~\n\n_x", 7, id="other scripts"),
    ],
)
def test_tokens_are_the_text(text: str, count: int) -> None:
    tokens = split_tokens(text)
    assert "".join(tokens) == text
    assert len(tokens) == count


def test_an_answer_said_back_is_the_same_tokens() -> None:
    """So that a conversation's next turn finds the last one in the prefix cache."""
    written = written_tokens(50)
    assert split_tokens("".join(written)) == written


def test_pictures_are_counted_by_the_models_rule_where_they_stand() -> None:
    content = [text_part("who is there?"), picture_part(jpeg(512, 1024)), picture_part(jpeg(256, 256))]
    prompt = read_prompt([{"role": "user", "content": content}], RULE)
    first, second = prompt.images
    assert (first.tokens, second.tokens) == (RULE.count(512, 1024), RULE.count(256, 256))
    assert first.offset == 4 + len(split_tokens("who is there?"))
    assert second.offset == first.offset + first.tokens
    assert len(prompt.tokens) == second.offset + second.tokens + 4


def test_blocks_are_equal_as_far_as_prompts_are() -> None:
    def blocks(text: str, shade: int) -> list[bytes]:
        content = [text_part(text), picture_part(jpeg(512, 512, shade))]
        return list(block_contents(read_prompt([{"role": "user", "content": content}], RULE).tokens, 16))

    words = "some words " * 30
    same, other = blocks(words, 0), blocks(words, 200)
    assert blocks(words, 0) == same
    whole = (4 + 60) // 16
    assert same[:whole] == other[:whole]
    assert not set(same[whole:]) & set(other[whole:])
    assert not set(blocks("x" + words, 0)) & set(same)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param([{"type": "audio"}], "'audio', allowed: text and image_url", id="unknown part"),
        pytest.param(["text"], "allowed: text and image_url", id="no part at all"),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "http://evil.test/p.png"}}],
            "nothing is fetched",
            id="an address",
        ),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,!!"}}], "cannot be read", id="no base64"
        ),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            "cannot be read",
            id="no picture",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(content: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message) as refused:
        read_prompt([{"role": "user", "content": content}], RULE)
    assert "\n" not in str(refused.value)


def test_an_answer_of_a_schema_has_its_form() -> None:
    schema = {
        "type": "object",
        "properties": {
            "clothes": {"type": "array", "items": {"type": "string"}, "minItems": 2},
            "count": {"type": "integer", "minimum": 3},
            "sure": {"type": "boolean"},
            "colour": {"enum": ["red", "blue"]},
        },
    }
    answer = json.loads("".join(json_tokens(schema)))
    assert answer == {"clothes": ["simulated"] * 2, "count": 3, "sure": False, "colour": "red"}

"""What a chat request is to the simulated engine: how many tokens, which of them are pictures, what blocks hold.

Nothing is known of the model's tokenizer. A token is a piece of a word of up to eight letters, up to three digits, or
one other character, each with the space before it, which comes within about a tenth of what today's tokenizers make
of English. Pictures are counted by the model's own rule.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image, UnidentifiedImageError

from serving.config import ImageTokens
from serving.simstate import SimImage

_TOKEN = re.compile(r" ?(?:[^\W\d_]{1,8}|\d{1,3}|[^\w\s]|_)|\s")
_MESSAGE_TOKENS = 4  # role and separators, as chat templates add them
_SENTENCE = "This is simulated text: no model wrote it, only its timing is worked out. "
_MOST_SCHEMA_DEPTH = 16


class PromptError(ValueError):
    """The messages cannot be taken; the message is one line."""


def split_tokens(text: str) -> list[str]:
    """The tokens of a text; together they are the text."""
    return _TOKEN.findall(text)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine sees it: its tokens' identities, and the images among them."""

    tokens: tuple[str, ...]
    images: tuple[SimImage, ...]


def read_prompt(messages: Sequence[Mapping[str, Any]], rule: ImageTokens) -> Prompt:
    """Count what the messages hold, in their order.

    Raises:
        PromptError: A message is of no known form, or a picture is not one.
    """
    tokens: list[str] = []
    images: list[SimImage] = []
    for message in messages:
        tokens += [f"<{message.get('role')}>"] * _MESSAGE_TOKENS
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text":
                tokens += split_tokens(str(part.get("text") or ""))
            elif kind == "image_url":
                digest, count = _read_picture(part.get("image_url"), rule)
                images.append(SimImage(offset=len(tokens), tokens=count, content=digest))
                tokens += [f"{digest}/{index}" for index in range(count)]
            else:
                raise PromptError(f"a part of a message is of type {kind!r}, allowed: text and image_url")
    tokens += ["<assistant>"] * _MESSAGE_TOKENS  # the answer's own beginning, as the next turn says it again
    return Prompt(tuple(tokens), tuple(images))


def _read_picture(value: object, rule: ImageTokens) -> tuple[str, int]:
    """A picture's digest and its tokens."""
    url = value.get("url") if isinstance(value, dict) else value
    head, comma, data = str(url).partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise PromptError("a picture is no data:image/...;base64 URL, allowed: only those; nothing is fetched")
    try:
        raw = base64.b64decode(data, validate=True)
        with Image.open(io.BytesIO(raw)) as picture:  # reads the size, not the pixels
            count = rule.count(*picture.size)
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise PromptError(f"a picture cannot be read: {' '.join(str(error).split())}") from None
    return hashlib.blake2b(raw, digest_size=12).hexdigest(), count


def written_tokens(count: int) -> list[str]:
    """The tokens of an answer: plainly no model's."""
    repeats = count // len(split_tokens(_SENTENCE)) + 2
    return split_tokens(_SENTENCE * repeats)[:count]


def json_tokens(schema: Mapping[str, Any]) -> list[str]:
    """The tokens of an answer that has the form that was asked for."""
    return split_tokens(json.dumps(_example(schema, 0)))


def _example(schema: object, depth: int) -> Any:  # noqa: PLR0911 - a table of types
    if not isinstance(schema, dict) or depth > _MOST_SCHEMA_DEPTH:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties = schema.get("properties")
        named = properties if isinstance(properties, dict) else {}
        return {name: _example(part, depth + 1) for name, part in named.items()}
    if kind == "array":
        least = schema.get("minItems")
        return [_example(schema.get("items"), depth + 1)] * (min(least, 64) if isinstance(least, int) else 1)
    if kind in ("integer", "number"):
        return schema.get("minimum", 0)
    if kind == "boolean":
        return False
    return "simulated" if kind == "string" else None


def block_contents(tokens: Sequence[str], block_tokens: int) -> Iterator[bytes]:
    """What each full block holds: equal for two requests as far as all their tokens up to there are."""
    chain = b""
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        piece = "\x1f".join(tokens[end - block_tokens : end]).encode("utf-8", "replace")
        chain = hashlib.blake2b(chain + piece, digest_size=16).digest()
        yield chain

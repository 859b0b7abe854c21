"""What a planned request says and shows: texts of an exact number of tokens, pictures, and the turns before.

Content is unique to each request wherever a cache would otherwise turn the load into hits: texts are random words,
and every picture carries a patch of noise, so that neither prefix cache nor multimodal cache knows it. What the load
declares as shared (a prefix, a conversation's turns before) is shared. With `cache_friendly` it is the other way round:
all requests of a class say and show the same.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from serving.config import ClassConfig
from serving.load.words import Words, join
from serving.request import ModelRequest, picture_part, text_part
from serving.workload import ClassLoad, PlannedRequest

Pixels = npt.NDArray[np.uint8]

_NOISE_PX = 16
_JPEG_QUALITY = 90


class PictureSource(Protocol):
    """Where pictures come from."""

    def picture(self, number: int, width_px: int, height_px: int) -> Pixels:
        """Picture `number` (any number; it may repeat) as RGB, shape (height_px, width_px, 3)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's own part, made ahead of its time: the new text and the pictures as JPEG."""

    planned: PlannedRequest
    request_id: str
    text: str
    pictures: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What was said before in a conversation."""

    role: str
    text: str


@dataclass(frozen=True)
class Contents:
    """Turns planned requests into requests for the model.

    Attributes:
        words: Of one token each.
        classes, loads: By class name; `loads` may lack classes.
        pictures: Needed as soon as a class has pictures.
        block: Part of every request's identity, so that no two blocks say the same.
        nonce: Differs between runs, so that a server that is still warm from the last one knows nothing of it.
        use_priority: Send priorities; a server that schedules in order of arrival refuses them.
        exact_output: Ask the server to ignore the model's own end of text, so that answers have the planned length.
    """

    words: Words
    classes: Mapping[str, ClassConfig]
    loads: Mapping[str, ClassLoad]
    pictures: PictureSource | None = None
    block: int = 0
    nonce: int = 0
    cache_friendly: bool = False
    picture_first: bool = False
    use_priority: bool = False
    exact_output: bool = True
    _prefixes: dict[tuple[str, int], str] = field(default_factory=dict)

    def prepare(self, planned: PlannedRequest) -> Prepared:
        """Make text and pictures of one request. Takes some milliseconds for a picture.

        Raises:
            ValueError: The request has pictures and there is no source of them.
        """
        if self.cache_friendly:
            rng = np.random.default_rng([zlib.crc32(planned.traffic_class.encode()), planned.history_tokens])
        else:
            rng = np.random.default_rng([self.nonce, self.block, planned.number])
        new = planned.text_tokens - planned.history_tokens
        prefix = self._prefix(planned) if planned.history_tokens == 0 else ""
        text = join([prefix, self.words.text(new - (planned.prefix_tokens if prefix else 0), rng)])
        request_id = f"{self.nonce:08x}-{self.block:04d}-{planned.number:05d}"
        return Prepared(planned, request_id, text, tuple(self._pictures(planned, rng)))

    def request(self, prepared: Prepared, due_s: float, history: Sequence[Turn] = ()) -> ModelRequest:
        """The request itself; `history` is what was really said before."""
        planned = prepared.planned
        settings, load = self.classes[planned.traffic_class], self.loads.get(planned.traffic_class)
        extra = settings.extra_body if load is None or load.extra_body is None else load.extra_body
        if self.exact_output:
            extra = {**extra, "ignore_eos": True}
        shown = [picture_part(jpeg) for jpeg in prepared.pictures]
        said = [text_part(prepared.text)]
        content: Any = (shown + said if self.picture_first else said + shown) if shown else prepared.text
        return ModelRequest(
            traffic_class=planned.traffic_class,
            messages=[*({"role": turn.role, "content": turn.text} for turn in history),
                      {"role": "user", "content": content}],
            max_tokens=planned.output_tokens,
            due_s=due_s,
            temperature=settings.temperature,
            request_id=prepared.request_id,
            priority=(planned.priority or settings.priority) if self.use_priority else 0,
            extra_body=extra,
        )  # fmt: skip

    def _prefix(self, planned: PlannedRequest) -> str:
        """The same words for every request that begins with it."""
        if planned.prefix is None:
            return ""
        key = (planned.prefix, planned.prefix_tokens)
        if key not in self._prefixes:
            rng = np.random.default_rng(zlib.crc32(planned.prefix.encode()))
            self._prefixes[key] = self.words.text(planned.prefix_tokens, rng)
        return self._prefixes[key]

    def _pictures(self, planned: PlannedRequest, rng: np.random.Generator) -> Iterable[bytes]:
        wanted = planned.pictures
        if wanted is None:
            return
        if self.pictures is None:
            raise ValueError(f"class {planned.traffic_class} has pictures, and no source of pictures was given")
        for index in range(wanted.count):
            number = index if self.cache_friendly else planned.number * wanted.count + index
            pixels = self.pictures.picture(number, wanted.width_px, wanted.height_px)
            if not self.cache_friendly:
                pixels = with_noise(pixels, rng)
            yield encode_jpeg(pixels)


def with_noise(pixels: Pixels, rng: np.random.Generator) -> Pixels:
    """A copy with a random patch in its corner, coarse enough to outlive JPEG."""
    copy = pixels.copy()
    height, width = min(_NOISE_PX, copy.shape[0]), min(_NOISE_PX, copy.shape[1])
    copy[:height, :width] = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return copy


def encode_jpeg(pixels: Pixels) -> bytes:
    """RGB pixels as JPEG."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=_JPEG_QUALITY)
    return file.getvalue()

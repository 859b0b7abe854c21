"""How many prompt tokens a picture becomes, by the rules of the families' own image processors.

Tiled (Idefics3, SmolVLM): scaled so that the longer edge is `longest_edge_px` (up or down), the longer edge rounded up
to whole tiles and the shorter in proportion, and one tile of the whole picture added when there is more than one.
Patches (Qwen-VL): both edges rounded to multiples of a cell, then scaled into the allowed number of pixels ("smart
resize"). The rules are those of Hugging Face transformers 5 (`image_processing_pil_idefics3.py`,
`image_processing_pil_qwen2_vl.py`); the tests run them side by side with the real processors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LONGEST_EDGE_LIMIT_PX = 4096  # Idefics3's own upper bound
_MAX_ASPECT = 200  # Qwen-VL refuses narrower pictures


@dataclass(frozen=True, slots=True)
class Tiling:
    """The grid a picture is cut into. `tiles` counts the tile of the whole picture, too."""

    rows: int
    columns: int

    @property
    def tiles(self) -> int:
        """Pictures that the encoder sees."""
        cells = self.rows * self.columns
        return cells + 1 if cells > 1 else 1

    @property
    def separator_tokens(self) -> int:
        """Tokens around and between tiles for a tokenizer that has the family's row, column and image marks.

        Each tile is preceded by an image mark and a position mark, rows end with a line break, and the whole picture's
        tile is followed by a closing mark; the last row's break and the one before the whole picture merge into one.
        """
        if self.tiles == 1:
            return 3
        return 2 * self.tiles + self.rows + 1


def tiling(width_px: int, height_px: int, *, longest_edge_px: int, tile_px: int) -> Tiling:
    """Grid of a picture of `width_px` x `height_px`.

    Raises:
        ValueError: A size is below one pixel.
    """
    _check(width_px, height_px)
    width, height = _to_longest_edge(width_px, height_px, longest_edge_px)
    if max(width, height) > _LONGEST_EDGE_LIMIT_PX:
        width, height = _below_limit(width, height)
    aspect = width / height
    if width >= height:
        columns = math.ceil(width / tile_px)
        rows = math.ceil(int(columns * tile_px / aspect) / tile_px)
    else:
        rows = math.ceil(height / tile_px)
        columns = math.ceil(int(rows * tile_px * aspect) / tile_px)
    return Tiling(rows=max(1, rows), columns=max(1, columns))


def _to_longest_edge(width: int, height: int, longest: int) -> tuple[int, int]:
    """Scale the longer edge to `longest`; the shorter is cut to whole pixels, and raised to an even number."""
    aspect = width / height
    if width >= height:
        short = int(longest / aspect)
        return longest, max(1, short + short % 2)
    short = int(longest * aspect)
    return max(1, short + short % 2), longest


def _below_limit(width: int, height: int) -> tuple[int, int]:
    aspect = width / height
    if width >= height:
        return _LONGEST_EDGE_LIMIT_PX, max(1, int(_LONGEST_EDGE_LIMIT_PX / aspect))
    return max(1, int(_LONGEST_EDGE_LIMIT_PX * aspect)), _LONGEST_EDGE_LIMIT_PX


def patch_grid(width_px: int, height_px: int, *, cell_px: int, min_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Columns and rows of cells, one token each, after Qwen-VL's smart resize.

    `cell_px` is patch size x merge size (28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL). `min_tokens` and
    `max_tokens` are the processor's pixel bounds divided by the pixels of a cell.

    Raises:
        ValueError: A size is below one pixel, or the picture is more than 200 times as long as wide.
    """
    _check(width_px, height_px)
    if max(width_px, height_px) > _MAX_ASPECT * min(width_px, height_px):
        raise ValueError(
            f"a picture of {width_px}x{height_px} px, allowed: at most {_MAX_ASPECT} times as long as wide"
        )
    pixels, cell = width_px * height_px, cell_px * cell_px
    columns, rows = round(width_px / cell_px), round(height_px / cell_px)
    if columns * rows > max_tokens:
        shrink = math.sqrt(pixels / (max_tokens * cell))
        columns = max(1, math.floor(width_px / shrink / cell_px))
        rows = max(1, math.floor(height_px / shrink / cell_px))
    elif columns * rows < min_tokens:
        grow = math.sqrt(min_tokens * cell / pixels)
        columns, rows = math.ceil(width_px * grow / cell_px), math.ceil(height_px * grow / cell_px)
    return columns, rows


def _check(width_px: int, height_px: int) -> None:
    if width_px < 1 or height_px < 1:
        raise ValueError(f"a picture of {width_px}x{height_px} px, allowed: 1 px or more each way")

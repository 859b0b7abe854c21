from __future__ import annotations

import pytest
from pydantic import ValidationError

from serving.config import ImageTokens
from serving.imagetokens import patch_grid, tiling

SAMPLE = ImageTokens()
SMOLVLM = ImageTokens(tile_px=512, tokens_per_tile=64, longest_edge_px=2048)
QWEN2_VL = ImageTokens(kind="patches", pixels_per_token=28 * 28, min_tokens=4, max_tokens=1280)


@pytest.mark.parametrize(
    ("rule", "width", "height", "tokens"),
    [
        pytest.param(SAMPLE, 512, 1024, 9 * 64, id="portrait: 2 x 4 tiles and the whole"),
        pytest.param(SAMPLE, 960, 1280, 13 * 64, id="3 x 4 tiles and the whole, as a server counted"),
        pytest.param(SAMPLE, 1280, 720, 13 * 64, id="a camera's frame: 4 x 3 tiles and the whole"),
        pytest.param(SAMPLE, 100, 100, 17 * 64, id="small pictures are enlarged"),
        pytest.param(SMOLVLM, 1280, 720, 13 * 64, id="SmolVLM"),
        pytest.param(SMOLVLM, 4000, 40, 5 * 64, id="a strip"),
        pytest.param(ImageTokens(longest_edge_px=256), 640, 480, 64, id="one tile is not counted twice"),
        pytest.param(QWEN2_VL, 1280, 720, 46 * 26, id="Qwen2-VL: rounded to multiples of 28"),
        pytest.param(QWEN2_VL, 1920, 1080, 47 * 26, id="Qwen2-VL: shrunk below 1,280 tokens"),
        pytest.param(QWEN2_VL, 28, 28, 4, id="Qwen2-VL: enlarged to 4 tokens"),
    ],
)
def test_tokens_of_a_picture(rule: ImageTokens, width: int, height: int, tokens: int) -> None:
    assert rule.count(width, height) == tokens


def test_four_cameras_become_tokens() -> None:
    """A 1280x720 frame every 2 s from 4 cameras."""
    assert SAMPLE.count(1280, 720) * 4 / 2 == 1664


def test_separators_between_tiles() -> None:
    grid = tiling(960, 1280, longest_edge_px=1024, tile_px=256)
    assert (grid.rows, grid.columns, grid.tiles) == (4, 3, 13)
    assert grid.separator_tokens == 2 * 13 + 4 + 1
    assert tiling(10, 10, longest_edge_px=256, tile_px=256).separator_tokens == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param({"pixels_per_token": 1000}, "a square", id="cells that are no squares"),
        pytest.param({"longest_edge_px": 1000}, "multiple of tile_px", id="tiles that do not fill the edge"),
        pytest.param({"kind": "patches", "min_tokens": 9, "max_tokens": 8}, "at most max_tokens", id="bounds"),
    ],
)
def test_rules_that_are_none(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ImageTokens.model_validate(values)


def test_pictures_that_are_none() -> None:
    with pytest.raises(ValueError, match="1 px or more"):
        SAMPLE.count(0, 10)
    with pytest.raises(ValueError, match="200 times"):
        patch_grid(10_000, 10, cell_px=28, min_tokens=4, max_tokens=1280)

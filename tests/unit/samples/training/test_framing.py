"""Crops and tiles: the product's own geometry."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import DescribeConfig
from pipeline.describe import crop_view
from pipeline.describe import surroundings as product_surroundings
from samples.training import framing


@pytest.mark.parametrize(
    "box",
    [
        pytest.param((300, 100, 380, 300), id="in the middle"),
        pytest.param((0, 40, 60, 200), id="at the left border"),
        pytest.param((560, 200, 640, 360), id="in the lower right corner"),
        pytest.param((100, 0, 400, 360), id="as high as the frame"),
        pytest.param((0, 0, 640, 360), id="the whole frame"),
        pytest.param((200, 150, 420, 200), id="lying down"),
        pytest.param((10, 10, 12, 14), id="tiny"),
    ],
)
def test_the_crop_is_the_product_s(box: tuple[int, int, int, int]) -> None:
    config = DescribeConfig()
    aspect = config.picture_width_px / config.picture_height_px
    expected = product_surroundings(box, 640, 360, config.crop_margin, aspect)
    assert framing.surroundings(box, 640, 360) == pytest.approx(expected, abs=1)
    image = np.random.default_rng(0).integers(0, 255, (360, 640, 3), np.uint8)
    assert framing.tight_crop(image, box).shape == crop_view(image, box, config).shape
    difference = np.abs(framing.tight_crop(image, box).astype(int) - crop_view(image, box, config))
    assert difference.mean() < 3


@pytest.mark.parametrize("shape", [(1024, 512), (512, 1024)], ids=["crop", "frame"])
def test_tiles_are_cut_row_by_row_and_end_with_the_whole(shape: tuple[int, int]) -> None:
    picture = np.zeros((*shape, 3), np.uint8)
    columns = shape[1] // 256
    for tile in range(8):
        row, column = divmod(tile, columns)
        picture[row * 256 : (row + 1) * 256, column * 256 : (column + 1) * 256] = 20 * tile
    tiles = framing.tiles_of(picture)
    assert tiles.shape == (9, 256, 256, 3)
    assert [int(tile.mean()) for tile in tiles[:8]] == [20 * tile for tile in range(8)]
    assert tiles[8].mean() == pytest.approx(70, abs=1)
    labels = framing.label_tiles(picture[..., 0])
    assert (labels[:8] == tiles[:8, ..., 0]).all()

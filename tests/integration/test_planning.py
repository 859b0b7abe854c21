"""The calculator against a real server and the real image processors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from samples.vlm import ensure_checkpoint
from serving.command import cpu_dtype
from serving.config import ImageTokens
from serving.imagetokens import patch_grid
from serving.kvcache import DEFAULT_BLOCK_TOKENS, cache_layout, kv_dtype, pool_size
from serving.modelfiles import find_model, image_rule
from serving.modelshape import read_shape
from serving.startuplog import read_startup_log
from tests.integration.served import ServedModel

pytestmark = pytest.mark.integration

PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
SIZES = [(512, 1024), (1280, 720), (640, 480), (33, 1999), (1999, 33), (1, 1), (257, 256), (4000, 3000), (1365, 1023)]
COUNT = """
import json, sys
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
import numpy as np

asked = json.load(sys.stdin)
tiles = []
for width, height in asked["sizes"]:
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": asked["longest"]}, max_image_size={"longest_edge": asked["tile"]}
    )
    picture = np.zeros((height, width, 3), dtype=np.uint8)
    made = processor([[picture]], return_tensors="np", input_data_format="channels_last")
    tiles.append(made["pixel_values"].shape[1])
cells = []
for width, height in asked["sizes"]:
    if max(width, height) <= 200 * min(width, height):
        rows, columns = smart_resize(height, width, 28, 4 * 784, 1280 * 784)
        cells.append([columns // 28, rows // 28])
    else:
        cells.append(None)
print("\\n" + json.dumps({"tiles": tiles, "cells": cells}))
"""


def test_the_cache_a_server_prints_is_the_one_calculated(model_server: ServedModel) -> None:
    """Within 2 %: the sample model on the CPU with a fixed cache size."""
    printed = read_startup_log(model_server.log_path.read_text(errors="replace"))
    server = model_server.config.serving.server
    assert printed.cache_tokens is not None and server.kv_cache_memory_bytes is not None
    shape = read_shape(find_model(str(ensure_checkpoint())).config)
    # What the server computes in: on a CPU without AVX-512 not the checkpoint's own type.
    forced = cpu_dtype(server.dtype)
    dtype = shape.dtype if forced == "auto" else forced
    layout = cache_layout(shape, kv_dtype("auto", dtype), block_tokens=DEFAULT_BLOCK_TOKENS["cpu"])
    expected = pool_size(
        layout,
        server.kv_cache_memory_bytes,
        max_model_len=server.max_model_len,
        in_flight_tokens=server.max_num_batched_tokens,
    )
    assert expected.tokens == pytest.approx(printed.cache_tokens, rel=0.02)
    assert printed.concurrency == pytest.approx(expected.concurrency, rel=0.02)


def test_pictures_become_as_many_tokens_as_the_real_processors_make() -> None:
    if not PYTHON.exists():
        pytest.skip("the server environment .venv-vllm is not installed")
    done = subprocess.run(
        [str(PYTHON), "-c", COUNT],
        input=json.dumps({"sizes": SIZES, "longest": 1024, "tile": 256}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    real = json.loads(done.stdout.splitlines()[-1])
    rule = ImageTokens(tile_px=256, tokens_per_tile=1, longest_edge_px=1024)
    assert [rule.count(*size) for size in SIZES] == real["tiles"]
    for (width, height), cells in zip(SIZES, real["cells"], strict=True):
        if cells is not None:
            assert list(patch_grid(width, height, cell_px=28, min_tokens=4, max_tokens=1280)) == cells


def test_the_sample_models_rule_is_read_from_its_files() -> None:
    rule = image_rule(find_model(str(ensure_checkpoint())))
    assert rule.count(512, 1024) == 576

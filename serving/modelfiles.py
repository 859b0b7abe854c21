"""Find a model's config.json and the size of its weights: a local folder, a file, or a name on the Hugging Face hub."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from serving.config import ImageTokens
from serving.modelshape import ShapeError

HUB_TIMEOUT_S = 20.0
_MAX_CONFIG_BYTES = 16 * 2**20
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's config, where it came from, and the bytes of its weight files where they can be known.

    `preprocessor` is its image processor's config, or None for a model (or a place) without one.
    """

    name: str
    source: str
    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any] | None = None
    weight_bytes: int | None = None


def find_model(name: str) -> ModelFiles:
    """Read the config of `name`: a folder with a config.json, a JSON file, or a hub name such as `org/model`.

    A hub name is looked up in the local hub cache first, then at `HF_ENDPOINT` (unless `HF_HUB_OFFLINE` is set), with
    the token in `HF_TOKEN` for models that ask for one.

    Raises:
        ShapeError: There is no such model, or its config cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return ModelFiles(name, f"file {path.name}", _parse(path.read_bytes(), str(path)))
    if path.is_dir():
        return _from_folder(name, path, f"folder {path.name}")
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ShapeError(f"model {name!r} is no folder and no file here, and no hub name (org/model)")
    cached = _hub_cache_folder(name)
    if cached is not None:
        return _from_folder(name, cached, "hub cache")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ShapeError(f"model {name!r} is not in the hub cache, and HF_HUB_OFFLINE is set")
    return _from_hub(name)


def image_rule(files: ModelFiles) -> ImageTokens:
    """How the model's own image processor turns pictures into tokens.

    Raises:
        ShapeError: It has none, or one whose rule is not known here.
    """
    processor = files.preprocessor
    if processor is None:
        raise ShapeError(f"{files.name} has no image processor config, so pictures cannot be counted")
    name = str(processor.get("image_processor_type", ""))
    try:
        if name.startswith(("Idefics3ImageProcessor", "SmolVLMImageProcessor")):
            return _tiled_rule(processor, files.config)
        if name.startswith(("Qwen2VLImageProcessor", "Qwen3VLImageProcessor")):
            return _patch_rule(processor)
    except KeyError as error:
        raise ShapeError(f"{files.name}: the image processor's rule needs {error}, which its config lacks") from None
    raise ShapeError(f"image processor {name!r}: its rule is not known here (known: Idefics3, SmolVLM, Qwen2-VL on)")


def _tiled_rule(processor: Mapping[str, Any], config: Mapping[str, Any]) -> ImageTokens:
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"] // config["scale_factor"]
    tile = processor["max_image_size"]["longest_edge"]
    longest = processor["size"]["longest_edge"] if processor.get("do_image_splitting", True) else tile
    return ImageTokens(kind="tiled", tile_px=tile, tokens_per_tile=side * side, longest_edge_px=longest)


def _patch_rule(processor: Mapping[str, Any]) -> ImageTokens:
    cell = processor["patch_size"] * processor["merge_size"]
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size["shortest_edge"]
    most = processor.get("max_pixels") or size["longest_edge"]
    pixels = cell * cell
    return ImageTokens(
        kind="patches", pixels_per_token=pixels, min_tokens=max(1, least // pixels), max_tokens=most // pixels
    )


def _from_folder(name: str, folder: Path, source: str) -> ModelFiles:
    path = folder / "config.json"
    if not path.is_file():
        raise ShapeError(f"{folder} has no config.json")
    processors = {file: (folder / file).read_bytes() for file in _PROCESSOR_FILES if (folder / file).is_file()}
    return ModelFiles(
        name=name,
        source=source,
        config=_parse(path.read_bytes(), str(path)),
        preprocessor=_image_processor(processors),
        weight_bytes=_weights_in(folder),
    )


def _image_processor(files: Mapping[str, bytes]) -> dict[str, Any] | None:
    """The image processor's config: a file of its own, or a part of the processor's (as transformers 5 writes it)."""
    for name, data in files.items():
        content = _parse(data, name)
        found = content.get("image_processor") if name == "processor_config.json" else content
        if isinstance(found, dict):
            return found
    return None


def _weights_in(folder: Path) -> int | None:
    """Tensor bytes of the folder's safetensors files: file size less the header (8 bytes of length, then JSON)."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            first = handle.read(8)
        if len(first) != 8:
            raise ShapeError(f"{file.name} is cut short")
        total += file.stat().st_size - 8 - struct.unpack("<Q", first)[0]
    return total or None


def _hub_cache_folder(name: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [folder for folder in snapshots.glob("*") if (folder / "config.json").is_file()]
    return max(found, key=lambda folder: folder.stat().st_mtime) if found else None


def _from_hub(name: str) -> ModelFiles:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = os.environ.get("HF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    base = f"{endpoint}/{name}/resolve/main"
    try:
        with httpx.Client(timeout=HUB_TIMEOUT_S, follow_redirects=True, headers=headers) as client:
            answer = client.get(f"{base}/config.json")
            if answer.status_code in (401, 403):
                raise ShapeError(f"the hub refuses {name!r} ({answer.status_code}): set HF_TOKEN if you have access")
            if answer.status_code == 404:
                raise ShapeError(f"the hub has no model {name!r} with a config.json")
            answer.raise_for_status()
            config = _parse(answer.content, f"{name}/config.json")
            processors = {file: client.get(f"{base}/{file}") for file in _PROCESSOR_FILES}
            index = client.get(f"{base}/model.safetensors.index.json")
    except httpx.HTTPError as error:
        raise ShapeError(
            f"model {name!r} is not in the hub cache and the hub could not be asked ({type(error).__name__}); "
            "give a local folder, or the shape by hand with --layers, --kv-heads and --head-size"
        ) from None
    total = _parse(index.content, "index").get("metadata", {}).get("total_size") if index.is_success else None
    return ModelFiles(
        name=name,
        source="hub",
        config=config,
        preprocessor=_image_processor({file: got.content for file, got in processors.items() if got.is_success}),
        weight_bytes=int(total) if isinstance(total, int) else None,
    )


def _parse(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > _MAX_CONFIG_BYTES:
        raise ShapeError(f"{where} is larger than {_MAX_CONFIG_BYTES >> 20} MiB, which no config is")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ShapeError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ShapeError(f"{where} holds {type(value).__name__}, allowed: an object")
    return value

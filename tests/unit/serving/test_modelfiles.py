from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from serving.modelfiles import find_model, image_rule
from serving.modelshape import ShapeError
from tests.answering import answering

CONFIG = {"model_type": "llama", "num_hidden_layers": 2}
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A hub with one public model, `org/open`, and one that asks for a token, `org/closed`; records what is asked."""
    asked: list[str] = []
    files = {
        "/org/open/resolve/main/config.json": CONFIG,
        "/org/open/resolve/main/preprocessor_config.json": {**QWEN, "min_pixels": 3136, "max_pixels": 1003520},
        "/org/open/resolve/main/model.safetensors.index.json": {"metadata": {"total_size": 1234}},
        "/org/closed/resolve/main/config.json": CONFIG,
    }

    def answer(_method: str, path: str, headers: Mapping[str, str], _body: bytes) -> tuple[int, object]:
        asked.append(path)
        if "closed" in path and headers.get("authorization") != "Bearer secret":
            return 401, ""
        return (200, files[path]) if path in files else (404, "")

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-cache"))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with answering(answer) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield asked


def test_a_folder_with_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    header = b'{"a":{"dtype":"F16","shape":[3],"data_offsets":[0,6]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(6))
    files = find_model(str(tmp_path))
    assert (files.config, files.weight_bytes, files.preprocessor) == (CONFIG, 6, None)


def test_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(CONFIG))
    assert find_model(str(path)).config == CONFIG


def test_a_hub_name(hub: list[str]) -> None:
    files = find_model("org/open")
    assert (files.source, files.config, files.weight_bytes) == ("hub", CONFIG, 1234)
    assert image_rule(files).count(1280, 720) == 46 * 26
    assert hub[0] == "/org/open/resolve/main/config.json"


def test_the_hub_cache_comes_first(hub: list[str], tmp_path: Path) -> None:
    snapshot = tmp_path / "hub-cache" / "hub" / "models--org--open" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**CONFIG, "cached": True}))
    assert find_model("org/open").config["cached"] is True
    assert hub == []


def test_a_model_that_asks_for_a_token(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShapeError, match="HF_TOKEN"):
        find_model("org/closed")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert find_model("org/closed").config == CONFIG


def test_offline_asks_nobody(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ShapeError, match="HF_HUB_OFFLINE"):
        find_model("org/open")
    assert hub == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("org/unknown", "no model", id="not on the hub"),
        pytest.param("nothing", "no folder and no file", id="no name of any kind"),
        pytest.param("../escape", "no hub name", id="no path into the hub"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_models_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        find_model(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", "is not JSON", id="cut"),
        pytest.param("[1]", "allowed: an object", id="not an object"),
    ],
)
def test_configs_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ShapeError, match=message):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        pytest.param(None, "no image processor", id="a text model"),
        pytest.param({"image_processor_type": "CLIPImageProcessor"}, "not known", id="another family"),
        pytest.param({"image_processor_type": "Idefics3ImageProcessor"}, "needs 'vision_config'", id="incomplete"),
    ],
)
def test_picture_rules_that_are_not_known(tmp_path: Path, processor: dict[str, str] | None, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ShapeError, match=message):
        image_rule(find_model(str(tmp_path)))

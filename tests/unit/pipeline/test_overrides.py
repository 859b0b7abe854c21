"""Overrides: their order and reach, whom an error is laid to, and that it tells no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import ConfigError, load_config

SERVER = "FRAMECHAT__SERVING__SERVER__"
SHELL = "the command line"


def deployment(tmp_path: Path, **server: Any) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({"serving": {"server": server}} if server else {}))
    return path


def refusal(path: Path | None, environ: dict[str, str], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ=environ, overrides=overrides)
    return str(caught.value)


def test_order_of_overrides(tmp_path: Path) -> None:
    """File, then environment, then the command line."""
    path = deployment(tmp_path, port=8001, max_num_seqs=4, max_model_len=2048)
    environ = {
        "FRAMECHAT__SERVING__SERVER__PORT": "8002",
        "FRAMECHAT__SERVING__SERVER__MAX_NUM_SEQS": "5",
        "OTHER": "x",
    }
    config = load_config(path, overrides=["serving.server.port=8003"], environ=environ)
    found = config.serving.server
    assert (found.port, found.max_num_seqs, found.max_model_len) == (8003, 5, 2048)


def test_overrides_reach_lists(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump({"cameras": [{"name": "door", "source": "0"}]}))
    overrides = ["cameras.0.source=1", "cameras.1.name=b", "cameras.1.source=sample"]
    config = load_config(path, environ={}, overrides=overrides)
    assert [(item.name, item.source) for item in config.cameras] == [("door", "1"), ("b", "sample")]
    config = load_config(None, environ={"FRAMECHAT__CAMERAS": '[{"name": "a", "source": 2}]'})
    assert config.cameras[0].source == "2"


def test_keys_of_ones_own_keep_their_case() -> None:
    environ = {
        SERVER + "ENV__HF_TOKEN": "hf_Abc",
        "FRAMECHAT__SERVING__CLASSES__CHAT__MAX_TOKENS": "9",
        "FRAMECHAT__SERVING__CLASSES__CHAT__EXTRA_BODY__chat_template_kwargs__enableThinking": "false",
        "FRAMECHAT__DESCRIBE__JSON_SCHEMA__additionalProperties": "false",
    }
    config = load_config(None, environ=environ)
    assert config.serving.server.env == {"HF_TOKEN": "hf_Abc"}
    assert config.serving.classes["chat"].max_tokens == 9
    assert config.serving.classes["chat"].extra_body == {"chat_template_kwargs": {"enableThinking": False}}
    assert config.describe.json_schema == {"additionalProperties": False}


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        pytest.param("4", "4", id="a number"),
        pytest.param("", "", id="nothing"),
        pytest.param("a #b: [", "a #b: [", id="no YAML"),
        pytest.param("'4'", "4", id="quoted"),
    ],
)
def test_variables_of_the_server_are_text(raw: str, value: str) -> None:
    assert load_config(None, environ={SERVER + "ENV__X": raw}).serving.server.env == {"X": value}
    assert load_config(None, environ={}, overrides=[f"serving.server.env.X={raw}"]).serving.server.env == {"X": value}


@pytest.mark.parametrize(
    ("environ", "overrides", "expected"),
    [
        pytest.param({"FRAMECHAT__DETECT__RATE_HZ": "abc"}, [], "FRAMECHAT__DETECT__RATE_HZ: detect.rate_hz = 'abc': ",
                     id="a variable"),
        pytest.param({"FRAMECHAT__DETECT__RATE_HZ": "5"}, ["detect.rate_hz=abc"], f"{SHELL}: detect.rate_hz = 'abc': ",
                     id="the command line over a variable"),
        pytest.param({"FRAMECHAT__DETECT__RATE_HZ": "abc"}, ["detect={rate_hz: -1}"], f"{SHELL}: detect.rate_hz = -1: ",
                     id="a whole section over a variable"),
        pytest.param({"FRAMECHAT__CAMERAS": "[{name: a, source: x, rotate: 5}]"}, [],
                     "FRAMECHAT__CAMERAS: cameras.0.rotate = 5: ", id="within a variable's value"),
        pytest.param({"FRAMECHAT__UI__PORT": "["}, [], "FRAMECHAT__UI__PORT: ui.port = '[': is not a YAML value",
                     id="not YAML"),
        pytest.param({"FRAMECHAT__UI__PORT__X": "1"}, [], "FRAMECHAT__UI__PORT__X: ui.port.x: port is not a section",
                     id="below a value"),
        pytest.param({SERVER + "MAX_NUM_SEQS": "4"}, ["serving.server.max_num_batched_tokens=2"],
                     f"deployment.yaml with {SERVER}MAX_NUM_SEQS, {SHELL}: serving.server: ", id="a combination"),
        pytest.param({SERVER + "PORT": "8001"}, ["serving.server.max_num_batched_tokens=2"],
                     f"deployment.yaml with {SHELL}: serving.server: ", id="a combination of other keys"),
    ],
)  # fmt: skip
def test_whoever_set_a_value_is_blamed(
    tmp_path: Path, environ: dict[str, str], overrides: list[str], expected: str
) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("{serving: {server: {port: 8002}}, ui: {port: 8501}}")
    found = refusal(path, environ, *overrides)
    assert len(found.splitlines()) == 1
    assert found.removeprefix(f"{tmp_path}/").startswith(expected), found


def test_the_file_is_blamed_for_its_own(tmp_path: Path) -> None:
    found = refusal(deployment(tmp_path, max_num_seqs=0), {"FRAMECHAT__UI__HOST": "h"}, "ui.port=9")
    assert found.startswith(f"{tmp_path / 'deployment.yaml'}: serving.server.max_num_seqs = 0: ")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        pytest.param(SERVER + "ENV__HF_TOKEN", "'s3cret", id="a variable of the server, not YAML"),
        pytest.param(SERVER + "ENV", "s3cret", id="not a mapping"),
        pytest.param(SERVER + "ENV", "{A: [s3cret]}", id="not text"),
        pytest.param(SERVER + "HF_KEY", "s3cret", id="unknown key"),
        pytest.param("FRAMECHAT__SERVING", "s3cret", id="a section"),
        pytest.param("FRAMECHAT__SERVING__CLASSES__CHAT__EXTRA_BODY__key", "[s3cret", id="key of one's own"),
        pytest.param("FRAMECHAT__CAMERAS", "[{name: a, source: '0', pin: s3cret}]", id="unknown key within"),
        pytest.param("FRAMECHAT__CAMERAS__0__SOURCE", "rtsp://me:s3cret@h/x", id="password of a camera"),
        pytest.param(SERVER + "BASE_URL", "http://me:s3cret@h/v1", id="password of a server"),
    ],
)
def test_a_secret_of_the_environment_is_not_told(name: str, raw: str) -> None:
    found = refusal(None, {name: raw})
    assert name in found
    assert "s3cret" not in found


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    assert len(refusal(deployment(tmp_path), {}, f"detect.tracker={'x' * 5000}")) < 500


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        pytest.param("port", "allowed: key.path=value", id="no value"),
        pytest.param("=5", "allowed: key.path=value", id="no key"),
        pytest.param("ui.port=[", "ui.port = '\\['", id="not YAML"),
        pytest.param("detect.rate_hz.x=1", "detect.rate_hz", id="below a value"),
        pytest.param("cameras.3.name=x", "3 is no item of a list of 0", id="a hole in a list"),
        pytest.param("cameras.first.name=x", "allowed: ", id="a name in a list"),
    ],
)
def test_overrides_that_are_refused(tmp_path: Path, item: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(deployment(tmp_path), environ={}, overrides=[item])

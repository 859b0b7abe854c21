"""Configuration: what is refused and how it is said, overrides and their order, the deployments in configs/."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.config import Config, ConfigError, load_config
from serving.config import Device

CONFIGS = Path(__file__).parents[3] / "configs"
CLASSES = {name: {"ttft_p95_ms": 1000, "itl_p99_ms": 100, "max_tokens": 64} for name in ("camera", "chat", "document")}


def load(tmp_path: Path, tree: dict[str, Any], **more: Any) -> Config:
    path = tmp_path / "deployment.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path, environ={}, **more)


def server(**values: Any) -> dict[str, Any]:
    return {"serving": {"server": values}}


def camera(**values: Any) -> dict[str, Any]:
    return {"cameras": [{"name": "door", "source": "0"} | values]}


# Every message names the key, the value and what is allowed.
@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        pytest.param({"detekt": {}}, ["detekt", "unknown key", "detect?"], id="unknown section"),
        pytest.param(server(max_num_seq=4), ["serving.server.max_num_seq = 4", "max_num_seqs?"], id="misspelt key"),
        pytest.param({"ui": {"colour": "red"}}, ["ui.colour = 'red'", "unknown key", "host", "port"], id="unknown key"),
        pytest.param({"serving": 5}, ["serving = 5", "allowed"], id="value where a section belongs"),
        pytest.param({"detect": {"rate_hz": "fast"}}, ["detect.rate_hz = 'fast'", "number"], id="wrong type"),
        pytest.param({"detect": {"tracker": "sort"}}, ["detect.tracker = 'sort'", "'bytetrack' or 'botsort'"],
                     id="not one of the choices"),
        pytest.param({"detect": {"image_size_px": 400}}, ["detect.image_size_px = 400", "multiple of 32"],
                     id="not a multiple"),
        pytest.param({"source": {"open_timeout_s": float("nan")}}, ["source.open_timeout_s = nan", "finite"], id="NaN"),
        pytest.param(server(port=70000), ["serving.server.port = 70000", "65535"], id="port out of range"),
        pytest.param(server(max_num_batched_tokens=8, max_num_seqs=16),
                     ["max_num_batched_tokens is 8", "at least max_num_seqs (16)"], id="budget below max_num_seqs"),
        pytest.param(server(enable_chunked_prefill=False, max_num_batched_tokens=2048, max_model_len=4096),
                     ["enable_chunked_prefill is false", "is 2048", "at least max_model_len (4096)"],
                     id="unchunked, budget below the model length"),
        pytest.param(server(max_num_scheduled_tokens=512, max_num_batched_tokens=256),
                     ["max_num_scheduled_tokens is 512", "at most max_num_batched_tokens (256)"],
                     id="scheduled tokens above the budget"),
        pytest.param(server(long_prefill_token_threshold=512, max_num_batched_tokens=256),
                     ["long_prefill_token_threshold is 512", "0 (off) to max_num_batched_tokens (256)"],
                     id="threshold above the budget"),
        pytest.param(server(long_prefill_token_threshold=600, max_num_batched_tokens=1024, max_model_len=512),
                     ["long_prefill_token_threshold is 600", "0 (off) to max_model_len (512)"],
                     id="threshold above the model length"),
        pytest.param(server(max_num_scheduled_tokens=8, max_num_batched_tokens=256, max_num_seqs=16),
                     ["max_num_scheduled_tokens is 8", "at least max_num_seqs (16)"],
                     id="scheduled tokens below max_num_seqs"),
        pytest.param(server(enable_chunked_prefill=False, max_num_batched_tokens=4096, max_num_scheduled_tokens=1024),
                     ["enable_chunked_prefill is false", "max_num_scheduled_tokens is 1024",
                      "at least max_model_len (4096)"], id="unchunked, steps below the model length"),
        pytest.param(server(restart_backoff_s=90), ["restart_backoff_s is 90", "at most restart_backoff_max_s (60)"],
                     id="a first restart pause above the longest"),
        pytest.param({"source": {"reconnect_backoff_s": 40}},
                     ["reconnect_backoff_s is 40", "at most reconnect_backoff_max_s (30)"],
                     id="a first reconnect pause above the longest"),
        pytest.param(server(gpu_memory_utilization=1.5), ["gpu_memory_utilization = 1.5", "less than or equal to 1"],
                     id="more than the whole GPU"),
        pytest.param(server(device="tpu"), ["serving.server.device = 'tpu'", "'cpu' or 'gpu'"], id="device"),
        pytest.param(server(base_url="localhost:8000"), ["base_url = 'localhost:8000'", "http://"], id="no scheme"),
        pytest.param(server(base_url="https://me:pw@host/v1"), ["base_url", "holds a password", "api_key_env"],
                     id="password in base_url"),
        pytest.param(server(extra_args=["--api-key", "s3cret"]), ["extra_args", "--api-key", "api_key_env"],
                     id="API key on the command line"),
        pytest.param(server(extra_args=["--max-num-seqs=4"]),
                     ["extra_args", "--max-num-seqs=4", "serving.server.max_num_seqs"], id="a flag that has a key"),
        pytest.param(server(extra_args=["--ssl-certfile", "s3cret.pem"]),
                     ["serving.server.extra_args", "--ssl-certfile", "http://", "proxy"], id="TLS"),
        pytest.param(server(extra_args=["--ssl_keyfile=s3cret.pem"]), ["--ssl-keyfile", "http://"], id="TLS's key"),
        pytest.param(server(extra_args=["--enable-ssl-refresh"]), ["--enable-ssl-refresh"], id="TLS's refresh"),
        pytest.param(server(extra_args=["--limit-mm-per-prompt", "{}"]),
                     ["--limit-mm-per-prompt", "serving.server.max_images_per_request"], id="pictures a request"),
        pytest.param(server(api_key="s3cret"), ["serving.server.api_key = ***", "environment"], id="a secret as a key"),
        pytest.param({"serving": {"classes": CLASSES | {"chat": CLASSES["chat"] | {"ttft_p95_ms": 0}}}},
                     ["serving.classes.chat.ttft_p95_ms = 0", "greater than 0"], id="an SLO of 0"),
        pytest.param({"serving": {"classes": {"batch": {"max_tokens": 5}}}},
                     ["serving.classes.batch.ttft_p95_ms", "is missing"], id="a new class without objectives"),
        pytest.param({"serving": {"classes": {"chat": None}}}, ["serving.classes.chat"], id="no class"),
        pytest.param({"serving": {"classes": ["chat"]}}, ["serving.classes", "dictionary"], id="a list of classes"),
        pytest.param({"serving": {"classes": CLASSES | {"chat": CLASSES["chat"] | {"max_tokens": 4096}}}},
                     ["classes.chat.max_tokens is 4096", "below server.max_model_len (4096)"],
                     id="answers longer than the model"),
        pytest.param({"serving": {"classes": CLASSES | {"chat": CLASSES["chat"] | {"priority": 5}}}},
                     ["classes.chat.priority is 5", "fcfs"], id="a priority nobody looks at"),
        pytest.param(camera(source="rtsp://me:pw@10.0.0.1/live"),
                     ["cameras.0.source", "holds a password", "password_env"], id="password in a camera's URL"),
        pytest.param({"cameras": [{"name": "a", "source": "0"}, {"name": "a", "source": "1"}]},
                     ["['a', 'a']", "every name once"], id="two cameras of one name"),
        pytest.param(camera(name=""), ["cameras.0.name = ''", "at least 1 character"], id="a camera without name"),
        pytest.param(camera(rotate=45), ["cameras.0.rotate = 45", "0, 90, 180 or 270"], id="rotation"),
        pytest.param({"service": {"port": 8000}}, ["service.port", "8000", "every port once"], id="a port twice"),
        pytest.param({"serving": {"server": {"max_model_len": 600}, "classes": CLASSES}},
                     ["576 of them image tokens", "at most 536"], id="a picture longer than the model"),
        # 576 image tokens alone would fit: 23 marks between the tiles and the words do not.
        pytest.param({"serving": {"server": {"max_model_len": 680}, "classes": CLASSES}},
                     ["about 621 tokens", "at most 616"], id="a picture with its marks longer than the model"),
        pytest.param({"serving": {"server": {"max_model_len": 800}, "classes": CLASSES},
                      "describe": {"system_prompt": "Say what you see. " * 30}},
                     ["about 809 tokens", "at most 736"], id="a picture with its prompts longer than the model"),
        pytest.param({"describe": {"view": "both"}, "serving": {"server": {"max_images_per_request": 1}}},
                     ["describe.view is both", "max_images_per_request is 1", "at least 2"], id="two pictures"),
        pytest.param({"describe": {"prompt": "{time}: who is there?"}},
                     ["describe.prompt", "'{time}'", "prefix caching"], id="a prompt that starts with the time"),
        pytest.param({"describe": {"system_prompt": "You watch ${camera_name}."}},
                     ["describe.system_prompt", "${camera_name}", "constant text"], id="a camera's name in the prompt"),
        pytest.param({"chat": {"system_prompt": "Today is {{ date }}."}}, ["chat.system_prompt", "{{ date }}"],
                     id="a date in the chat's prompt"),
        pytest.param({"describe": {"picture_first": True, "system_prompt": " "}},
                     ["picture_first is true", "system_prompt is empty", "prefix cache"],
                     id="nothing constant before the picture"),
        pytest.param({"describe": {"json_schema": {"properties": {"coat": {"type": "text"}}}}},
                     ["describe.json_schema", "$.properties.coat.type", "'text'"], id="no JSON schema"),
        pytest.param({"describe": {"json_schema": {"default": date(2020, 1, 1)}}},
                     ["describe.json_schema", "date is not JSON"], id="a schema that JSON cannot hold"),
        pytest.param({"describe": {"json_schema": {"$schema": {}}}}, ["describe.json_schema", "$schema"],
                     id="a schema of no dialect"),
        pytest.param({"describe": {"prompt": ""}}, ["describe.prompt = ''", "at least 1 character"], id="no prompt"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, tree: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, tree)
    lines = str(caught.value).splitlines()
    assert all("deployment.yaml" in line for line in lines), "every line says where"
    assert any(all(part in line for part in expected) for line in lines), str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "pw@" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "ruler"),
    [
        pytest.param("max_tokens", 100_000, "max_tokens of the class", id="cap"),
        pytest.param("max_completion_tokens", 100_000, "max_tokens of the class", id="the cap's newer name"),
        pytest.param("stream", False, "streams every answer", id="stream"),
        pytest.param("stream_options", {}, "usage", id="stream options"),
        pytest.param("model", "other", "serving.server.served_model_name", id="model"),
        pytest.param("messages", [], "describe.prompt", id="messages"),
    ],
)
def test_extra_body_overrides_no_other_setting(tmp_path: Path, key: str, value: object, ruler: str) -> None:
    tree = {"serving": {"classes": {"chat": {"extra_body": {"top_k": 1, key: value}}}}}
    with pytest.raises(ConfigError, match=rf"serving\.classes\.chat\.extra_body: holds {key}, allowed: .*{ruler}"):
        load(tmp_path, tree)


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "object", "properties": {"coat": {"enum": ["red", "blue"]}}}, id="today's"),
        pytest.param(
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]},
            id="of an older dialect",
        ),
    ],
)
def test_json_schemas_are_taken(tmp_path: Path, schema: dict[str, Any]) -> None:
    assert load(tmp_path, {"describe": {"json_schema": schema}}).describe.json_schema == schema


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        pytest.param({}, 576 + 23 + 8 + 14, id="tiles"),
        pytest.param({"describe": {"view": "both"}}, 2 * (576 + 23) + 8 + 14, id="two pictures"),
        pytest.param(server(image_tokens={"kind": "patches"}), 512 + 2 + 8 + 14, id="patches"),
    ],
)
def test_prompt_tokens_of_a_description(tmp_path: Path, values: dict[str, Any], tokens: int) -> None:
    """The marks around pictures and tiles, and the prompt's 41 bytes, are counted."""
    assert load(tmp_path, values).prompt_tokens_per_description() == tokens


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        pytest.param("127.0.0.1", "http://127.0.0.1:8000/v1", id="IPv4"),
        pytest.param("0.0.0.0", "http://127.0.0.1:8000/v1", id="every address"),  # noqa: S104 - not bound
        pytest.param("::1", "http://[::1]:8000/v1", id="IPv6"),
        pytest.param("::", "http://[::1]:8000/v1", id="every address, IPv6"),
    ],
)
def test_the_endpoint_of_our_server(tmp_path: Path, host: str, expected: str) -> None:
    assert load(tmp_path, server(host=host)).serving.server.endpoint == expected


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"detect": {"rate_hz": 0}, "trigger": {"max_in_flight": -1}})
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("a: [", "is not YAML", id="broken"),
        pytest.param("- 1\n- 2\n", "holds a list, allowed: sections", id="a list"),
        pytest.param("\xff\xfe", "is not YAML", id="binary"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=expected):
        load_config(path, environ={})


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "none.yaml", environ={})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('Answer as JSON: {"people": 2}', id="braces of JSON"),
        pytest.param("Say the time of day if a clock is visible. It costs $20 (100 %).", id="the same words, as words"),
    ],
)
def test_constant_prompts_are_taken(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, {"describe": {"prompt": text}}).describe.prompt == text


def test_one_key_of_a_class_leaves_the_others_at_their_defaults(tmp_path: Path) -> None:
    defaults = load_config(None, environ={}).serving.classes
    override = "serving.classes.camera.extra_body={top_k: 1}"
    classes = load(
        tmp_path, {"serving": {"classes": {"chat": {"max_tokens": 9}}}}, overrides=[override]
    ).serving.classes
    assert classes["camera"] == defaults["camera"].model_copy(update={"extra_body": {"top_k": 1}})
    assert classes["chat"] == defaults["chat"].model_copy(update={"max_tokens": 9})
    assert classes["document"] == defaults["document"]


def test_source_on_the_command_line() -> None:
    config = Config().with_source("sample")
    assert [(item.source, item.loop) for item in config.cameras] == [("sample", True)]
    assert config.with_source("sample-photos").cameras[0].loop
    assert not config.with_source("samples/street.mp4").cameras[0].loop, "a file of one's own plays once"
    with pytest.raises(ConfigError, match="password_env") as caught:
        config.with_source("rtsp://me:pw@10.0.0.1/live")
    assert "pw" not in str(caught.value).replace("password", "")


# --- the deployments ------------------------------------------------------------------------------------------------

# load-*.yaml are loads to measure with and variants-*.yaml what to compare, not deployments.
FILES = sorted(path for path in CONFIGS.glob("*.yaml") if not path.name.startswith(("load-", "variants-")))


def test_the_deployments_are_all_there() -> None:
    names = {path.name for path in FILES}
    assert {"sample.yaml", "smolvlm-cpu.yaml", "gpu-qwen3-vl.yaml", "gpu-4-rtsp.yaml", "external.yaml"} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_deployment_is_valid(path: Path) -> None:
    load_config(path, environ={})


def keys_of(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in tree.items():
        found.add(prefix + key)
        if isinstance(value, dict) and key not in ("env", "extra_body"):
            found |= keys_of(value, f"{prefix}{key}.")
    return found


def test_the_default_lists_every_key() -> None:
    """The other files refer to it for what they leave out."""
    path = CONFIGS / "sample.yaml"
    complete = load_config(path, environ={}).model_dump(mode="json")
    assert keys_of(complete) == keys_of(yaml.safe_load(path.read_text(encoding="utf-8")))


# Where sample.yaml has a value of its own, and what the code's default is as its comment says it.
OWN_VALUES: dict[str, tuple[object, str]] = {
    "cameras": ([], "none"),
    "detect.confidence": (0.25, "0.25"),
    "detect.weights": ("yolo26n.pt", "yolo26n.pt"),
    "serving.server.enforce_eager": (False, "false"),
    "serving.server.kv_cache_memory_bytes": (None, "null"),
    "serving.server.long_prefill_token_threshold": (0, "0"),
}


def differing(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> dict[str, object]:
    """Dotted keys whose values differ, with that of `one`."""
    found: dict[str, object] = {}
    for key, value in one.items():
        if isinstance(value, dict) and isinstance(other[key], dict) and value.keys() == other[key].keys():
            found |= differing(value, other[key], f"{prefix}{key}.")
        elif value != other[key]:
            found[prefix + key] = value
    return found


def test_the_default_lists_the_codes_defaults_and_names_the_others() -> None:
    path = CONFIGS / "sample.yaml"
    listed = load_config(path, environ={}).model_dump(mode="json")
    assert differing(Config().model_dump(mode="json"), listed) == {key: own[0] for key, own in OWN_VALUES.items()}
    lines = path.read_text(encoding="utf-8").splitlines()
    for key, (_, said) in OWN_VALUES.items():
        leaf = key.rpartition(".")[2]
        assert any(re.search(rf"^ *{leaf}:.*# default: {re.escape(said)}(?![\w.])", line) for line in lines), key


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_deployment_says_itself_what_the_default_does_otherwise(path: Path) -> None:
    """Whoever reads sample.yaml for what is left out would be wrong about these."""
    given = keys_of(yaml.safe_load(path.read_text(encoding="utf-8")))
    attached = load_config(path, environ={}).serving.server.base_url is not None
    assert {key for key in OWN_VALUES if not (attached and key.startswith("serving.server."))} <= given


def test_the_default_really_chunks() -> None:
    config = load_config(CONFIGS / "sample.yaml", environ={})
    engine = config.serving.server
    assert (engine.device, engine.max_num_batched_tokens, engine.enable_chunked_prefill) == (Device.CPU, 256, True)
    assert config.image_tokens_per_description() >= 500
    # A chat's tokens fit beside the pictures that may be in prefill at once.
    room = engine.max_num_batched_tokens - config.trigger.max_in_flight * engine.long_prefill_token_threshold
    assert engine.long_prefill_token_threshold > 0
    assert room > 0


def test_the_gpu_deployments_leave_room() -> None:
    one = load_config(CONFIGS / "gpu-qwen3-vl.yaml", environ={})
    assert (one.serving.server.device, one.serving.server.max_num_batched_tokens) == (Device.GPU, 2048)
    assert one.serving.server.gpu_memory_utilization == 0.9
    four = load_config(CONFIGS / "gpu-4-rtsp.yaml", environ={})
    assert len(four.cameras) == 4
    assert all(item.source.startswith("rtsp://") and item.password_env for item in four.cameras)
    assert four.detect.device.startswith("cuda")
    assert (four.serving.server.gpu_memory_utilization or 1) < 0.9, "the detector needs its share"


def test_the_attached_deployment_starts_nothing() -> None:
    assert load_config(CONFIGS / "external.yaml", environ={}).serving.server.base_url is not None

"""One deployment's settings: the YAML file, environment overrides and `--set`, validated into one frozen tree."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from pipeline.addresses import holds_password, mask_source
from serving.config import Port, PositiveInt, PositiveSeconds, ServingConfig, StrictModel

ENV_PREFIX = "FRAMECHAT__"
_VARYING = re.compile(
    r"(?:\$?\{+\s*|%\(|\$)(?:time|date|now|today|id|uuid|track|person|camera|frame|count)\w*\s*[})]*", re.IGNORECASE
)
_SECRET_KEY = re.compile(r"password|secret|api_key$|token$", re.IGNORECASE)
Fraction = Annotated[float, Field(ge=0, le=1)]


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line a setting, each naming key, value and mend."""


class CameraConfig(StrictModel):
    """One camera. `source`: index, device path, RTSP/HTTP(S) URL, video file, folder, picture, or `sample`.

    A password goes into the environment variable named by `password_env` (and `username` beside it), never into
    `source`; where the camera wants it in the address's query, `{password}` there stands for it.
    """

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w .-]+$")]
    source: Annotated[str, Field(min_length=1, max_length=2048)]
    username: str | None = None
    password_env: str | None = None
    rotate: Literal[0, 90, 180, 270] = 0
    loop: bool = False  # files: start again at the end

    @field_validator("source", mode="before")
    @classmethod
    def _index(cls, value: object) -> object:
        """`source: 0` is the first webcam."""
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("source")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if holds_password(value):
            raise ValueError(
                "holds a password, allowed: a URL without one, with `username` and `password_env` (the name of an "
                "environment variable that holds the password)"
            )
        return value


class SourceConfig(StrictModel):
    """How cameras are read."""

    as_fast_as_possible: bool = False  # files: no pacing
    open_timeout_s: PositiveSeconds = 10
    read_timeout_s: PositiveSeconds = 5
    reconnect_backoff_s: PositiveSeconds = 1
    reconnect_backoff_max_s: PositiveSeconds = 30
    max_side_px: Annotated[int, Field(ge=32, le=16384)] = 4096  # larger pictures are refused as damaged
    picture_s: PositiveSeconds = 2.0  # how long each picture of a folder is shown


class DetectConfig(StrictModel):
    """YOLO26 person detection and tracking."""

    weights: str = "yolo26n.pt"  # a path, a name that ultralytics can download, or `sample`
    device: str = "cpu"
    image_size_px: Annotated[int, Field(ge=32, multiple_of=32)] = 416
    confidence: Fraction = 0.25
    rate_hz: Annotated[float, Field(gt=0, le=240)] = 5.0  # detections a second and camera
    tracker: Literal["bytetrack", "botsort"] = "bytetrack"
    threads: PositiveInt | None = None  # CPU threads of the detector; default: 1 on small machines


class TriggerConfig(StrictModel):
    """Which person, in which frame, is worth a description."""

    confirm_detections: PositiveInt = 3  # a track is confirmed after so many detections
    min_height_px: PositiveInt = 48
    min_height_fraction: Fraction = 0.08
    min_sharpness: Annotated[float, Field(ge=0)] = 20.0  # variance of the Laplacian of the grey crop
    border_margin_px: Annotated[int, Field(ge=0)] = 4  # a box nearer to the border counts as cut
    max_overlap: Fraction = 0.3  # share of the box that another person may cover in a good view
    max_wait_s: PositiveSeconds = 4.0  # at the latest so long after confirmation, with the best view so far
    cooldown_s: Annotated[float, Field(ge=0)] = 0.0  # 0: once; else again after so long
    rescene_change: Fraction = 0.0  # 0: off; else again when the surroundings' histogram moved this far
    reentry_window_s: Annotated[float, Field(ge=0)] = 10.0
    reentry_distance: Annotated[float, Field(ge=0)] = 1.5  # in box heights
    reentry_similarity: Fraction = 0.8  # of the colour signatures, 1: the same colours
    retry_after_s: PositiveSeconds = 5.0  # a request that was dropped or failed is tried again, while seen
    max_in_flight: PositiveInt = 2
    max_waiting: PositiveInt = 3
    cancel_after_gone_s: PositiveSeconds = 20.0  # a waiting or running request whose person left so long ago


def _constant_prompt(value: str) -> str:
    """Prompts are sent as they are, and first: nothing in them may look as if it were filled in for each request."""
    found = _VARYING.search(value)
    if found:
        raise ValueError(
            f"holds the varying field {found.group(0)!r}, allowed: constant text, for prefix caching reuses a "
            "prompt only up to the first token that differs"
        )
    return value


class DescribeConfig(StrictModel):
    """What the model is shown and asked."""

    system_prompt: Annotated[str, Field(max_length=8192)] = ""
    prompt: Annotated[str, Field(min_length=1, max_length=8192)] = "Describe the people in this camera frame."
    json_schema: dict[str, Any] | None = None
    picture_first: bool = False  # the order in the user turn: some models were trained with the picture before the text
    view: Literal["crop", "frame", "both"] = "crop"
    crop_margin: Annotated[float, Field(ge=0, le=4)] = 0.25  # of the box's height, on every side
    picture_width_px: PositiveInt = 512
    picture_height_px: PositiveInt = 1024
    jpeg_quality: Annotated[int, Field(ge=10, le=100)] = 90

    @field_validator("system_prompt", "prompt")
    @classmethod
    def _constant(cls, value: str) -> str:
        return _constant_prompt(value)


class ChatConfig(StrictModel):
    """Chat sessions."""

    system_prompt: Annotated[str, Field(max_length=8192)] = "You are a helpful assistant."
    max_history_messages: PositiveInt = 40
    max_message_chars: PositiveInt = 8_000
    max_document_bytes: PositiveInt = 10 * 2**20
    max_sessions: PositiveInt = 200
    max_in_flight: PositiveInt = 8

    @field_validator("system_prompt")
    @classmethod
    def _constant(cls, value: str) -> str:
        return _constant_prompt(value)


class StoreConfig(StrictModel):
    """Where descriptions, thumbnails and request records live, and for how long."""

    folder: Path = Path("data")
    max_age_days: Annotated[float, Field(gt=0)] = 30
    max_bytes: PositiveInt = 2 * 2**30
    thumbnail_side_px: PositiveInt = 192


class ComparisonsConfig(StrictModel):
    """Where comparisons of token budgets are kept, a folder each."""

    folder: Path = Path("comparisons")


class ServiceConfig(StrictModel):
    """The pipeline's HTTP API."""

    host: str = "127.0.0.1"
    port: Port = 8600
    public_url: str | None = None  # how browsers reach it when that differs from http://<page's host>:<port>
    live_rate_hz: Annotated[float, Field(gt=0, le=60)] = 10.0
    live_width_px: PositiveInt = 960
    max_cameras: PositiveInt = 16
    max_upload_bytes: PositiveInt = 2 * 2**30
    latency_window_s: PositiveSeconds = 300


class UiConfig(StrictModel):
    """The Streamlit page."""

    host: str = "127.0.0.1"
    port: Port = 8501


class Config(StrictModel):
    """A whole deployment."""

    serving: ServingConfig = ServingConfig()
    cameras: list[CameraConfig] = []
    source: SourceConfig = SourceConfig()
    detect: DetectConfig = DetectConfig()
    trigger: TriggerConfig = TriggerConfig()
    describe: DescribeConfig = DescribeConfig()
    chat: ChatConfig = ChatConfig()
    store: StoreConfig = StoreConfig()
    comparisons: ComparisonsConfig = ComparisonsConfig()
    service: ServiceConfig = ServiceConfig()
    ui: UiConfig = UiConfig()
    run_folder: Path = Path("runs")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [camera.name for camera in self.cameras]
        if len(set(names)) != len(names):
            raise ValueError(f"cameras have the names {names}, allowed: every name once")
        ports = {"service.port": self.service.port, "ui.port": self.ui.port}
        if self.serving.server.base_url is None:
            ports["serving.server.port"] = self.serving.server.port
        if len(set(ports.values())) != len(ports):
            raise ValueError(f"ports are {ports}, allowed: every port once")
        server = self.serving.server
        if self.describe.view == "both" and server.max_images_per_request < 2:
            raise ValueError(
                f"describe.view is both and serving.server.max_images_per_request is {server.max_images_per_request}, "
                "allowed: at least 2, for two pictures are sent"
            )
        if server.base_url is None:
            tokens = self.image_tokens_per_description()
            room = server.max_model_len - self.serving.classes["camera"].max_tokens
            if tokens >= room:
                raise ValueError(
                    f"describe sends {tokens} image tokens, allowed: below {room} (serving.server.max_model_len "
                    "less serving.classes.camera.max_tokens); lower describe.picture_width_px/height_px or raise "
                    "max_model_len"
                )
        return self

    def with_source(self, source: str) -> Config:
        """The same deployment watching one camera, `source`, instead of those in the file.

        Raises:
            ConfigError: The source is not acceptable, e.g. holds a password.
        """
        try:
            camera = CameraConfig(name="camera 1", source=source, loop=source.startswith("sample"))
        except ValidationError as error:
            raise ConfigError(_explain(error, "--source")) from error
        return self.model_copy(update={"cameras": [camera]})

    def image_tokens_per_description(self) -> int:
        """Image tokens that one description request carries, by the model's rule in `serving.server.image_tokens`."""
        pictures = 2 if self.describe.view == "both" else 1
        one = self.serving.server.image_tokens.count(self.describe.picture_width_px, self.describe.picture_height_px)
        return pictures * one


def _set(tree: dict[str, Any], dotted: str, raw: str) -> None:
    """Set one value; a number steps into a list (`cameras.0.source`), the number after its last item adds one."""
    *parents, leaf = dotted.split(".")
    node: Any = tree
    for key, below in zip(parents, [*parents, leaf][1:], strict=True):
        node = _step(node, key, dotted, [] if below.isdecimal() else {})
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"{dotted} = {raw!r}: is not a YAML value") from error
    if isinstance(node, list):
        _step(node, leaf, dotted, value)
        node[int(leaf)] = value
    else:
        node[leaf] = value


def _step(node: Any, key: str, dotted: str, fresh: object) -> Any:
    """The item `key` of a section or list, made from `fresh` where it is missing."""
    if isinstance(node, list):
        if not key.isdecimal() or int(key) > len(node):
            raise ConfigError(f"{dotted}: {key} is no item of a list of {len(node)}, allowed: 0 to {len(node)}")
        if int(key) == len(node):
            node.append(fresh)
        return node[int(key)]
    if node.get(key) is None:
        node[key] = fresh
    child = node[key]
    if not isinstance(child, dict | list) and isinstance(fresh, dict | list):
        raise ConfigError(f"{dotted}: {key} is not a section")
    return child


def _shown(key: str, given: object) -> str:
    """The value that was given, without what may be secret; nothing for whole sections."""
    if isinstance(given, dict | list | StrictModel):
        return ""
    if _SECRET_KEY.search(key) or ".env." in key:
        return " = ***"
    masked = mask_source(given) if isinstance(given, str) else given
    return f" = {masked!r}"


def _section(keys: Sequence[int | str]) -> type[BaseModel] | None:
    """The model class of the section that these keys lead to; None where it is not one of ours."""
    node: Any = Config
    for key in keys:
        if isinstance(node, type) and issubclass(node, BaseModel):
            field = node.model_fields.get(str(key))
            node = None if field is None else field.annotation
        elif get_origin(node) in (list, dict):
            node = get_args(node)[-1]
        else:
            return None
    return node if isinstance(node, type) and issubclass(node, BaseModel) else None


def _unknown_key(keys: Sequence[int | str]) -> str:
    """What to say of a key that does not exist: the nearest one, or all."""
    section = _section(keys[:-1])
    allowed = sorted(section.model_fields) if section is not None else []
    near = get_close_matches(str(keys[-1]), allowed, n=1)
    hint = "; secrets come from the environment only" if _SECRET_KEY.search(str(keys[-1])) else ""
    if near:
        return f"unknown key, allowed: {near[0]}?{hint}"
    return f"unknown key, allowed: {', '.join(allowed)}{hint}" if allowed else f"unknown key{hint}"


def _explain(error: ValidationError, where: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = _unknown_key(item["loc"])
        elif item["type"] == "missing":
            message = "is missing, allowed: a value"
        elif "allowed" not in message:
            message = f"allowed: {message.removeprefix('Input should be ')}"
        lines.append(f"{where}: {key}{_shown(key, item['input'])}: {message}")
    return "\n".join(lines)


def load_config(
    path: Path | None = None, *, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Config:
    """Read a deployment file, then apply `FRAMECHAT__SECTION__KEY` variables, then `key.path=value` overrides.

    Args:
        path: The YAML file; None means every default.
        overrides: `--set` items, `serving.server.max_num_batched_tokens=512`; values are YAML.
        environ: The environment to read; default `os.environ`.

    Raises:
        ConfigError: The file is missing, is not YAML, or does not validate.
    """
    tree: dict[str, Any] = {}
    where = "settings"
    if path is not None:
        where = str(path)
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a file in configs/") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: is not YAML ({' '.join(str(error).split())})") from error
        if not isinstance(loaded, dict | None):
            raise ConfigError(f"{path}: holds a {type(loaded).__name__}, allowed: sections with keys")
        tree = loaded or {}
    for name, value in sorted((environ if environ is not None else os.environ).items()):
        if name.startswith(ENV_PREFIX):
            _set(tree, name.removeprefix(ENV_PREFIX).lower().replace("__", "."), value)
    for item in overrides:
        dotted, equals, raw = item.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"--set {item}: allowed: key.path=value")
        _set(tree, dotted, raw)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from error

"""One deployment's settings: the YAML file, environment overrides and `--set`, validated into one frozen tree."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from pipeline.addresses import SAMPLES, holds_password
from pipeline.overrides import ENV_PREFIX, ConfigError, Settings
from serving.config import Port, PositiveInt, PositiveSeconds, ServingConfig, StrictModel

__all__ = [
    "ENV_PREFIX",
    "CameraConfig",
    "ChatConfig",
    "ComparisonsConfig",
    "Config",
    "ConfigError",
    "DescribeConfig",
    "DetectConfig",
    "ServiceConfig",
    "SourceConfig",
    "StoreConfig",
    "TriggerConfig",
    "UiConfig",
    "load_config",
]

_VARYING = re.compile(
    r"(?:\$?\{+\s*|%\(|\$)(?:time|date|now|today|id|uuid|track|person|camera|frame|count)\w*\s*[})]*", re.IGNORECASE
)
Fraction = Annotated[float, Field(ge=0, le=1)]


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

    @model_validator(mode="after")
    def _backs_off(self) -> Self:
        if self.reconnect_backoff_s > self.reconnect_backoff_max_s:
            raise ValueError(
                f"reconnect_backoff_s is {self.reconnect_backoff_s:g}, allowed: at most reconnect_backoff_max_s "
                f"({self.reconnect_backoff_max_s:g})"
            )
        return self


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


def _schema_problem(schema: dict[str, Any]) -> str | None:
    """What is wrong with a JSON schema, in words; None when nothing is."""
    # Here and not above: it takes longer to import than all of this module.
    from jsonschema import Draft202012Validator, SchemaError  # type: ignore[import-untyped]  # noqa: PLC0415
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        json.dumps(schema)
        named = isinstance(schema.get("$schema", ""), str)
        kind = validator_for(schema, default=Draft202012Validator) if named else Draft202012Validator
        kind.check_schema(schema)
    except (TypeError, ValueError) as error:  # a date, or a loop of YAML's references
        return str(error)
    except SchemaError as error:
        return f"{error.json_path}: {' '.join(error.message.split())[:200]}"
    return None


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

    @field_validator("json_schema")
    @classmethod
    def _is_a_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        problem = _schema_problem(value) if value is not None else None
        if problem is not None:
            raise ValueError(f"is no JSON schema ({problem}), allowed: null or a valid one")
        return value

    @model_validator(mode="after")
    def _starts_constant(self) -> Self:
        if self.picture_first and not self.system_prompt.strip():
            raise ValueError(
                "picture_first is true and system_prompt is empty, allowed: false, or a system_prompt, for nothing "
                "constant would come before the picture and the prefix cache would never help"
            )
        return self


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
            tokens = self.prompt_tokens_per_description()
            room = server.max_model_len - self.serving.classes["camera"].max_tokens
            if tokens > room:
                raise ValueError(
                    f"describe sends about {tokens} tokens, {self.image_tokens_per_description()} of them image "
                    f"tokens, allowed: at most {room} (serving.server.max_model_len less "
                    "serving.classes.camera.max_tokens); lower describe.picture_width_px/height_px or raise "
                    "max_model_len"
                )
        return self

    def with_source(self, source: str) -> Config:
        """The same deployment watching one camera, `source`, instead of those in the file.

        Raises:
            ConfigError: The source is not acceptable, e.g. holds a password.
        """
        try:
            camera = CameraConfig(name="camera 1", source=source, loop=source in SAMPLES)
        except ValidationError as error:
            raise ConfigError(Settings({}, "--source", CameraConfig).explain(error)) from error
        return self.model_copy(update={"cameras": [camera]})

    def image_tokens_per_description(self) -> int:
        """Image tokens that one description request carries, by the model's rule in `serving.server.image_tokens`."""
        pictures = 2 if self.describe.view == "both" else 1
        one = self.serving.server.image_tokens.count(self.describe.picture_width_px, self.describe.picture_height_px)
        return pictures * one

    def prompt_tokens_per_description(self) -> int:
        """About how many tokens its whole prompt has: image tokens, the marks between them, both prompts' text."""
        # Here and not above: it brings httpx, which `--help` does without.
        from pipeline.tokens import MESSAGE_TOKENS, estimate_tokens  # noqa: PLC0415

        shown = self.describe
        pictures = 2 if shown.view == "both" else 1
        marks = self.serving.server.image_tokens.separators(shown.picture_width_px, shown.picture_height_px)
        texts = [text for text in (shown.system_prompt, shown.prompt) if text]
        words = sum(MESSAGE_TOKENS + estimate_tokens(text) for text in texts)
        return self.image_tokens_per_description() + pictures * marks + words


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
    settings = Settings(tree, where, Config)
    for name, value in sorted((environ if environ is not None else os.environ).items()):
        if name.startswith(ENV_PREFIX):
            settings.override_from_environment(name, value)
    for item in overrides:
        dotted, equals, raw = item.partition("=")
        if not equals or not dotted:
            raise ConfigError(f"--set {item}: allowed: key.path=value")
        settings.override(dotted.split("."), raw, "the command line")
    try:
        return Config.model_validate(settings.tree)
    except ValidationError as error:
        raise ConfigError(settings.explain(error)) from error

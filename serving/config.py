"""The settings of the model server, its client and the objectives, validated at the edge.

Every rule here names the key, the value and what is allowed; pydantic carries it to the user.
"""

from __future__ import annotations

import math
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from serving.address import reachable_host
from serving.imagetokens import Tiling, patch_grid, tiling

PositiveInt = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535)]

SAMPLE_MODEL = "sample"
_PASSWORD_IN_URL = re.compile(r"^https?://[^/@\s]+@")
# vLLM flags that have a key of their own here (`--max-num-seqs` is `max_num_seqs`), or that would tell a secret.
_FLAG_KEYS = {
    "model": "model", "served-model-name": "served_model_name", "host": "host", "port": "port",
    "max-model-len": "max_model_len", "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens", "max-num-scheduled-tokens": "max_num_scheduled_tokens",
    "long-prefill-token-threshold": "long_prefill_token_threshold", "scheduling-policy": "scheduling_policy",
    "enable-chunked-prefill": "enable_chunked_prefill", "no-enable-chunked-prefill": "enable_chunked_prefill",
    "enable-prefix-caching": "enable_prefix_caching", "no-enable-prefix-caching": "enable_prefix_caching",
    "enforce-eager": "enforce_eager", "no-enforce-eager": "enforce_eager", "dtype": "dtype",
    "gpu-memory-utilization": "gpu_memory_utilization", "kv-cache-memory-bytes": "kv_cache_memory_bytes",
    "enable-logging-iteration-details": "log_steps", "limit-mm-per-prompt": "max_images_per_request",
}  # fmt: skip
# Keys of a request that something else rules; `extra_body` is merged last and would win.
_RULED_KEYS = {
    "max_tokens": "max_tokens of the class caps its answers",
    "max_completion_tokens": "max_tokens of the class caps its answers",
    "stream": "the client streams every answer, to time its tokens",
    "stream_options": "the client asks for the usage of every answer, to count its tokens",
    "model": "serving.server.served_model_name names the model",
    "messages": "describe.prompt and the system_prompt of describe and chat make them",
}


class StrictModel(BaseModel):
    """Unknown keys are errors and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Device(StrEnum):
    """Which build of vLLM serves the model."""

    CPU = "cpu"
    GPU = "gpu"


class ImageTokens(StrictModel):
    """How many prompt tokens a picture becomes, by the rule of the model's image processor (serving/imagetokens.py).

    `tiled` (Idefics3, SmolVLM): the longer edge becomes `longest_edge_px`, tiles of `tile_px` are cut, and a tile of
    the whole is added. `patches` (Qwen-VL): one token per `pixels_per_token` pixels (a square), `min_tokens` to
    `max_tokens` of them.
    """

    kind: Literal["tiled", "patches"] = "tiled"
    tile_px: PositiveInt = 256
    tokens_per_tile: PositiveInt = 64
    longest_edge_px: PositiveInt = 1024
    pixels_per_token: PositiveInt = 32 * 32
    min_tokens: PositiveInt = 4
    max_tokens: PositiveInt = 16384

    @model_validator(mode="after")
    def _is_a_rule(self) -> Self:
        if math.isqrt(self.pixels_per_token) ** 2 != self.pixels_per_token:
            raise ValueError(f"pixels_per_token is {self.pixels_per_token}, allowed: a square, such as 28 * 28 = 784")
        if self.kind == "tiled" and self.longest_edge_px % self.tile_px:
            raise ValueError(
                f"longest_edge_px is {self.longest_edge_px}, allowed: a multiple of tile_px ({self.tile_px}), for "
                "otherwise the image processor counts and cuts differently"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, allowed: at most max_tokens ({self.max_tokens})")
        return self

    def count(self, width_px: int, height_px: int) -> int:
        """Image tokens of one picture of `width_px` x `height_px` (separator tokens between tiles not counted)."""
        if self.kind == "patches":
            columns, rows = patch_grid(
                width_px,
                height_px,
                cell_px=math.isqrt(self.pixels_per_token),
                min_tokens=self.min_tokens,
                max_tokens=self.max_tokens,
            )
            return columns * rows
        return self._tiling(width_px, height_px).tiles * self.tokens_per_tile

    def separators(self, width_px: int, height_px: int) -> int:
        """Tokens around one picture and between its tiles, where the tokenizer has a mark for each."""
        return 2 if self.kind == "patches" else self._tiling(width_px, height_px).separator_tokens

    def _tiling(self, width_px: int, height_px: int) -> Tiling:
        return tiling(width_px, height_px, longest_edge_px=self.longest_edge_px, tile_px=self.tile_px)


class ServerConfig(StrictModel):
    """How the vLLM server is started, or which running one is used.

    With `base_url` the server is somebody else's: nothing is started, and the engine settings below are not used.
    """

    base_url: str | None = None
    api_key_env: str = "FRAMECHAT_API_KEY"
    device: Device = Device.CPU
    model: str = SAMPLE_MODEL
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: Port = 8000
    python: Path | None = None  # default: .venv-vllm beside the project
    max_model_len: PositiveInt = 4096
    max_num_seqs: PositiveInt = 16
    max_num_batched_tokens: PositiveInt = 256
    max_num_scheduled_tokens: PositiveInt | None = None
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enforce_eager: bool = False
    dtype: str = "auto"
    cpu_threads: PositiveInt | None = None  # of the model on a CPU; default: serving.command.default_cpu_threads
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    kv_cache_memory_bytes: PositiveInt | None = None
    max_images_per_request: PositiveInt = 2
    log_steps: bool = False  # vLLM's --enable-logging-iteration-details
    scheduler_plugin: bool = True  # serving/scheduler: step records, and a step budget that moves without a restart
    extra_args: list[str] = []
    env: dict[str, str] = {}
    startup_timeout_s: PositiveSeconds = 600
    shutdown_timeout_s: PositiveSeconds = 20
    restart_backoff_s: PositiveSeconds = 1
    restart_backoff_max_s: PositiveSeconds = 60
    image_tokens: ImageTokens = ImageTokens()

    @field_validator("base_url")
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("allowed: a URL that starts with http:// or https://, e.g. http://127.0.0.1:8000/v1")
        if value is not None and _PASSWORD_IN_URL.match(value):
            raise ValueError("holds a password, allowed: a URL without one; put a key into api_key_env's variable")
        return value

    @field_validator("extra_args")
    @classmethod
    def _no_second_setting(cls, value: list[str]) -> list[str]:
        for item in value:
            flag = item.partition("=")[0].lstrip("-").replace("_", "-")
            if not item.startswith("--"):
                continue
            if flag == "api-key":
                raise ValueError(
                    "holds --api-key, allowed: flags without secrets, for every user of the machine can read a command "
                    "line; put the key into the environment variable that api_key_env names"
                )
            if "ssl" in flag.split("-"):
                raise ValueError(
                    f"holds --{flag}, allowed: flags without TLS, for our own server is asked over plain http:// and "
                    "would never answer; end TLS in a proxy before it"
                )
            if flag in _FLAG_KEYS:
                raise ValueError(
                    f"holds {item}, allowed: flags without a key of their own; set serving.server.{_FLAG_KEYS[flag]}"
                )
        return value

    @model_validator(mode="after")
    def _steps_are_possible(self) -> Self:
        if self.base_url is not None:
            return self
        budget, scheduled = self.max_num_batched_tokens, self.max_num_scheduled_tokens
        if scheduled is not None and scheduled > budget:
            raise ValueError(
                f"max_num_scheduled_tokens is {scheduled}, allowed: at most max_num_batched_tokens ({budget})"
            )
        key = "max_num_batched_tokens" if scheduled is None else "max_num_scheduled_tokens"
        step = scheduled or budget
        if step < self.max_num_seqs:
            raise ValueError(
                f"{key} is {step}, allowed: at least max_num_seqs ({self.max_num_seqs}), "
                "for every running sequence may need one token of each step"
            )
        if not self.enable_chunked_prefill and step < self.max_model_len:
            raise ValueError(
                f"enable_chunked_prefill is false and {key} is {step}, allowed: at least "
                f"max_model_len ({self.max_model_len}), for an unchunked prompt must fit one step"
            )
        return self

    @model_validator(mode="after")
    def _limits_are_possible(self) -> Self:
        if self.base_url is not None:
            return self
        threshold = self.long_prefill_token_threshold
        for key in ("max_num_batched_tokens", "max_model_len"):
            if threshold > getattr(self, key):
                raise ValueError(
                    f"long_prefill_token_threshold is {threshold}, allowed: 0 (off) to {key} ({getattr(self, key)})"
                )
        if self.restart_backoff_s > self.restart_backoff_max_s:
            raise ValueError(
                f"restart_backoff_s is {self.restart_backoff_s:g}, allowed: at most restart_backoff_max_s "
                f"({self.restart_backoff_max_s:g})"
            )
        return self

    @property
    def endpoint(self) -> str:
        """Base URL of the OpenAI-compatible API, ending in /v1 for a server of ours."""
        if self.base_url is not None:
            return self.base_url.rstrip("/")
        return f"http://{reachable_host(self.host)}:{self.port}/v1"


class Timeouts(StrictModel):
    """How long the client waits for a connection, the first token, and each next token."""

    connect_s: PositiveSeconds = 5
    first_token_s: PositiveSeconds = 120
    gap_s: PositiveSeconds = 60


class ClassConfig(StrictModel):
    """One traffic class: its latency objectives and its output cap.

    Output is capped because decode time grows with it: an uncapped answer holds a sequence slot and its KV cache, and
    every one of its steps shares the budget with everybody else's prefill.
    """

    ttft_p95_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    itl_p99_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    max_tokens: PositiveInt
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    priority: int = 0  # used with scheduling_policy: priority; lower is served first
    extra_body: dict[str, Any] = {}  # passed to the server as it is

    @field_validator("extra_body")
    @classmethod
    def _no_ruled_key(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, ruler in _RULED_KEYS.items():
            if key in value:
                raise ValueError(f"holds {key}, allowed: keys that nothing else rules; {ruler}")
        return value


DEFAULT_CLASSES = {
    "camera": ClassConfig(ttft_p95_ms=10_000, itl_p99_ms=1_000, max_tokens=48),
    "chat": ClassConfig(ttft_p95_ms=2_000, itl_p99_ms=500, max_tokens=256, temperature=0.7),
    "document": ClassConfig(ttft_p95_ms=20_000, itl_p99_ms=500, max_tokens=256),
}


class ServingConfig(StrictModel):
    """Everything `serving` needs: the server, the client's patience, and the classes by name."""

    server: ServerConfig = ServerConfig()
    timeouts: Timeouts = Timeouts()
    classes: dict[str, ClassConfig] = DEFAULT_CLASSES

    @field_validator("classes", mode="before")
    @classmethod
    def _over_the_defaults(cls, value: object) -> object:
        """A class, or a key of one, that is not given keeps its default."""
        if not isinstance(value, dict):
            return value
        merged: dict[str, object] = {**DEFAULT_CLASSES, **value}
        for name, default in DEFAULT_CLASSES.items():
            given = merged[name]
            if isinstance(given, dict):
                merged[name] = default.model_dump() | given
        return merged

    @model_validator(mode="after")
    def _classes_are_possible(self) -> Self:
        for name, settings in self.classes.items():
            if settings.priority != 0 and self.server.base_url is None and self.server.scheduling_policy == "fcfs":
                raise ValueError(
                    f"classes.{name}.priority is {settings.priority}, allowed: 0 while server.scheduling_policy is "
                    "fcfs, for it would be ignored; set server.scheduling_policy to priority"
                )
            if self.server.base_url is None and settings.max_tokens >= self.server.max_model_len:
                raise ValueError(
                    f"classes.{name}.max_tokens is {settings.max_tokens}, allowed: below "
                    f"server.max_model_len ({self.server.max_model_len})"
                )
        return self

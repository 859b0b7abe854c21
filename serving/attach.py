"""What a running OpenAI-compatible server says of itself."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import httpx

from serving.address import STRAIGHT_TO_LOOPBACK
from serving.command import ServerError
from serving.tls import certificates

# What a simulated server (serving/mock) sends with every response: what it simulates, in words.
SIMULATED_HEADER = "x-framechat-simulated"


class UnreachableError(ServerError):
    """Nobody answers (yet); trying again later can help."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a running OpenAI-compatible server says of itself; None where it does not say.

    Attributes:
        model: The one that requests name.
        models: All that it lists.
        simulated: What a simulated server simulates; None for a real one.
    """

    model: str
    models: tuple[str, ...]
    version: str | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    simulated: str | None = None

    @property
    def step_budget(self) -> int | None:
        """The most tokens one step may process."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    def in_words(self) -> str:
        """For a user: `vLLM 0.32.0 with qwen, 8192 tokens of context, step budget 2048`."""
        software = f"vLLM {self.version}" if self.version else "OpenAI-compatible server"
        words = [f"{software} with {self.model}{'' if self.model in self.models else ' (which it does not list)'}"]
        if self.max_model_len:
            words.append(f"{self.max_model_len} tokens of context")
        if self.step_budget:
            words.append(f"step budget {self.step_budget}")
        return ", ".join(words)


async def _get_json(client: httpx.AsyncClient, url: str) -> Any:
    """The JSON of an optional page; None when the server does not have it."""
    with contextlib.suppress(httpx.HTTPError, ValueError):
        answer = await client.get(url)
        if answer.status_code == httpx.codes.OK:
            return answer.json()
    return None


async def describe_running(
    endpoint: str, api_key: str | None = None, *, model: str | None = None, timeout_s: float = 5.0
) -> RunningServer:
    """Ask a server which model it serves, and what it runs with as far as it tells.

    Args:
        endpoint: Base URL of the API, usually ending in /v1.
        api_key: Sent as a bearer token.
        model: The one that requests will name (`served_model_name`); None: the first that the server lists.
        timeout_s: For each answer.

    Raises:
        ServerError: Nobody answers, the key is refused, or it is no OpenAI-compatible server.
    """
    base = endpoint.rstrip("/")
    root = base.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(
        headers=headers, timeout=timeout_s, mounts=STRAIGHT_TO_LOOPBACK, verify=certificates()
    ) as client:
        try:
            answer = await client.get(f"{base}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{base} does not answer ({reason_of(error)})") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ServerError(f"{base} refuses the API key (HTTP {answer.status_code})")
        if answer.status_code in (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE):
            raise UnreachableError(f"{base} is not ready (HTTP {answer.status_code})")
        try:
            cards = [card for card in answer.json()["data"] if isinstance(card.get("id"), str)]
            first = cards[0]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{base} is no OpenAI-compatible server: {base}/models answered HTTP {answer.status_code} without a "
                "model; the URL usually ends in /v1"
            ) from error
        version = await _get_json(client, f"{root}/version")
        # Only there when vLLM runs in its development mode.
        info = await _get_json(client, f"{root}/server_info?config_format=json")
    scheduler = _dig(info, "vllm_config", "scheduler_config")
    # An adapter of vLLM's comes without a length: it has its base model's, which is listed first.
    asked = next((card for card in cards if card["id"] == model), first)
    return RunningServer(
        model=model or str(first["id"]),
        models=tuple(str(card["id"]) for card in cards),
        version=_text(_dig(version, "version")),
        max_model_len=_number(asked.get("max_model_len")) or _number(first.get("max_model_len")),
        max_num_batched_tokens=_number(_dig(scheduler, "max_num_batched_tokens")),
        max_num_scheduled_tokens=_number(_dig(scheduler, "max_num_scheduled_tokens")),
        long_prefill_token_threshold=_number(_dig(scheduler, "long_prefill_token_threshold")),
        simulated=answer.headers.get(SIMULATED_HEADER),
    )


def reason_of(error: Exception) -> str:
    """An exception in one line, its name where it has no words."""
    return " ".join(str(error).split()) or type(error).__name__


def _dig(tree: object, *keys: str) -> object:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from serving.attach import RunningServer, UnreachableError, describe_running
from serving.command import ServerError
from tests.answering import answering, pages

VLLM: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "qwen", "max_model_len": 8192}, {"id": "lora"}]},
    "/version": {"version": "0.32.0"},
}


@contextmanager
def serving(found: dict[str, object], *, status: int = 200, key: str | None = None) -> Iterator[str]:
    with answering(pages(found, status=status, key=key)) as url:
        yield f"{url}/v1"


async def test_a_vllm_server() -> None:
    with serving(VLLM) as endpoint:
        found = await describe_running(endpoint + "/")
    assert found == RunningServer(model="qwen", models=("qwen", "lora"), version="0.32.0", max_model_len=8192)


async def test_budgets_of_a_server_in_development_mode() -> None:
    scheduler = {"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 512, "max_num_scheduled_tokens": None}
    info = {"/server_info?config_format=json": {"vllm_config": {"scheduler_config": scheduler}}}
    with serving(VLLM | info) as endpoint:
        found = await describe_running(endpoint)
    assert (found.max_num_batched_tokens, found.long_prefill_token_threshold) == (2048, 512)
    assert found.max_num_scheduled_tokens is None


@pytest.mark.parametrize(
    ("wanted", "model", "length"),
    [
        pytest.param(None, "qwen", 8192, id="the first that is listed"),
        pytest.param("small", "small", 4096, id="another, with its own length"),
        pytest.param("lora", "lora", 8192, id="an adapter of the first, which is listed without one"),
    ],
)
async def test_the_model_that_requests_will_name(wanted: str | None, model: str, length: int) -> None:
    cards = [*VLLM["/v1/models"]["data"], {"id": "small", "max_model_len": 4096}]
    with serving(VLLM | {"/v1/models": {"data": cards}}) as endpoint:
        found = await describe_running(endpoint, model=wanted)
    assert (found.model, found.models, found.max_model_len) == (model, ("qwen", "lora", "small"), length)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param(RunningServer("m", ("m",)), "OpenAI-compatible server with m", id="one that says nothing"),
        pytest.param(
            RunningServer("m", ("a", "m"), "0.32.0", 8192, 2048),
            "vLLM 0.32.0 with m, 8192 tokens of context, step budget 2048",
            id="one that says all",
        ),
        pytest.param(
            RunningServer("m", ("a",), "0.32.0", 8192, 2048, 512),
            "vLLM 0.32.0 with m (which it does not list), 8192 tokens of context, step budget 512",
            id="a smaller budget of a step, another model",
        ),
    ],
)
def test_in_words(found: RunningServer, words: str) -> None:
    assert found.in_words() == words


async def test_another_openai_compatible_server() -> None:
    with serving({"/v1/models": {"object": "list", "data": [{"id": "m", "max_model_len": "much"}]}}) as endpoint:
        found = await describe_running(endpoint)
    assert found == RunningServer(model="m", models=("m",))


async def test_the_key_is_sent() -> None:
    with serving(VLLM, key="s3cret") as endpoint:
        assert (await describe_running(endpoint, "s3cret")).model == "qwen"
        with pytest.raises(ServerError, match="refuses the API key") as caught:
            await describe_running(endpoint, "wr0ng")
    assert "wr0ng" not in str(caught.value)


@pytest.mark.parametrize(
    ("pages", "status", "expected"),
    [
        pytest.param({"/v1/models": "<html>"}, 200, "no OpenAI-compatible server", id="a web page"),
        pytest.param({"/v1/models": {"data": []}}, 200, "no OpenAI-compatible server", id="no model"),
        pytest.param({"/v1/models": ["data"]}, 200, "no OpenAI-compatible server", id="another shape"),
        pytest.param({}, 404, "usually ends in /v1", id="wrong path"),
        pytest.param(VLLM, 503, "not ready", id="not ready"),
    ],
)
async def test_what_cannot_be_used(pages: dict[str, object], status: int, expected: str) -> None:
    with serving(pages, status=status) as endpoint, pytest.raises(ServerError, match=expected):
        await describe_running(endpoint)


@pytest.mark.parametrize("url", ["", "/v1"])
async def test_nobody_answers(url: str) -> None:
    with serving({}) as endpoint:
        pass
    with pytest.raises(UnreachableError, match="does not answer"):
        await describe_running(endpoint.removesuffix("/v1") + url, timeout_s=2)

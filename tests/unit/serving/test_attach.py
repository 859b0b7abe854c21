from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serving.attach import RunningServer, UnreachableError, describe_running
from serving.command import ServerError
from tests.answering import answering, pages

VLLM = {
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

"""Chunked prefill as the default deployment does it, seen in the engine's own step log."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.describe import description_messages, pictures
from serving.client import ModelClient, ModelRequest
from serving.enginemetrics import EngineMetrics
from serving.records import Outcome, RequestRecord, TokenEvent, now_s
from serving.steplog import StepRecord, parse_steps
from tests.integration.served import ServedModel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def description(model_server: ServedModel, seed: int) -> ModelRequest:
    """What the product sends for a person, of a frame that no other test sends."""
    config = model_server.config
    frame = np.random.default_rng(seed).integers(0, 256, (720, 1280, 3), dtype=np.uint8)
    jpegs = pictures(frame, (600.0, 200.0, 700.0, 480.0), config.describe)
    camera = config.serving.classes["camera"]
    return ModelRequest(
        traffic_class="camera",
        messages=description_messages(config.describe, jpegs),
        max_tokens=camera.max_tokens,
        temperature=camera.temperature,
        due_s=now_s(),
        extra_body=camera.extra_body,
    )


def chat(text: str, max_tokens: int) -> ModelRequest:
    return ModelRequest(
        traffic_class="chat",
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        due_s=now_s(),
        extra_body={"ignore_eos": True},
    )


async def steps_after(log_path: Path, offset: int, enough: int) -> list[StepRecord]:
    """The steps logged since `offset`, once they hold `enough` prefill tokens."""
    steps: list[StepRecord] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with log_path.open("rb") as file:
            file.seek(offset)
            text = file.read().decode(errors="replace")
        steps = list(parse_steps(text.splitlines()))
        if sum(step.prefill_tokens for step in steps) >= enough:
            return steps
        await asyncio.sleep(0.2)
    pytest.fail(f"the log holds {sum(step.prefill_tokens for step in steps)} of {enough} prefill tokens")


async def until_idle(endpoint: str) -> None:
    """Until the engine runs nothing, and has written what it did."""
    deadline = time.monotonic() + 30
    metrics = EngineMetrics()
    while (await metrics.read(endpoint)).running:
        assert time.monotonic() < deadline, "the engine does not come to rest"
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.5)


def computed(record: RequestRecord) -> int:
    """Prompt tokens that the engine had to compute."""
    assert record.outcome is Outcome.DONE, record.error
    assert record.prompt_tokens is not None
    return record.prompt_tokens - (record.cached_tokens or 0)


async def test_one_description_takes_several_steps_and_shares_one(
    model_server: ServedModel, client: ModelClient
) -> None:
    """A chat streams while a person is described: the picture's prefill is cut up, and the chat decodes beside it."""
    server = model_server.config.serving.server
    await until_idle(model_server.endpoint)  # or the last steps of an earlier chat would be in what is read
    offset = model_server.log_path.stat().st_size
    streaming = asyncio.Event()
    loop = asyncio.get_running_loop()

    def token_came(_event: TokenEvent) -> None:
        loop.call_soon_threadsafe(streaming.set)

    talk = client.start(
        chat("Tell me a long story about a lighthouse.", max_tokens=200),
        on_token=token_came,
    )
    await streaming.wait()
    described = await client.start(description(model_server, seed=1)).result()
    assert not talk.done(), "the chat must have streamed all the while"
    talk.cancel("seen enough")
    chatted = await talk.result()
    assert chatted.first_token_s is not None

    assert described.prompt_tokens is not None
    image_tokens = model_server.config.image_tokens_per_description()
    assert image_tokens >= 500
    assert image_tokens < described.prompt_tokens < 2 * image_tokens
    steps = await steps_after(model_server.log_path, offset, enough=computed(described))
    # The chat's own prefill came before its first token, so before the first decode.
    first_decode = next(position for position, step in enumerate(steps) if step.decode_tokens)
    prefill = [step for step in steps[first_decode:] if step.prefill_tokens]

    assert sum(step.prefill_tokens for step in prefill) == computed(described)
    assert len(prefill) >= 3
    assert any(step.shared for step in prefill)
    assert max(step.tokens for step in prefill) <= server.max_num_batched_tokens
    assert max(step.prefill_tokens for step in prefill) <= server.long_prefill_token_threshold
    assert sum(step.encoder_inputs for step in prefill) == 1


async def test_a_chat_does_not_wait_for_the_pictures_before_it(model_server: ServedModel, client: ModelClient) -> None:
    """With a threshold below the budget a chat that comes second has its first token first."""
    in_flight = model_server.config.trigger.max_in_flight
    offset = model_server.log_path.stat().st_size
    first_picture = asyncio.Event()
    loop = asyncio.get_running_loop()

    def picture_token(_event: TokenEvent) -> None:
        loop.call_soon_threadsafe(first_picture.set)

    described = [
        client.start(description(model_server, seed=10 + number), on_token=picture_token) for number in range(in_flight)
    ]
    await steps_after(model_server.log_path, offset, enough=1)
    assert not first_picture.is_set(), "the pictures must still be in prefill when the chat comes"
    chatted = await client.start(chat("What is the capital of France?", max_tokens=4)).result()
    records = [await request.result() for request in described]
    assert chatted.first_token_s is not None
    assert all(record.first_token_s is not None for record in records)
    last_picture_s = max(record.first_token_s or 0.0 for record in records)
    assert chatted.first_token_s < last_picture_s

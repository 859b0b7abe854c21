"""Chunking changes the schedule, not the result: greedy answers of the real server with budgets 128 and 4096."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import pytest

from serving.startuplog import read_startup_log
from tests.integration.served import served

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

BUDGETS = (128, 4096)
ANSWER_TOKENS = 48
# Two tokens whose log-probabilities are closer than this may change places with the order of 16-bit additions.
TIE = 0.25
LONG_TEXT = "A street at noon. " + " ".join(
    f"Person {number} walks past shop {number * 7 % 13} and looks at clock {number * 5 % 11}." for number in range(40)
)


@dataclass(frozen=True)
class Answer:
    """One greedy answer: the tokens, and how far ahead of the second choice each was."""

    prompt_tokens: int
    tokens: list[str]
    leads: list[float]


def _picture() -> str:
    """A 512x1024 picture of bars and noise as a data URL: nine tiles for the sample model."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 60, (1024, 512, 3), dtype=np.uint8)
    pixels[200:900, 150:350] += np.array([20, 90, 160], dtype=np.uint8)
    done, jpeg = cv2.imencode(".jpg", pixels)
    assert done
    return "data:image/jpeg;base64," + base64.b64encode(jpeg.tobytes()).decode()


QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "short text": [{"role": "user", "content": "What is the capital of France?"}],
    "long text": [{"role": "user", "content": f"{LONG_TEXT} Sum this up in two sentences."}],
    "picture": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Describe the person."},
                {"type": "image_url", "image_url": {"url": _picture()}},
            ],
        }
    ],
}


def _ask(endpoint: str, messages: list[dict[str, Any]]) -> Answer:
    body = {
        "model": httpx.get(f"{endpoint}/models", timeout=30).json()["data"][0]["id"],
        "messages": messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "logprobs": True,
        "top_logprobs": 2,
    }
    response = httpx.post(f"{endpoint}/chat/completions", json=body, timeout=120)
    response.raise_for_status()
    content = response.json()
    entries = content["choices"][0]["logprobs"]["content"]
    return Answer(
        prompt_tokens=content["usage"]["prompt_tokens"],
        tokens=[entry["token"] for entry in entries],
        leads=[entry["top_logprobs"][0]["logprob"] - entry["top_logprobs"][1]["logprob"] for entry in entries],
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Answer]]:
    """Each question to a server of each budget, one server after the other."""
    found = {}
    for budget in BUDGETS:
        folder: Path = tmp_path_factory.mktemp(f"budget-{budget}")
        with served(
            folder,
            f"serving.server.max_num_batched_tokens={budget}",
            "serving.server.long_prefill_token_threshold=0",
        ) as server:
            assert read_startup_log(server.log_path.read_text(errors="replace")).cache_tokens
            found[budget] = {name: _ask(server.endpoint, messages) for name, messages in QUESTIONS.items()}
    return found


@pytest.mark.parametrize("question", list(QUESTIONS))
def test_greedy_answers_are_the_same_but_for_ties(
    question: str, answers: dict[int, dict[str, Answer]], record_property: pytest.RecordProperty
) -> None:
    chunked, whole = (answers[budget][question] for budget in BUDGETS)
    assert chunked.prompt_tokens == whole.prompt_tokens
    length = min(len(chunked.tokens), len(whole.tokens))
    first = next((i for i in range(length) if chunked.tokens[i] != whole.tokens[i]), None)
    if first is None:
        record_property("difference", "none")
        assert len(chunked.tokens) == len(whole.tokens) > 0
        return
    # From here on the two answers go different ways; what counts is how near the choice was.
    gap = max(chunked.leads[first], whole.leads[first])
    record_property("difference", f"token {first} of {length}, log-probability gap {gap:.3f}")
    print(f"{question}: {chunked.tokens[first]!r} or {whole.tokens[first]!r} at token {first}, gap {gap:.3f}")
    assert gap < TIE


def test_the_small_budget_really_chunks(answers: dict[int, dict[str, Answer]]) -> None:
    for question in ("long text", "picture"):
        assert answers[128][question].prompt_tokens > 3 * 128

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from serving.config import ImageTokens
from serving.workload import Arrivals, ClassLoad, Lengths, Pictures, Workload, draw


def load(duration_s: float = 1000, seed: int = 1, **classes: ClassLoad) -> Workload:
    return Workload(duration_s=duration_s, seed=seed, classes=classes)


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        pytest.param(Arrivals(rate_per_s=5), 1.0, id="poisson"),
        pytest.param(Arrivals(process="constant", rate_per_s=5), 0.0, id="constant"),
        pytest.param(Arrivals(process="gamma", rate_per_s=5, variation=2), 2.0, id="bursts"),
        pytest.param(Arrivals(process="gamma", rate_per_s=5, variation=0.5), 0.5, id="nearly even"),
    ],
)
def test_arrivals_have_their_rate_and_their_burstiness(arrivals: Arrivals, variation: float) -> None:
    due = np.array([request.due_s for request in draw(load(chat=ClassLoad(arrivals=arrivals)))])
    assert len(due) == pytest.approx(5000, rel=0.08)
    gaps = np.diff(due)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, abs=0.15)
    assert due.max() < 1000


def test_a_recorded_trace_is_replayed() -> None:
    arrivals = Arrivals(process="replay", times_s=(0.5, 0.5, 3, 2000))
    assert [request.due_s for request in draw(load(chat=ClassLoad(arrivals=arrivals)))] == [0.5, 0.5, 3]


@pytest.mark.parametrize(
    ("lengths", "mean", "low", "high"),
    [
        pytest.param(Lengths(mean=80), 80, 80, 80, id="constant"),
        pytest.param(Lengths(kind="uniform", minimum=10, maximum=20), 15, 10, 20, id="uniform"),
        pytest.param(Lengths(kind="normal", mean=100, spread=10), 100, 50, 150, id="normal"),
        pytest.param(Lengths(kind="lognormal", mean=100, spread=80), 100, 1, 3000, id="lognormal"),
        pytest.param(Lengths(kind="normal", mean=100, spread=50, minimum=90, maximum=110), 100, 90, 110, id="cut"),
    ],
)
def test_lengths(lengths: Lengths, mean: float, low: int, high: int) -> None:
    drawn = [request.output_tokens for request in draw(load(chat=ClassLoad(output=lengths)))]
    assert low <= min(drawn) and max(drawn) <= high
    assert np.mean(drawn) == pytest.approx(mean, rel=0.1)


def test_a_seed_draws_one_load_and_classes_do_not_disturb_each_other() -> None:
    chat = ClassLoad(output=Lengths(kind="uniform", minimum=5, maximum=500))
    alone = draw(load(chat=chat))
    assert alone == draw(load(chat=chat))
    assert alone != draw(load(seed=2, chat=chat))
    both = [request for request in draw(load(chat=chat, camera=ClassLoad())) if request.traffic_class == "chat"]
    assert [(r.due_s, r.output_tokens) for r in both] == [(r.due_s, r.output_tokens) for r in alone]


def test_requests_are_numbered_in_the_order_they_are_due() -> None:
    drawn = draw(load(duration_s=50, chat=ClassLoad(), camera=ClassLoad(pictures=Pictures())))
    assert [request.number for request in drawn] == list(range(len(drawn)))
    assert [request.due_s for request in drawn] == sorted(request.due_s for request in drawn)
    assert {request.traffic_class: request.pictures for request in drawn} == {"chat": None, "camera": Pictures()}


def test_a_part_of_the_requests_shares_a_prefix() -> None:
    drawn = draw(load(chat=ClassLoad(prompt=Lengths(mean=50), prefix_tokens=200, prefix_share=0.25, prefixes=3)))
    sharing = [request for request in drawn if request.prefix is not None]
    assert len(sharing) / len(drawn) == pytest.approx(0.25, abs=0.05)
    assert {request.prefix for request in sharing} == {"chat/0", "chat/1", "chat/2"}
    assert {request.text_tokens for request in sharing} == {200}  # at least the prefix
    assert {request.text_tokens for request in drawn if request.prefix is None} == {50}


def test_conversations_grow_turn_by_turn() -> None:
    chat = ClassLoad(
        arrivals=Arrivals(process="constant", rate_per_s=1),
        prompt=Lengths(mean=10),
        output=Lengths(mean=5),
        turns=3,
        conversations=2,
    )
    drawn = draw(load(duration_s=8, chat=chat))
    assert [(r.conversation, r.history_tokens, r.text_tokens) for r in drawn] == [
        ("chat/0", 0, 10),
        ("chat/1", 0, 10),
        ("chat/0", 15, 25),
        ("chat/1", 15, 25),
        ("chat/0", 30, 40),
        ("chat/1", 30, 40),
        ("chat/6", 0, 10),
        ("chat/7", 0, 10),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param({"classes": {}}, "one or more", id="no classes"),
        pytest.param({"classes": {"chat": {"speed": 1}}}, "Extra inputs", id="unknown key"),
        pytest.param({"classes": {"chat": {"arrivals": {"rate_per_s": 0}}}}, "greater than 0", id="no rate"),
        pytest.param({"classes": {"chat": {"arrivals": {"process": "replay"}}}}, "replay needs some", id="no trace"),
        pytest.param(
            {"classes": {"chat": {"arrivals": {"process": "replay", "times_s": [2, 1]}}}}, "ascending", id="unsorted"
        ),
        pytest.param({"classes": {"chat": {"output": {"minimum": 5, "maximum": 4}}}}, "at most maximum", id="bounds"),
        pytest.param(
            {"duration_s": 1e6, "classes": {"chat": {"arrivals": {"rate_per_s": 10}}}}, "allowed", id="too many"
        ),
    ],
)
def test_faults_are_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Workload.model_validate(content)


def test_pictures_may_have_a_rule_of_their_own() -> None:
    usual = ImageTokens(longest_edge_px=256)
    tiled = Pictures(width_px=1024, height_px=1024, rule=ImageTokens(longest_edge_px=1024))
    assert Pictures(width_px=1024, height_px=1024).tokens_each(usual) == 64
    assert tiled.tokens_each(usual) == 17 * 64

"""The engine taken on step by step does what the simulation of the whole load does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.config import ImageTokens
from serving.simlive import EngineFullError, LiveSimulation
from serving.simstate import SimImage, SimRequest
from serving.simulate import EngineSettings, FrontEnd, Policy, SimulationError, as_engine_sees, simulate
from serving.steptime import FEATURE_NAMES, StepTime
from serving.workload import Arrivals, ClassLoad, Lengths, Pictures, PlannedRequest, Workload, draw

COSTS = {"fixed": 0.005, "decode_tokens": 1e-4, "prefill_tokens": 4e-4, "prefill_context": 1e-7, "encoder_items": 0.01}
STEP = StepTime(linear=tuple(COSTS.get(name, 0.0) for name in FEATURE_NAMES), source="test")
PICTURE_TOKENS = 576


def load() -> list[PlannedRequest]:
    return draw(
        Workload(
            duration_s=20,
            seed=5,
            classes={
                "camera": ClassLoad(
                    arrivals=Arrivals(rate_per_s=1.5), prompt=Lengths(mean=120), output=Lengths(mean=20),
                    pictures=Pictures(width_px=512, height_px=1024), prefix_tokens=100, priority=1,
                ),
                "chat": ClassLoad(
                    arrivals=Arrivals(rate_per_s=3), prompt=Lengths(kind="lognormal", mean=60, spread=60),
                    output=Lengths(kind="uniform", minimum=5, maximum=60), turns=3, conversations=4,
                ),
            },
        )
    )  # fmt: skip


def contents(request: SimRequest, block: int) -> list[Any]:
    """What the batch simulation takes blocks to hold: a shared prefix, then the stream's own."""
    shared = request.prefix_tokens // block
    return [
        ("prefix", request.prefix, index) if index < shared else ("stream", request.stream, index)
        for index in range((request.prompt_tokens + request.output_tokens) // block)
    ]


def live(settings: EngineSettings, **more: Any) -> LiveSimulation:
    return LiveSimulation(settings, STEP, **{"slots": 64, "largest_image_tokens": PICTURE_TOKENS, **more})


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"asynchronous": True}, id="two steps in flight"),
        pytest.param({"cache_blocks": 130}, id="preempting"),
        pytest.param({"by_priority": True, "cache_blocks": 130}, id="by priority"),
        pytest.param({"policy": Policy.DECODE_FIRST}, id="decode first"),
        pytest.param({"long_prefill_threshold": 64, "asynchronous": True}, id="long prefills cut"),
    ],
)
def test_every_token_comes_when_the_batch_simulation_says(settings: dict[str, Any]) -> None:
    engine = EngineSettings(**{"budget_tokens": 256, "cache_blocks": 2000, "max_num_seqs": 12, **settings})
    # Whoever drives a live engine decides when a turn is sent: here when it is due, whatever the answer before it does.
    planned = [replace(request, history_tokens=0) for request in load()]
    expected = simulate(planned, engine, STEP)
    running = live(engine)
    times: dict[int, list[float]] = {request.number: [] for request in planned}
    holders: dict[int, int] = {}

    def advance(until_s: float) -> None:
        for written in running.advance(until_s):
            times[holders[written.slot]] += written.times_s

    for request in planned:
        advance(request.due_s)
        seen = replace(
            as_engine_sees(request, ImageTokens(), FrontEnd()), stream=request.conversation or request.number
        )
        holders[running.submit(seen, contents(seen, engine.block_tokens))] = request.number
    advance(1e9)
    assert running.idle
    for request in planned:
        first = int(expected.token_first[request.number])
        assert times[request.number] == pytest.approx(expected.token_s[first : first + request.output_tokens])
    assert running.totals.preemptions == int(expected.preemptions.sum())
    assert running.totals.steps == len(expected.steps)
    assert running.totals.step_tokens == int(expected.steps[:, 1:3].sum())
    assert running.cache_usage == 0
    if settings.get("cache_blocks") == 130:
        assert running.totals.preemptions > 0


def request(arrival_s: float, prompt: int = 100, output: int = 5, **more: Any) -> SimRequest:
    return SimRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output, **more)


def submit(engine: LiveSimulation, asked: SimRequest) -> int:
    """A request that shares nothing with another."""
    return engine.submit(asked, [object() for _ in range((asked.prompt_tokens + asked.output_tokens) // 16)])


ENGINE = EngineSettings(budget_tokens=256, cache_blocks=500, max_num_seqs=2)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "state", [pytest.param(name, id=name) for name in ("not arrived", "waiting", "prefilling", "writing")]
)
def test_a_cancelled_request_gives_everything_back(state: str, asynchronous: bool) -> None:
    engine = live(replace(ENGINE, asynchronous=asynchronous))
    other = [submit(engine, request(0, 40, 400)) for _ in range(2 if state == "waiting" else 1)]
    engine.advance(0.2)
    victim = submit(engine, request(0.2, 3000 if state == "prefilling" else 100, 50))
    written = [] if state == "not arrived" else engine.advance(0.21 if state != "writing" else 0.5)
    assert (victim in {item.slot for item in written}) == (state == "writing")
    engine.cancel(victim)
    engine.cancel(victim)
    assert victim not in {item.slot for item in engine.advance(1.0)}
    assert engine.running == len(other)
    assert engine.waiting == 0
    for slot in other:
        engine.cancel(slot)
    engine.advance(1e9)
    assert engine.idle
    assert (engine.running, engine.cache_usage) == (0, 0.0)
    again = [submit(engine, request(1e9)) for _ in range(64)]  # every slot is free again
    assert len(set(again)) == 64
    assert sum(len(item.times_s) for item in engine.advance(2e9)) == 64 * 5


def test_more_than_there_are_slots_for_is_refused() -> None:
    engine = live(ENGINE, slots=3)
    for _ in range(3):
        submit(engine, request(0))
    with pytest.raises(EngineFullError):
        submit(engine, request(0))


def test_contents_are_recognised_and_numbers_are_used_again() -> None:
    """Far more different prompts than there are numbers; the first is still known while its blocks are cached."""
    engine = live(replace(ENGINE, cache_blocks=40, max_model_len=256), slots=3)
    for number in range(400):
        now = engine.totals.steps * 0.1
        engine.submit(request(now, 96, 4), [("first", b) for b in range(6)])
        engine.advance(now + 5)
        engine.submit(request(now + 5, 96, 4), [(number, b) for b in range(6)])
        engine.advance(now + 10)
    assert engine.idle
    assert engine.totals.prefix_hits == 399 * 80  # five of its six blocks: the last token is always computed


def test_a_picture_that_was_seen_is_not_encoded_again() -> None:
    engine = live(ENGINE)
    took = []
    for number, content in enumerate(("a", "a", "b")):
        image = SimImage(offset=10, tokens=500, content=content)
        submit(engine, request(number * 10.0, 600, 2, images=(image,)))
        (written,) = engine.advance(number * 10.0 + 9)
        assert written.ended
        took.append(written.times_s[0] - number * 10.0)
    assert took[0] - took[1] == pytest.approx(COSTS["encoder_items"])
    assert took[2] == pytest.approx(took[0])


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        pytest.param({}, request(0, 9000), "the request has 9005 tokens", id="longer than the model takes"),
        pytest.param(
            {"chunked_prefill": False}, request(0, 300), "without chunks", id="a whole prompt over the budget"
        ),
        pytest.param(
            {}, request(0, 100, images=tuple(SimImage(n, 1, n) for n in range(17))), "17 images", id="too many images"
        ),
    ],
)
def test_what_can_never_run_is_refused(settings: dict[str, Any], asked: SimRequest, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        submit(live(replace(ENGINE, **settings)), asked)

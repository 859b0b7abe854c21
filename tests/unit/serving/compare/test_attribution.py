"""Gaps divided exactly, on steps of an engine whose costs are known to the millisecond."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from serving.compare.attribution import (
    NO_STEPS,
    Attribution,
    attribute_gaps,
    attribute_stalls,
    in_words,
    short_id,
    totals_s,
)
from serving.compare.tables import RequestRow, StepRow

FIXED_S, DECODE_S, PREFILL_S, IMAGE_S = 0.020, 0.001, 0.0005, 0.0002
BETWEEN_S = 0.001
CHAT, CAMERA, OTHER = "chat-1", "camera-1", "document-1"


class Engine:
    """Makes steps one after another. `delay_s` is from a step's end to the client."""

    def __init__(self) -> None:
        self.steps: list[StepRow] = []
        self.now_s = 1000.0

    def step(
        self,
        *,
        decode: tuple[str, ...] = (),
        prefill: dict[str, int] | None = None,
        sampled: tuple[str, ...] = (),
        encoded: dict[str, int] | None = None,
        longer_s: float = 0.0,
        between_s: float = BETWEEN_S,
        preempted: int = 0,
    ) -> float:
        """One step; its end. Decodes give a token each, prefills only those `sampled`."""
        prefill, encoded = prefill or {}, encoded or {}
        image_tokens = sum(encoded.values())
        duration_s = FIXED_S + DECODE_S * len(decode) + PREFILL_S * sum(prefill.values()) + IMAGE_S * image_tokens
        start_s = self.now_s + between_s
        self.now_s = start_s + duration_s + longer_s
        self.steps.append(
            StepRow(
                block=0, arm="a", step=len(self.steps), start_s=start_s, end_s=self.now_s,
                duration_s=duration_s + longer_s, budget=256, decode_tokens=len(decode),
                prefill_tokens=sum(prefill.values()), decode_context=0, prefill_pairs=0, prefill_context=0,
                encoder_tokens=image_tokens, encoder_items=len(encoded), running=1, waiting=0, preempted=preempted,
                kv_cache_usage=0.1, request_ids=(*decode, *prefill),
                request_tokens=(*(1 for _ in decode), *prefill.values()),
                request_prefill=(*(False for _ in decode), *(True for _ in prefill)),
                request_outputs=(*(1 for _ in decode), *(int(name in sampled) for name in prefill)),
                encoder_request_ids=tuple(encoded), encoder_request_tokens=tuple(encoded.values()),
            )
        )  # fmt: skip
        return self.now_s

    def practice(self) -> None:
        """Steps of all kinds and sizes from other requests, for the fit."""
        for number in range(120):
            self.step(
                decode=tuple(f"warm-{place}" for place in range(number % 5)),
                prefill={"warm-p": 16 * (number % 7 + 1)} if number % 3 else {},
                encoded={"warm-p": 64 * (number % 4)} if number % 3 == 1 and number % 4 else {},
            )


def row(name: str, arrivals_s: list[float], **changes: object) -> RequestRow:
    """A request whose chunks of one token arrived then."""
    gaps = [later - earlier for earlier, later in pairwise(arrivals_s)]
    plain = RequestRow(
        block=0, arm="a", request_id=name, traffic_class=name.partition("-")[0], due_s=arrivals_s[0] - 1,
        sent_s=arrivals_s[0] - 1, first_token_s=arrivals_s[0], last_token_s=arrivals_s[-1],
        finished_s=arrivals_s[-1], outcome="done", error_kind=None, error=None, reason=None, finish_reason="stop",
        prompt_tokens=10, cached_tokens=0, completion_tokens=len(arrivals_s), image_tokens=0, warm_up=False,
        behind_cap_s=0.0, tokens_counted=True, gap_end_s=tuple(arrivals_s[1:]), gap_duration_s=tuple(gaps),
        gap_tokens=(1,) * len(gaps),
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def parts_ms(found: Attribution) -> dict[tuple[str, str | None], float]:
    return {(part.cause, part.request_id): round(1000 * part.duration_s, 3) for part in found.parts}


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.practice()
    return engine


def first_token(engine: Engine) -> float:
    return engine.step(prefill={CHAT: 10}, sampled=(CHAT,))


def only_gap(engine: Engine, arrivals_s: list[float], *more: RequestRow, **changes: object) -> Attribution:
    """The chat's last gap."""
    rows = [row(CHAT, arrivals_s, **changes), *more]
    found = [gap for gap in attribute_gaps(rows, engine.steps) if gap.request_id == CHAT][-1]
    assert sum(part.duration_s for part in found.parts) == pytest.approx(found.duration_s, abs=5e-6)
    return found


def test_a_gap_that_only_decodes(engine: Engine) -> None:
    arrivals = [first_token(engine) + 0.002, engine.step(decode=(CHAT, "x", "y")) + 0.002]
    found = only_gap(engine, arrivals)
    assert parts_ms(found) == {("decode", None): pytest.approx(24.0, abs=0.01)}
    assert found.excess_s == pytest.approx(0, abs=1e-5)
    assert (found.steps, found.fitted, found.missing) == (1, True, None)


def test_prefills_and_a_picture_in_one_step(engine: Engine) -> None:
    camera = row(CAMERA, [2000.0, 2001.0])
    start = first_token(engine)
    end = engine.step(decode=(CHAT,), prefill={CAMERA: 96, OTHER: 32}, encoded={CAMERA: 64})
    found = only_gap(engine, [start, end], camera)
    assert parts_ms(found) == {
        ("decode", None): pytest.approx(22.0, abs=0.1),
        ("prefill", CAMERA): pytest.approx(48.0, abs=0.1),
        ("prefill", OTHER): pytest.approx(16.0, abs=0.1),
        ("encoder", CAMERA): pytest.approx(12.8, abs=0.1),
    }
    main = found.main
    assert main is not None
    assert (main.cause, main.request_id, main.traffic_class, main.tokens) == ("prefill", CAMERA, "camera", 96)
    assert in_words(main) == "prefill of camera request camera-1 (96 tokens): 48 ms"
    other = next(part for part in found.parts if part.request_id == OTHER)
    assert in_words(other).startswith("prefill of another's request")


def test_steps_without_the_request_are_waiting_behind_those_that_filled_them(engine: Engine) -> None:
    start = first_token(engine)
    engine.step(prefill={CAMERA: 100})
    engine.step(prefill={CAMERA: 50, OTHER: 150}, decode=("x",))
    end = engine.step(decode=(CHAT,))
    found = only_gap(engine, [start, end], row(CAMERA, [2000.0, 2001.0]))
    assert parts_ms(found) == {
        ("waiting", CAMERA): pytest.approx(70.0 + 121.0 / 4, abs=0.1),
        ("waiting", OTHER): pytest.approx(121.0 * 3 / 4, abs=0.1),
        ("decode", None): pytest.approx(21.0 + 3.0, abs=0.1),
    }
    assert found.steps == 3
    assert found.main is not None
    assert in_words(found.main) == (
        "not scheduled, though running, behind the prefill of camera request camera-1 (150 tokens): 100 ms"
    )
    assert totals_s([found])["waiting", "camera"] == pytest.approx(0.10025, abs=0.0001)


def test_a_step_without_the_request_and_without_prefills_has_nobody_to_blame(engine: Engine) -> None:
    start = first_token(engine)
    engine.step(decode=("x",))
    end = engine.step(decode=(CHAT,))
    found = only_gap(engine, [start, end])
    (waiting,) = [part for part in found.parts if part.cause == "waiting"]
    assert waiting.request_id is None
    assert in_words(waiting) == "not scheduled, though running: 21 ms"


def test_a_preemption_and_what_it_costs_to_come_back(engine: Engine) -> None:
    start = first_token(engine)
    engine.step(decode=("x",), preempted=1)
    end = engine.step(prefill={CHAT: 60}, sampled=(CHAT,))
    later = engine.step(decode=(CHAT,))
    rows = [row(CHAT, [start, end, later])]
    first, second = attribute_gaps(rows, engine.steps)
    assert parts_ms(first) == {
        ("preempted", CHAT): pytest.approx(21.0 + 30.0, abs=0.1),
        ("decode", None): pytest.approx(20.0 + 2.0, abs=0.1),
    }
    assert first.main is not None
    assert in_words(first.main).startswith("preempted")
    assert set(parts_ms(second)) == {("decode", None)}


def test_what_came_late_after_its_step(engine: Engine) -> None:
    start, end = first_token(engine), engine.step(decode=(CHAT,))
    arrivals = [start + 0.002, end + 0.302]
    assert parts_ms(only_gap(engine, arrivals))["front_end", None] == pytest.approx(300.0)
    (found,) = attribute_gaps([row(CHAT, arrivals)], engine.steps, client_lag_s={0: 0.020})
    assert parts_ms(found)["front_end", None] == pytest.approx(280.0)
    assert parts_ms(found)["client", None] == pytest.approx(20.0)


def test_the_next_gap_is_shorter_by_as_much(engine: Engine) -> None:
    ends = [first_token(engine), engine.step(decode=(CHAT,)), engine.step(decode=(CHAT,))]
    found = only_gap(engine, [ends[0], ends[1] + 0.005, ends[2]])
    assert parts_ms(found)["front_end", None] == pytest.approx(-5.0)


def test_the_words_for_less_than_nothing(engine: Engine) -> None:
    ends = [first_token(engine), engine.step(decode=(CHAT,))]
    found = only_gap(engine, [ends[0] + 0.010, ends[1]])
    assert "less of a delay on the way to the client than the token before had: -10 ms" in map(in_words, found.parts)


def test_an_engine_that_rests_between_steps(engine: Engine) -> None:
    start = first_token(engine)
    end = engine.step(decode=(CHAT,), between_s=0.081)
    assert parts_ms(only_gap(engine, [start, end]))["between_steps", None] == pytest.approx(80.0, abs=0.01)


@pytest.mark.parametrize("prefill", [pytest.param({}, id="decoding"), pytest.param({CAMERA: 100}, id="prefilling")])
def test_a_step_slower_than_its_like_is_not_blamed_on_anybody(engine: Engine, prefill: dict[str, int]) -> None:
    start = first_token(engine)
    end = engine.step(decode=(CHAT,), prefill=prefill, longer_s=0.4)
    found = only_gap(engine, [start, end])
    assert found.unexplained_s == pytest.approx(0.4, abs=0.01)
    assert parts_ms(found).get(("prefill", CAMERA), 0.0) == pytest.approx(50.0 if prefill else 0.0, abs=10.0)
    assert found.main is not None
    assert found.main.cause == "unexplained"


def test_a_bad_fit_does_not_explain_everything(engine: Engine) -> None:
    for number in range(400):  # the same work in 10 or 100 ms
        engine.step(decode=("x",), longer_s=0.0 if number % 2 else 0.1)
    start = first_token(engine)
    end = engine.step(decode=(CHAT,), longer_s=1.0)
    found = only_gap(engine, [start, end])
    assert found.unexplained_s > 0.85


def test_ids_are_shown_by_their_ends() -> None:
    assert short_id("camera-1") == "camera-1"
    assert short_id("6b0c9b4e-0003-00042") == "0003-00042"


def test_a_chunk_of_several_tokens_is_joined_by_count(engine: Engine) -> None:
    """Three tokens come in one chunk, 100 ms after the last one's step: the other two steps are inside the gap."""
    start = first_token(engine)
    ends = [engine.step(decode=(CHAT,)) for _ in range(3)]
    engine.step(decode=("x",))
    late = ends[2] + 0.100
    last = engine.step(decode=(CHAT,), between_s=0.2)
    rows = [row(CHAT, [start, late, last], gap_tokens=(3, 1), completion_tokens=5)]
    first, second = attribute_gaps(rows, engine.steps)
    assert (first.steps, first.tokens) == (3, 3)
    assert parts_ms(first) == {
        ("decode", None): pytest.approx(66.0, abs=0.1), ("front_end", None): pytest.approx(100.0),
    }  # fmt: skip
    assert second.steps == 2


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"tokens_counted": False}, id="a server that counts nothing"),
     pytest.param({"completion_tokens": 40}, id="steps missing at the start")],
)  # fmt: skip
def test_without_counts_tokens_are_joined_by_time(engine: Engine, changes: dict[str, object]) -> None:
    start = first_token(engine)
    end = engine.step(decode=(CHAT,), prefill={CAMERA: 100})
    found = only_gap(engine, [start + 0.001, end + 0.001], **changes)
    assert parts_ms(found)["prefill", CAMERA] == pytest.approx(50.0, abs=0.1)


def test_nothing_is_known_without_steps(engine: Engine) -> None:
    rows = [row(CHAT, [1.0, 2.0])]
    (found,) = attribute_gaps(rows, [])
    assert (found.parts, found.missing, found.unexplained_s, found.main) == ((), NO_STEPS, 1.0, None)
    (unseen,) = attribute_gaps(rows, engine.steps)
    assert unseen.missing == "the steps of this request were not recorded"
    assert totals_s([found, unseen]) == {("unexplained", None): 2.0}


def test_too_few_steps_for_a_fit_are_divided_by_tokens() -> None:
    engine = Engine()
    start = first_token(engine)
    second = engine.step(decode=(CHAT,))
    end = engine.step(decode=(CHAT,), prefill={CAMERA: 96}, encoded={CAMERA: 32})
    found = attribute_gaps([row(CHAT, [start, second, end])], engine.steps)[-1]
    assert not found.fitted
    rest_ms = 1000 * engine.steps[-1].duration_s - 21.0
    assert parts_ms(found) == {
        ("decode", None): pytest.approx(22.0),
        ("prefill", CAMERA): pytest.approx(rest_ms * 96 / 128, abs=0.01),
        ("encoder", CAMERA): pytest.approx(rest_ms * 32 / 128, abs=0.01),
    }


def test_stalls_are_those_over_the_objective_the_longest_first(engine: Engine) -> None:
    ends = [
        first_token(engine),
        engine.step(decode=(CHAT,), prefill={CAMERA: 96}),
        engine.step(decode=(CHAT,)),
        engine.step(decode=(CHAT,), prefill={CAMERA: 200}),
    ]
    rows = [row(CHAT, ends), row(CAMERA, [2000.0, 2010.0])]
    found = attribute_stalls(rows, engine.steps, {"chat": 0.05})
    assert [gap.end_s for gap in found] == [ends[3], ends[1]]
    total = totals_s(found)
    assert total["prefill", "camera"] == pytest.approx(0.148, abs=0.001)
    assert sum(total.values()) == pytest.approx(sum(gap.duration_s for gap in found))


def test_each_arm_has_its_own_costs(engine: Engine) -> None:
    """A server twice as slow is not called unexplained."""
    slow = [
        replace(
            step, arm="slow", block=1, start_s=2 * step.start_s, end_s=2 * step.end_s, duration_s=2 * step.duration_s
        )
        for step in engine.steps
    ]
    start = first_token(engine)
    end = engine.step(decode=(CHAT,))
    names = [step for step in slow if "warm-0" in step.request_ids and not step.prefill_tokens]
    arrivals = [names[1].end_s, names[2].end_s]
    rows = [row(CHAT, [start, end]), row("warm-0", arrivals, block=1, arm="slow", tokens_counted=False)]
    ours, theirs = attribute_gaps(rows, [*engine.steps, *slow])
    assert ours.unexplained_s == pytest.approx(0, abs=1e-4)
    assert theirs.unexplained_s == pytest.approx(0, abs=1e-3)

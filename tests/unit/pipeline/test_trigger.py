"""Who is described, when, and why not: synthetic people walking through synthetic pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from pipeline.config import TriggerConfig
from pipeline.decisions import Decision, PersonState
from pipeline.frame import Box, Detection, Frame, Image
from pipeline.trigger import Trigger

WIDTH, HEIGHT = 640, 480
RED, BLUE, GREEN = (40, 40, 200), (200, 60, 40), (50, 180, 60)
STEP_S = 0.2


@dataclass
class Someone:
    """A person of one colour: `at` their left edge, `base` their feet; `track` None is unseen."""

    at: float
    track: int | None
    colour: tuple[int, int, int] = RED
    height: float = 160
    base: float = 400
    confidence: float = 0.8
    blurred: bool = False

    @property
    def box(self) -> Box:
        return (self.at, self.base - self.height, self.at + self.height * 0.4, self.base)


def zoomed(box: Box, zoom: int) -> Box:
    x1, y1, x2, y2 = box
    return x1 * zoom, y1 * zoom, x2 * zoom, y2 * zoom


@dataclass
class World:
    """Feeds a trigger, 5 frames a second, and keeps what it decided."""

    config: TriggerConfig = field(default_factory=TriggerConfig)
    batch: bool = False
    scene: int = 0
    cut: int = 0
    zoom: int = 1  # size of the picture
    now_s: float = 1000.0
    index: int = 0
    backdrop: int = 120
    finish: bool = True  # every request is answered at once
    ready: bool = True  # the model server
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trigger = Trigger(self.config, batch=self.batch, may_pick=lambda: self.ready)

    def picture(self, people: Iterable[Someone]) -> Image:
        rng = np.random.default_rng(3)
        image = np.full((HEIGHT, WIDTH, 3), self.backdrop, np.uint8)
        for person in people:
            x1, y1, x2, y2 = (round(v) for v in person.box)
            x1, y1, x2, y2 = max(0, x1), max(0, y1), min(WIDTH, x2), min(HEIGHT, y2)
            if x2 > x1 and y2 > y1:
                noise = 0 if person.blurred else rng.integers(-30, 30, (y2 - y1, x2 - x1, 1))
                image[y1:y2, x1:x2] = np.clip(np.array(person.colour) + noise, 0, 255)
        return image

    def see(self, *people: Someone) -> list[Decision]:
        """One frame with these people."""
        self.now_s += STEP_S
        self.index += 1
        media = self.index * STEP_S if self.batch else None
        image = self.picture(people).repeat(self.zoom, axis=0).repeat(self.zoom, axis=1)
        frame = Frame(image, self.index, self.now_s, media, self.scene, self.cut)
        found = [Detection(p.track, zoomed(p.box, self.zoom), p.confidence) for p in people if p.track is not None]
        decided = self.trigger.update(frame, found)
        self.decisions += decided
        for decision in decided:
            if decision.kind == "describe" and self.finish:
                self.trigger.finished(decision.person_id, self.now_s)
        return decided

    def stay(self, seconds: float, *people: Someone) -> list[Decision]:
        """The same picture for a while."""
        return [decision for _ in range(round(seconds / STEP_S)) for decision in self.see(*people)]

    def described(self) -> list[str]:
        return [decision.person_id for decision in self.decisions if decision.kind == "describe"]

    def only(self) -> PersonState:
        (state,) = self.trigger.tracks()
        return state


def test_a_person_is_described_once_when_confirmed_and_well_seen() -> None:
    world = World()
    world.see(Someone(100, 1))
    assert (world.only().state, world.only().person_id) == ("new", "")
    assert world.only().reason == "seen 1 of 3 times"
    world.see(Someone(105, 1))
    assert world.decisions == []
    (decision,) = world.see(Someone(110, 1))
    assert (decision.kind, decision.person_id, decision.track_id, decision.again) == ("describe", "1", 1, False)
    assert decision.reason == "a good view"
    assert decision.due_s == world.now_s
    assert decision.view is not None
    assert decision.view.box_px[3] - decision.view.box_px[1] == 160
    world.stay(20, Someone(110, 1))
    assert world.described() == ["1"]
    assert (world.only().state, world.only().reason) == ("described", "described")


def test_nobody_is_picked_while_the_model_server_is_not_ready() -> None:
    world = World(ready=False)
    stays, leaves = Someone(100, 1), Someone(400, 2, BLUE)
    world.stay(2, stays, leaves)
    assert [state.reason for state in world.trigger.tracks()] == ["waiting for the model server"] * 2
    world.stay(12, stays)
    assert world.decisions == []
    assert world.trigger.counts().not_described == {"left before the model server was ready": 1}
    world.ready = True
    (decision,) = world.see(stays)
    assert (decision.person_id, decision.due_s) == ("1", world.now_s)


def test_who_left_before_the_model_server_was_ready_is_picked_only_when_seen_again() -> None:
    world = World(ready=False)
    world.stay(1, Someone(300, 1))
    world.stay(2)
    world.ready = True
    assert world.stay(1) == []
    (decision,) = world.stay(1, Someone(300, 2))
    assert (decision.person_id, decision.track_id) == ("1", 2)


def test_the_view_is_the_newest_good_one_when_the_model_server_becomes_ready() -> None:
    world = World(ready=False)
    for height in (200, 120):
        world.stay(1, Someone(300, 1, height=height))
    world.stay(1, Someone(300, 1, height=160, blurred=True))
    world.ready = True
    (decision,) = world.see(Someone(300, 1, height=160, blurred=True))
    assert decision.view is not None
    assert decision.view.quality.height_px == 120


def test_the_present_is_the_due_time_when_it_is_given() -> None:
    trigger = Trigger(TriggerConfig(confirm_detections=1))
    world = World()
    person = Someone(100, 1)
    frame = Frame(world.picture([person]), 0, 50.0)
    (decision,) = trigger.update(frame, [Detection(1, person.box, 0.9)], now_s=50.25)
    assert decision.due_s == 50.25
    assert decision.view is not None
    assert decision.view.arrived_s == 50.0


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(Someone(-10, 1), "cut by the border", id="cut at the left"),
        pytest.param(Someone(600, 1), "cut by the border", id="cut at the right"),
        pytest.param(Someone(200, 1, base=480), "cut by the border", id="cut below"),
        pytest.param(Someone(200, 1, height=55), "too small (11% of", id="small in the picture"),
        pytest.param(Someone(200, 1, blurred=True), "blurred (sharpness", id="blurred"),
    ],
)
def test_a_bad_view_waits_for_a_better_one(bad: Someone, words: str) -> None:
    config = TriggerConfig(min_height_fraction=0.2)
    world = World(config)
    world.stay(2, bad)
    assert world.decisions == []
    assert world.only().state == "watched"
    assert words in world.only().reason
    (decision,) = world.see(Someone(bad.at if 0 < bad.at < 500 else 300, 1))
    assert decision.view is not None
    assert decision.view.quality.good


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(Someone(-10, 1), id="cut"),
        pytest.param(Someone(200, 1, height=60), id="small in the picture"),
        pytest.param(Someone(200, 1, blurred=True), id="blurred"),
    ],
)
def test_at_the_latest_the_best_view_so_far_is_taken(bad: Someone) -> None:
    world = World(TriggerConfig(min_height_fraction=0.2, max_wait_s=3.0))
    world.stay(0.6, bad)
    confirmed_s = world.now_s
    decided = world.stay(5, bad)
    assert len(decided) == 1
    assert 2.9 <= decided[0].due_s - confirmed_s <= 3.3
    assert "the best view so far" in decided[0].reason


def test_the_best_of_several_bad_views_is_kept() -> None:
    world = World(TriggerConfig(min_height_fraction=0.9, max_wait_s=2.0))
    for height in (60, 80, 200, 90, 70):
        world.stay(0.4, Someone(200, 1, height=height))
    (decision,) = world.stay(2, Someone(200, 1, height=60))
    assert decision.view is not None
    assert decision.view.quality.height_px == 200


def test_far_too_small_is_never_described_and_says_so() -> None:
    world = World()
    world.stay(10, Someone(200, 1, height=30))
    assert world.decisions == []
    assert world.only().reason == "waiting for a good view: too small (30 px high, needs 48)"
    world.stay(12)
    (person,) = world.trigger.people()
    assert (person.state, person.reason) == (
        "skipped", "left before a good view: too small (30 px high, needs 48)",
    )  # fmt: skip
    assert world.trigger.counts().not_described == {"left before a good view": 1}


def test_who_leaves_is_described_from_the_best_view_without_waiting_for_the_deadline() -> None:
    world = World(TriggerConfig(min_height_fraction=0.9, max_wait_s=30.0))
    world.stay(1, Someone(200, 1))
    left_s = world.now_s
    (decision,) = world.stay(5)
    assert decision.due_s - left_s < 1.5
    assert decision.reason.startswith("left, the best view so far")


def test_who_was_seen_too_briefly_is_counted() -> None:
    world = World()
    world.stay(0.4, Someone(200, 1))
    world.stay(15)
    assert world.decisions == []
    assert world.trigger.counts().unconfirmed == 1
    assert world.trigger.counts().seen == 0


@pytest.mark.parametrize(
    ("gap_s", "back", "same"),
    [
        pytest.param(0.2, Someone(210, 2), True, id="ID switch between two frames"),
        pytest.param(2.0, Someone(230, 2), True, id="after two seconds, near"),
        # The track of who comes back begins 0.2 s later, and is confirmed another 0.4 s later.
        pytest.param(9.6, Someone(230, 2), True, id="at the end of the window"),
        pytest.param(10.0, Someone(230, 2), False, id="after the window"),
        pytest.param(2.0, Someone(560, 2), False, id="far away"),
        pytest.param(2.0, Someone(230, 2, colour=BLUE), False, id="other clothes"),
        pytest.param(2.0, Someone(230, 2, height=60), False, id="other size"),
    ],
)
def test_a_lost_person_who_comes_back_is_the_same(gap_s: float, back: Someone, same: bool) -> None:
    world = World()
    world.stay(2, Someone(200, 1))
    world.stay(gap_s)
    world.stay(2, back)
    assert world.described() == (["1"] if same else ["1", "2"])
    assert world.trigger.counts().rejoined == int(same)
    assert world.only().person_id == ("1" if same else "2")
    if same:
        assert world.only().track_ids == (1, 2)


@pytest.mark.parametrize(
    ("gap_s", "more_s"),
    [
        pytest.param(9.0, 1.4, id="one that began in the window and was lost again"),
        pytest.param(9.8, 0.0, id="one that began after it"),
    ],
)
def test_a_fleeting_track_keeps_nobody_from_being_forgotten(gap_s: float, more_s: float) -> None:
    world = World(TriggerConfig(reentry_window_s=9.9))
    world.stay(2, Someone(200, 1))
    world.stay(gap_s)
    assert list(world.trigger._people) == ["1"]
    world.see(Someone(200, 2))
    world.stay(more_s)
    assert world.trigger._people == {}


def test_a_new_track_beside_somebody_is_not_them_though_it_is_found_first() -> None:
    world = World(TriggerConfig(confirm_detections=1))
    world.stay(2, Someone(200, 1))
    world.see(Someone(290, 2), Someone(200, 1))
    assert world.described() == ["1", "2"]


def test_a_lost_person_is_expected_where_they_were_walking_to() -> None:
    world = World()
    for step in range(10):
        world.see(Someone(20 + 30 * step, 1))
    world.stay(2)  # ten steps behind a bus: 300 px, nearly two heights
    for step in range(5):
        world.see(Someone(20 + 30 * (20 + step) - 60, 2))
    assert world.described() == ["1"]


def test_two_people_at_once_are_two() -> None:
    world = World()
    for step in range(10):
        world.see(Someone(100 + step, 1), Someone(250 + step, 2))
    assert world.described() == ["1", "2"]


def test_a_new_track_beside_one_that_is_still_seen_is_not_the_same_person() -> None:
    world = World()
    world.stay(2, Someone(200, 1))
    world.stay(2, Someone(200, 1), Someone(290, 2))
    assert world.described() == ["1", "2"]


def test_the_nearest_of_two_lost_people_comes_back() -> None:
    world = World()
    world.stay(2, Someone(100, 1), Someone(240, 2))
    world.stay(1)
    world.stay(2, Someone(235, 3))
    assert world.only().person_id == "2"


def _crossing(world: World, *, swap: bool) -> None:
    """Red walks right, blue left; they overlap in the middle, where the tracker may confuse them."""
    for step in range(21):
        red = Someone(100 + 20 * step, 1, RED)
        blue = Someone(500 - 20 * step, 2, BLUE, base=405)
        if step > 10 and swap:
            red.track, blue.track = 2, 1
        world.see(red, blue)


@pytest.mark.parametrize("swap", [False, True])
def test_people_who_cross_are_each_described_once_whatever_the_tracker_does(swap: bool) -> None:
    world = World()
    _crossing(world, swap=swap)
    assert world.described() == ["1", "2"]
    of_track = {state.track_id: state.person_id for state in world.trigger.tracks()}
    assert of_track == ({1: "2", 2: "1"} if swap else {1: "1", 2: "2"})


def test_after_a_swap_the_one_not_yet_described_is_the_right_one() -> None:
    world = World(TriggerConfig(min_height_fraction=0.25, max_wait_s=60))
    for step in range(21):
        red = Someone(100 + 20 * step, 1, RED)
        near = step > 13
        blue = Someone(500 - 20 * step, 2, BLUE, base=405, height=160 if near else 110)
        if step > 10:
            red.track, blue.track = 2, 1
        world.see(red, blue)
    first, second = (d for d in world.decisions if d.kind == "describe")
    for decision, colour in ((first, RED), (second, BLUE)):
        assert decision.view is not None
        x1, y1, x2, y2 = (round(v) for v in decision.view.box_px)
        middle = decision.view.image[y1 + 20 : y2 - 20, x1 + 15 : x2 - 15].reshape(-1, 3).mean(axis=0)
        assert int(np.argmax(middle)) == int(np.argmax(colour))


def test_a_view_with_somebody_in_front_is_not_good_while_it_lasts() -> None:
    world = World()
    behind, front = Someone(200, 1), Someone(215, 2, BLUE, height=170, base=420)
    world.stay(2, behind, front)
    assert world.described() == ["2"]  # the one in front
    states = {s.track_id: s for s in world.trigger.tracks()}
    assert "hidden behind another person" in states[1].reason
    world.stay(1, behind, Someone(400, 2, BLUE, height=170, base=420))
    assert world.described() == ["2", "1"]
    assert world.decisions[-1].view is not None
    assert world.decisions[-1].view.quality.overlap == 0


def test_wholly_hidden_is_not_described_even_at_the_deadline() -> None:
    world = World(TriggerConfig(max_wait_s=1.0))
    world.stay(5, Someone(200, 1, height=120, base=390), Someone(195, 2, BLUE, height=200, base=430))
    assert world.described() == ["2"]
    assert {s.track_id for s in world.trigger.tracks() if s.state == "described"} == {2}


@pytest.mark.parametrize(
    ("cooldown_s", "times"), [pytest.param(0.0, 1, id="once"), pytest.param(5.0, 4, id="every five seconds")]
)
def test_cool_down(cooldown_s: float, times: int) -> None:
    world = World(TriggerConfig(cooldown_s=cooldown_s))
    world.stay(17, Someone(200, 1))
    assert world.described() == ["1"] * times
    assert [d.again for d in world.decisions] == [False] + [True] * (times - 1)
    assert world.trigger.counts().described == 1
    assert world.trigger.counts().redescribed == times - 1


def test_again_when_the_scene_around_the_person_changes() -> None:
    world = World(TriggerConfig(rescene_change=0.3))
    world.stay(8, Someone(200, 1))
    assert world.described() == ["1"]
    world.backdrop = 20  # somebody turned the light off
    world.stay(8, Someone(200, 1))
    assert world.described() == ["1", "1"]
    assert world.decisions[-1].reason == "described again: the scene around the person changed"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        pytest.param(TriggerConfig(cooldown_s=10, max_wait_s=3), "cool-down over", id="cool-down"),
        pytest.param(
            TriggerConfig(rescene_change=0.3, max_wait_s=3), "the scene around the person changed", id="scene"
        ),
    ],
)
def test_again_waits_for_a_good_view_as_long_as_the_first_time(config: TriggerConfig, why: str) -> None:
    world = World(config)
    world.stay(9.8, Someone(200, 1))
    world.backdrop = 20
    wanted_s = world.now_s + (0.8 if config.cooldown_s else 0.2)
    world.stay(1, Someone(200, 1, blurred=True))
    assert world.described() == ["1"]
    decided = world.stay(5, Someone(200, 1, blurred=True))
    assert [d.person_id for d in decided] == ["1"]
    assert 2.9 <= decided[0].due_s - wanted_s <= 3.3
    assert decided[0].reason.startswith(f"described again: {why}; after 3 s, the best view so far: blurred")


def test_again_takes_the_first_good_view_of_the_wait() -> None:
    world = World(TriggerConfig(cooldown_s=5, max_wait_s=10))
    world.stay(2, Someone(200, 1))
    world.stay(5, Someone(200, 1, blurred=True))
    (decision,) = world.see(Someone(200, 1))
    assert decision.reason == "described again: cool-down over"
    assert decision.view is not None
    assert decision.view.quality.good


def test_who_was_away_when_the_cool_down_ended_is_waited_for_like_anybody() -> None:
    world = World(TriggerConfig(cooldown_s=5, max_wait_s=3))
    world.stay(3, Someone(200, 1))
    world.stay(8)
    back_s = world.now_s
    decided = world.stay(5, Someone(200, 2, blurred=True))
    assert [(d.person_id, d.again) for d in decided] == [("1", True)]
    assert decided[0].due_s - back_s >= 3.0


def test_no_view_from_before_the_cool_down_ended_is_taken() -> None:
    world = World(TriggerConfig(cooldown_s=8, max_wait_s=60))
    world.stay(2, Someone(200, 1))
    world.stay(2, Someone(205, 2))  # another track of the same person, well seen until it was confirmed
    assert world.stay(8, Someone(205, 2, blurred=True)) == []


def test_a_dropped_request_is_tried_again_later_but_not_for_ever() -> None:
    world = World(TriggerConfig(retry_after_s=2.0), finish=False)
    times: list[float] = []
    for _ in range(200):
        for decision in world.see(Someone(200, 1)):
            times.append(world.now_s)
            world.trigger.waiting(decision.person_id)
            assert world.only().state == "waiting"
            world.trigger.dropped(decision.person_id, "too many were waiting", world.now_s)
            assert (world.only().state, world.only().reason) == ("skipped", "too many were waiting")
    assert len(times) == 3
    assert all(b - a >= 2.0 for a, b in pairwise(times))


def test_dropped_without_retry() -> None:
    world = World(finish=False)
    world.stay(2, Someone(200, 1))
    world.trigger.dropped("1", "refused", world.now_s, retry=False)
    world.stay(20, Someone(200, 1))
    assert world.described() == ["1"]
    world.stay(12)
    assert world.trigger.counts().not_described == {"refused": 1}


def test_states_follow_the_request() -> None:
    world = World(finish=False)
    world.stay(1, Someone(200, 1))
    assert (world.only().state, world.only().reason) == ("waiting", "picked: a good view")
    world.trigger.waiting("1", "2 before it")
    assert (world.only().state, world.only().reason) == ("waiting", "2 before it")
    world.trigger.describing("1")
    assert world.only().state == "describing"
    world.trigger.finished("1", world.now_s)
    assert world.only().state == "described"
    world.trigger.describing("1")  # too late
    world.trigger.dropped("nobody", "?", world.now_s)
    assert world.only().state == "described"


def test_a_request_whose_person_left_long_ago_is_cancelled() -> None:
    world = World(TriggerConfig(cancel_after_gone_s=5.0), finish=False)
    world.stay(1, Someone(200, 1))
    left_s = world.now_s
    decided = world.stay(10)
    assert [(d.kind, d.person_id) for d in decided] == [("cancel", "1")]
    assert 5.0 < decided[0].due_s - left_s < 5.5
    world.trigger.dropped("1", decided[0].reason, world.now_s, retry=False)
    assert world.trigger.people()[0].reason == "cancelled: left 5 s ago"
    world.stay(1)
    assert world.trigger.counts().not_described == {"cancelled": 1}


def test_a_request_that_ended_by_itself_before_it_was_cancelled_counts_as_it_ended() -> None:
    world = World(TriggerConfig(cancel_after_gone_s=5.0), finish=False)
    world.stay(1, Someone(100, 1), Someone(400, 2, BLUE))
    assert [d.kind for d in world.stay(10)] == ["cancel", "cancel"]
    world.trigger.finished("1", world.now_s)
    world.trigger.dropped("2", "the server broke off", world.now_s)
    world.stay(1)
    counts = world.trigger.counts()
    assert (counts.described, counts.not_described) == (1, {"the server broke off": 1})


def test_time_goes_on_while_the_camera_is_lost() -> None:
    world = World(TriggerConfig(cancel_after_gone_s=5.0), finish=False)
    world.stay(1, Someone(200, 1))
    assert world.trigger.tick(world.now_s + 4) == []
    assert [d.kind for d in world.trigger.tick(world.now_s + 6)] == ["cancel"]
    assert world.trigger.tracks() == []


def test_nothing_is_cancelled_in_batch_and_time_is_the_files() -> None:
    world = World(TriggerConfig(cancel_after_gone_s=1.0, max_wait_s=3.0), batch=True, finish=False)
    world.now_s = 5.0
    world.stay(1, Someone(200, 1))
    world.stay(20)
    assert [d.kind for d in world.decisions] == ["describe"]


def test_the_end_of_the_source_decides_everybody() -> None:
    world = World(TriggerConfig(min_height_fraction=0.5, max_wait_s=30))
    world.stay(1, Someone(100, 1), Someone(300, 2, height=30))
    decided = world.trigger.flush(world.now_s)
    assert [(d.kind, d.person_id) for d in decided] == [("describe", "1")]
    world.trigger.finished("1", world.now_s)
    assert world.trigger.flush(world.now_s) == []
    reasons = {p.person_id: (p.state, p.reason) for p in world.trigger.people()}
    assert reasons["1"][0] == "described"
    assert reasons["2"][0] == "skipped"
    assert "too small" in reasons["2"][1]


def test_the_end_of_the_source_leaves_nobody_whose_request_comes_to_nothing_out_of_the_count() -> None:
    world = World(TriggerConfig(min_height_fraction=0.5, max_wait_s=30), finish=False)
    world.stay(1, Someone(100, 1), Someone(300, 2, BLUE))
    assert len(world.trigger.flush(world.now_s)) == 2
    world.trigger.finished("1", world.now_s)
    world.trigger.dropped("2", "queue full", world.now_s)
    counts = world.trigger.counts()
    assert (counts.seen, counts.described, counts.not_described) == (2, 1, {"queue full": 1})
    assert [(p.person_id, p.reason) for p in world.trigger.people()] == [("2", "queue full"), ("1", "described")]


def test_a_cut_forgets_who_was_there() -> None:
    world = World()
    world.stay(2, Someone(200, 1))
    world.scene = world.cut = 1  # the next picture of a folder
    world.stay(2, Someone(200, 1))
    assert world.described() == ["1", "2"]


@pytest.mark.parametrize(
    ("seconds", "zoom", "back", "same"),
    [
        pytest.param(1.0, 1, Someone(210, 2), True, id="reconnected"),
        pytest.param(1.0, 1, Someone(210, 1), True, id="and the tracker counts anew"),
        pytest.param(0.0, 2, Someone(210, 2), True, id="size changed"),
        pytest.param(1.0, 2, Someone(560, 2), False, id="size changed, far away"),
        pytest.param(1.0, 1, Someone(210, 2, BLUE), False, id="other clothes"),
        pytest.param(15.0, 1, Someone(210, 2), False, id="after the window"),
    ],
)
def test_over_a_gap_who_comes_back_is_the_same(seconds: float, zoom: int, back: Someone, same: bool) -> None:
    world = World()
    world.stay(2, Someone(200, 1))
    for _ in range(round(seconds / STEP_S)):
        world.now_s += STEP_S
        world.trigger.tick(world.now_s)
    world.scene, world.zoom = 1, zoom
    world.stay(2, back)
    assert world.described() == (["1"] if same else ["1", "2"])
    assert world.only().person_id == ("1" if same else "2")


def test_a_gap_ends_tracks_that_are_not_confirmed() -> None:
    world = World()
    world.stay(0.4, Someone(200, 1))
    world.scene = 1
    world.see(Someone(200, 1))
    assert world.only().reason == "seen 1 of 3 times"
    assert world.trigger.counts().unconfirmed == 1


def test_ids_carry_the_prefix() -> None:
    trigger = Trigger(TriggerConfig(confirm_detections=1), prefix="door-")
    person = Someone(200, 7)
    (decision,) = trigger.update(Frame(World().picture([person]), 0, 1.0), [Detection(7, person.box, 0.9)])
    assert decision.person_id == "door-1"


@pytest.mark.parametrize(
    ("keep", "shape"),
    [pytest.param(None, (HEIGHT, WIDTH, 3), id="whole"), pytest.param(0.25, (240, 144, 3), id="crop")],
)
def test_a_view_keeps_the_frame_or_the_region(keep: float | None, shape: tuple[int, ...]) -> None:
    trigger = Trigger(TriggerConfig(confirm_detections=1), keep_margin=keep)
    person = Someone(200, 7)
    image = World().picture([person])
    (decision,) = trigger.update(Frame(image, 3, 1.0), [Detection(7, person.box, 0.9)])
    view = decision.view
    assert view is not None
    assert view.image.shape == shape
    x1, y1, x2, y2 = (round(v) for v in view.box_px)
    assert np.array_equal(view.image[y1:y2, x1:x2], image[240:400, 200:264])
    assert view.frame_box == pytest.approx((200 / WIDTH, 240 / HEIGHT, 264 / WIDTH, 400 / HEIGHT))
    assert (view.frame_width_px, view.frame_height_px, view.frame_index) == (WIDTH, HEIGHT, 3)


def test_boxes_without_an_area_are_ignored() -> None:
    world = World()
    frame = Frame(world.picture([]), 0, 1.0)
    assert world.trigger.update(frame, [Detection(1, (10, 10, 10, 50), 0.9), Detection(2, (5, 5, 2, 2), 0.9)]) == []
    assert world.trigger.tracks() == []


def test_memory_is_bounded_over_a_long_day() -> None:
    world = World(TriggerConfig(reentry_window_s=2.0))
    for person in range(300):
        world.stay(0.8, Someone(200, person + 1, colour=(RED, GREEN, BLUE)[person % 3]))
        world.stay(2.4)
    assert len(world.trigger.people()) <= 258
    assert world.trigger.counts().described == 300
    assert len(world.trigger._tracks) <= 3

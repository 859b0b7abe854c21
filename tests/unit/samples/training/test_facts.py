from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from samples.figures import Appearance, random_appearance
from samples.scenes import Seen
from samples.training import facts
from samples.training.facts import Facts
from samples.training.views import Person


def a_look(**changes: object) -> Appearance:
    look = random_appearance(np.random.default_rng(0))
    plain = replace(look, top="red", lower="blue", lower_kind="trousers", bag=None, hat=None)
    return replace(plain, **changes)  # type: ignore[arg-type]


def a_person(
    look: Appearance,
    *,
    action: str = "walking left",
    place: float = 0.5,
    lower: bool = True,
    feet: bool = True,
    bag: bool = True,
) -> Person:
    seen = Seen(look, action, (0, 0, 10, 20), 1.0, 0, 20.0, 20.0)
    return Person(seen, place, 0.7, shows_top=True, shows_lower=lower, shows_feet=feet, shows_bag=bag, shows_hat=True)


CASES = [
    pytest.param([], "Nobody is there.", Facts(0), id="nobody"),
    pytest.param(
        [a_person(a_look())],
        "One person in a red top and blue trousers, walking left.",
        Facts(1, "red", "blue", "walking left"),
        id="one",
    ),
    pytest.param(
        [a_person(a_look(top="orange", bag="green", hat="black"), action="standing")],
        "One person in an orange top and blue trousers, standing, carrying a green bag, wearing a black hat.",
        Facts(1, "orange", "blue", "standing", "green", "black"),
        id="bag and hat",
    ),
    pytest.param(
        [a_person(a_look(bag="green"), bag=False)],
        "One person in a red top and blue trousers, walking left.",
        Facts(1, "red", "blue", "walking left"),
        id="a bag that is hidden",
    ),
    pytest.param(
        [a_person(a_look(), lower=False, feet=False)],
        "One person in a red top.",
        Facts(1, "red"),
        id="legs outside the picture",
    ),
    pytest.param(
        [a_person(a_look(), feet=False)],
        "One person in a red top and blue trousers.",
        Facts(1, "red", "blue"),
        id="feet outside the picture",
    ),
    pytest.param(
        [a_person(a_look(lower_kind="skirt"), place=0.2), a_person(a_look())],
        "Two people. The nearest, on the left, in a red top and a blue skirt, walking left.",
        Facts(2, "red", "blue", "walking left"),
        id="two",
    ),
    pytest.param(
        [a_person(a_look(lower_kind="shorts"), place=0.9, action="walking towards the camera")] * 3,
        "Three people. The nearest, on the right, in a red top and blue shorts, walking towards the camera.",
        Facts(3, "red", "blue", "walking towards the camera"),
        id="three",
    ),
]


@pytest.mark.parametrize(("people", "text", "_truth"), CASES)
def test_the_description_of_a_view(people: list[Person], text: str, _truth: Facts) -> None:
    assert facts.description(people) == text


@pytest.mark.parametrize(("_people", "text", "truth"), CASES)
def test_a_description_is_read_back(_people: list[Person], text: str, truth: Facts) -> None:
    assert facts.read_facts(text) == truth


@pytest.mark.parametrize("text", ["", "The weather is fine.", "42", "I see a dog on a red toppled chair."])
def test_other_text_says_nothing(text: str) -> None:
    assert facts.read_facts(text) == Facts(None)


def test_many_people_are_not_counted_out() -> None:
    text = facts.description([a_person(a_look())] * 9)
    assert text.startswith("Many people.")
    assert facts.read_facts(text).count == 7


def test_answers_say_only_what_is_seen() -> None:
    nobody = facts.answers([])
    assert nobody["How many people?"] == "Nobody."
    assert nobody["Is anybody there?"] == "No."
    assert "What colour is the jacket?" not in nobody
    legless = facts.answers([a_person(a_look(), lower=False, feet=False)])
    assert "What is the person doing?" not in legless
    assert legless["What colour is the jacket?"] == "Red."
    assert "What colour are the trousers?" not in legless
    hidden = facts.answers([a_person(a_look(bag="green"), bag=False)])
    assert "Is the person carrying a bag?" not in hidden
    carrying = facts.answers([a_person(a_look(bag="orange"))])
    assert carrying["Is the person carrying a bag?"] == "Yes, an orange bag."


def test_every_question_of_the_lessons_can_be_answered() -> None:
    known = facts.answers([a_person(a_look())])
    assert set(facts.PROMPTS) | set(facts.QUESTIONS) == set(known)

"""True sentences about the people in a view: the description that is taught, and short answers to questions."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from samples.training.views import ACTIONS, SIDE_LIMITS, SIDES, Person

DEFAULT_PROMPT = "Describe the people in this camera frame."
PROMPTS = (
    DEFAULT_PROMPT,
    "Describe the people in this picture.",
    "Describe what you see.",
    "Describe the person in the picture.",
    "Who can be seen?",
    "What does the camera see?",
)
QUESTIONS = (
    "How many people are there?",
    "How many people?",
    "Is anybody there?",
    "What is the person wearing?",
    "What colour is the top?",
    "What colour is the jacket?",
    "What colour are the trousers?",
    "What is the person doing?",
    "Is the person carrying a bag?",
)
NOBODY = "Nobody is there."
PHRASES = ("count", "place", "top", "lower", "action", "bag", "hat", "stop")  # place: of the nearest of several
_NUMBERS = ("Nobody", "One person", "Two people", "Three people", "Four people", "Five people", "Six people")
_COUNTS = ("Nobody.", "One.", "Two.", "Three.", "Four.", "Five.", "Six.")


def article(word: str) -> str:
    """`word` with a or an."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def clothes(person: Person) -> tuple[str, str]:
    """Upper and lower clothes as far as they are seen: (` a red top`, ` and blue trousers`)."""
    look = person.seen.look
    top = f" {article(look.top)} top" if person.shows_top else ""
    lower = f"{look.lower} {look.lower_kind}"
    lower = f" {article(lower)}" if look.lower_kind == "skirt" else f" {lower}"
    if not person.shows_lower:
        return top or " clothes that are hidden", ""
    return top, f" and{lower}" if top else lower


def side(person: Person) -> str:
    """Where in the view the person is."""
    return SIDES[sum(person.place > limit for limit in SIDE_LIMITS)]


def phrases(people: Sequence[Person]) -> tuple[str, ...]:
    """The description in its eight parts (PHRASES), empty where there is nothing to say."""
    if not people:
        return ("Nobody is", " there", "", "", "", "", "", ".")
    nearest, look = people[0], people[0].seen.look
    count = _NUMBERS[len(people)] if len(people) < len(_NUMBERS) else "Many people"
    top, lower = clothes(nearest)
    return (
        count,
        f". The nearest, {side(nearest)}," if len(people) > 1 else "",
        f" in{top}",
        lower,
        f", {nearest.seen.action}" if nearest.shows_feet else "",
        f", carrying {article(look.bag)} bag" if look.bag and nearest.shows_bag else "",
        f", wearing {article(look.hat)} hat" if look.hat and nearest.shows_hat else "",
        ".",
    )


def description(people: Sequence[Person]) -> str:
    """How many people, and the nearest one (`people` come nearest first): one or two short sentences."""
    return "".join(phrases(people))


def answers(people: Sequence[Person], unknown: Collection[str] = ()) -> dict[str, str]:
    """Every question that a view of `people` can answer, with the true answer; `unknown` phrases answer none."""
    known: dict[str, str] = {}
    if not unknown:
        known |= dict.fromkeys(PROMPTS, description(people))
    if "count" not in unknown:
        many = _COUNTS[len(people)] if len(people) < len(_COUNTS) else "Many."
        known |= {"How many people are there?": many, "How many people?": many}
        known["Is anybody there?"] = "Yes." if people else "No."
    if not people:
        return known
    first, look = people[0], people[0].seen.look
    if not {"top", "lower", "lower_kind"} & set(unknown):
        known["What is the person wearing?"] = f"{''.join(clothes(first)).strip().capitalize()}."
    if first.shows_top and "top" not in unknown:
        known["What colour is the top?"] = known["What colour is the jacket?"] = f"{look.top.capitalize()}."
    if first.shows_lower and "lower" not in unknown:
        known["What colour are the trousers?"] = f"{look.lower.capitalize()}."
    if first.shows_feet and "action" not in unknown:
        known["What is the person doing?"] = f"{first.seen.action.capitalize()}."
    if (not look.bag or first.shows_bag) and "bag" not in unknown:
        known["Is the person carrying a bag?"] = f"Yes, {article(look.bag)} bag." if look.bag else "No."
    return known


def random_prompt(rng: np.random.Generator) -> str:
    """A prompt to teach next: the default description half of the time, or other wordings and questions."""
    kind = rng.random()
    if kind < 0.5:
        return DEFAULT_PROMPT
    return str(rng.choice(PROMPTS if kind < 0.6 else QUESTIONS))


@dataclass(frozen=True, slots=True)
class Facts:
    """What a description says; None where it is silent."""

    count: int | None
    top: str | None = None
    lower: str | None = None
    action: str | None = None
    bag: str | None = None
    hat: str | None = None


_COUNTED = {name.split()[0].lower(): number for number, name in enumerate(_NUMBERS)} | {"many": len(_NUMBERS)}
_TOP = re.compile(r"an? (\w+) top\b")
_LOWER = re.compile(r"(?:\ban? )?(\w+) (?:trousers|shorts|skirt)\b")
_BAG, _HAT = re.compile(r"carrying an? (\w+) bag"), re.compile(r"wearing an? (\w+) hat")
_ACTION = re.compile("|".join(ACTIONS))


def read_facts(text: str) -> Facts:
    """What a description in the taught form says; other text gives Facts that are None throughout."""
    lowered = text.strip().lower()
    first = re.match(r"[a-z]+", lowered)

    def found(pattern: re.Pattern[str]) -> str | None:
        match = pattern.search(lowered)
        return match.group(match.lastindex or 0) if match else None

    return Facts(
        count=_COUNTED.get(first.group()) if first else None,
        top=found(_TOP),
        lower=found(_LOWER),
        action=found(_ACTION),
        bag=found(_BAG),
        hat=found(_HAT),
    )

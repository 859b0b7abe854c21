"""True sentences about a view: the description that is taught, and short answers to questions."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from samples.training.views import ACTIONS, Person, View

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
_NUMBERS = ("Nobody", "One person", "Two people", "Three people", "Four people", "Five people", "Six people")
_COUNTS = ("Nobody.", "One.", "Two.", "Three.", "Four.", "Five.", "Six.")


def article(word: str) -> str:
    """`word` with a or an."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def clothes(person: Person) -> str:
    """What the person wears, as far as it is seen: `a red top and blue trousers`."""
    look = person.seen.look
    parts = []
    if person.shows_top:
        parts.append(f"{article(look.top)} top")
    if person.shows_lower:
        lower = f"{look.lower} {look.lower_kind}"
        parts.append(article(lower) if look.lower_kind == "skirt" else lower)
    return " and ".join(parts) or "clothes that are hidden"


def details(person: Person) -> str:
    """Clothes, action, bag and hat, as far as they are seen."""
    look = person.seen.look
    text = clothes(person)
    if person.shows_lower:
        text += f", {person.seen.action}"
    if look.bag and person.shows_bag:
        text += f", carrying {article(look.bag)} bag"
    if look.hat and person.shows_hat:
        text += f", wearing {article(look.hat)} hat"
    return text


def side(person: Person) -> str:
    """Where in the view the person is."""
    if person.place < 0.36:
        return "on the left"
    return "on the right" if person.place > 0.64 else "in the middle"


def description(view: View) -> str:
    """How many people, and the nearest one: one or two short sentences."""
    if not view.people:
        return NOBODY
    nearest = view.people[0]
    if len(view.people) == 1:
        return f"One person in {details(nearest)}."
    count = _NUMBERS[len(view.people)] if len(view.people) < len(_NUMBERS) else "Many people"
    return f"{count}. The nearest, {side(nearest)}, in {details(nearest)}."


def answers(view: View) -> dict[str, str]:
    """Every question that the view can answer, with the true answer."""
    people = view.people
    many = _COUNTS[len(people)] if len(people) < len(_COUNTS) else "Many."
    known = dict.fromkeys(PROMPTS, description(view))
    known |= {"How many people are there?": many, "How many people?": many}
    known["Is anybody there?"] = "Yes." if people else "No."
    if not people:
        return known
    first, look = people[0], people[0].seen.look
    known["What is the person wearing?"] = f"{clothes(first).capitalize()}."
    if first.shows_top:
        known["What colour is the top?"] = known["What colour is the jacket?"] = f"{look.top.capitalize()}."
    if first.shows_lower:
        known["What colour are the trousers?"] = f"{look.lower.capitalize()}."
        known["What is the person doing?"] = f"{first.seen.action.capitalize()}."
    if not look.bag or first.shows_bag:
        known["Is the person carrying a bag?"] = f"Yes, {article(look.bag)} bag." if look.bag else "No."
    return known


def random_prompt(rng: np.random.Generator) -> str:
    """A prompt to teach next: mostly the default description."""
    kind = rng.random()
    if kind < 0.7:
        return DEFAULT_PROMPT
    return str(rng.choice(PROMPTS if kind < 0.82 else QUESTIONS))


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

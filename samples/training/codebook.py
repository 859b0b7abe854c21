"""What each image token should say: the codes through which the frozen language model is told what there is to see.

The whole picture's 64 tokens spell its description: eight phrases of fixed width, each word a code, then a closing that
makes the language model repeat them. A tile that shows a part of somebody gives the neutral codes of a part; one that
shows nobody says so. Codes start as the language model's own word embeddings and are tuned through it on sentences
alone, without any picture; the tower then learns to give the right code in each place, which takes no language model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn

from samples.figures import COLOUR_NAMES, LOWER_KINDS, random_appearance
from samples.scenes import Seen
from samples.training import facts
from samples.training.language import TOKENS_PER_TILE, Language
from samples.training.views import ACTIONS, SIDES, Person

WIDTHS = (2, 8, 5, 4, 5, 5, 5, 1)  # of the phrases, in tokens
_CLOSING = " So, word for word, the answer is what was just said about the people."
OPEN = -100  # instead of the row of a code: any


def imagined(rng: np.random.Generator) -> list[Person]:
    """People to make sentences about, nearest first, without a picture."""
    count = int(rng.choice(8, p=[0.12, 0.38, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02]))
    people = []
    for index in range(count):
        seen = Seen(random_appearance(rng), str(rng.choice(ACTIONS)), (0, 0, 1, 2), 1.0, index, 1.0, 2.0)
        top, lower, feet, bag, hat = (bool(value) for value in rng.random(5) > (0.05, 0.12, 0.15, 0.15, 0.05))
        people.append(Person(seen, float(rng.random()), 1.0 - 0.1 * index, top, lower, feet, bag, hat))
    return people


class Codebook(nn.Module):
    """One trainable code (a row of `codes`) for each word, empty place, closing place and place of a neutral tile."""

    def __init__(self, language: Language) -> None:
        super().__init__()
        self.language = [language]  # in a list: its weights are not ours
        words = {token for text in _all_phrases() for token in self._tokens(text)}
        self.rows = {token: row for row, token in enumerate(sorted(words))}
        blank = self._tokens("\n")[0]
        closing = self._tokens(_CLOSING)
        free = TOKENS_PER_TILE - sum(WIDTHS)
        closing = (closing + [blank] * free)[:free]
        starts = [*sorted(words), *[blank] * sum(WIDTHS), *closing, *[self._tokens(",")[0]] * TOKENS_PER_TILE]
        self.codes = nn.Parameter(language.embed.weight[starts].detach().float())
        self.first_blank = len(words)
        self.first_closing = self.first_blank + sum(WIDTHS)
        self.first_part = self.first_closing + free
        self.part = torch.arange(self.first_part, self.first_part + TOKENS_PER_TILE)

    def _tokens(self, text: str) -> list[int]:
        return list(self.language[0].tokenizer(text, add_special_tokens=False)["input_ids"])

    def sentence(self, people: Sequence[Person]) -> Tensor:
        """The rows (64) that describe `people`; nobody: those of an empty tile."""
        rows: list[int] = []
        for index, (phrase, width) in enumerate(zip(facts.phrases(people), WIDTHS, strict=True)):
            words: list[int | None] = [*self._tokens(f" {phrase}" if index == 0 else phrase)]
            if facts.PHRASES[index] == "lower" and words:
                words = self._aligned(words)
            if len(words) > width:
                raise ValueError(f"{phrase!r} takes {len(words)} tokens, allowed: {width}")
            words += [None] * (width - len(words))
            rows += [
                self.first_blank + len(rows) + place if word is None else self.rows[word]
                for place, word in enumerate(words)
            ]
        return torch.tensor([*rows, *range(self.first_closing, self.first_part)])

    def opened(self, rows: Tensor, unknown: Collection[str]) -> Tensor:
        """The rows (64) of a sentence with OPEN in the places of the phrases that are `unknown`.

        Of the lower clothes there may be unknown just the `lower_kind`, and with it the article.
        """
        opened, first = rows.clone(), 0
        for phrase, width in zip(facts.PHRASES, WIDTHS, strict=True):
            if phrase in unknown:
                opened[first : first + width] = OPEN
            elif phrase == "lower" and "lower_kind" in unknown:
                opened[[first + 1, first + 3]] = OPEN
            first += width
        return opened

    def _aligned(self, words: list[int | None]) -> list[int | None]:
        """Lower clothes as "and", article, colour, kind; None where there is no such word.

        With each word in a place of its own, doubt about the kind (only a skirt has an article) blurs no colour.
        """
        joint = self._tokens(" and")[0]
        between = words[words[0] == joint : -2]
        return [joint if words[0] == joint else None, *(between or [None]), *words[-2:]]

    def is_word(self, rows: Tensor) -> Tensor:
        """Which rows are words, not blanks, closing or neutral."""
        return rows < self.first_blank

    def entropies(self, rng: np.random.Generator, sentences: int = 4000) -> Tensor:
        """How much each place (64) tells: the entropy of its code, in nats, over sentences about imagined people."""
        rows = torch.stack([self.sentence(imagined(rng)) for _ in range(sentences)])
        shares = torch.zeros(TOKENS_PER_TILE, len(self.codes))
        shares.scatter_add_(1, rows.T, torch.ones(rows.T.shape))
        return torch.as_tensor(torch.special.entr(shares / sentences).sum(1))

    def noisy(self, rows: Tensor, noise: float) -> Tensor:
        """Codes (..., width) as an imperfect tower gives them: mixed with some other word's, and blurred."""
        codes = self.codes[rows]
        others = self.codes[torch.randint(0, self.first_blank, rows.shape)]
        share = noise * torch.rand(*rows.shape, 1) * self.is_word(rows)[..., None]
        blurred = codes + share * (others - codes)
        return blurred + noise * codes.detach().std() * torch.randn_like(codes)

    def distances(self, outputs: Tensor) -> Tensor:
        """Squared distances (N, 64, rows) of outputs (N, 64, width) to each code, over the mean between two words."""
        codes = self.codes.detach()
        squares = outputs.square().sum(-1, keepdim=True) - 2 * outputs @ codes.T + codes.square().sum(-1)
        words = codes[: self.first_blank]
        between = 2 * (words - words.mean(0)).square().sum(-1).mean()
        scaled: Tensor = squares / between
        return scaled


def _all_phrases() -> list[str]:
    """Every phrase of `facts.phrases`."""
    nouns = [f"{article} {colour} top" for article, colour in product(("a", "an"), COLOUR_NAMES)]
    lower = [f" {colour} {kind}" for colour, kind in product(COLOUR_NAMES, LOWER_KINDS)]
    carried = [
        f", {verb} {article} {colour} {thing}"
        for (verb, thing), article, colour in product(
            (("carrying", "bag"), ("wearing", "hat")), ("a", "an"), COLOUR_NAMES
        )
    ]
    numbers = ("One person", "Two people", "Three people", "Four people", "Five people", "Six people", "Many people")
    return [
        " Nobody is",
        " there",
        ".",
        " in clothes that are hidden",
        " and a",
        " an",
        *(f" {number}" for number in numbers),
        *(f". The nearest, {side}," for side in SIDES),
        *(f" in {noun}" for noun in nouns),
        *lower,
        *(f", {action}" for action in ACTIONS),
        *carried,
    ]

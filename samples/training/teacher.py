"""The losses that teach the sample VLM's tower: looking, coding, and whole answers through the language model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from samples.training import facts
from samples.training.codebook import OPEN, WIDTHS, Codebook, imagined
from samples.training.framing import WHOLE
from samples.training.language import Language, Layout, thinned
from samples.training.pool import Pool, Tiles, joined, labelled_tiles, rows_of, taught_views, told_of
from samples.training.questions import NEAREST, PATCHED, UNKNOWN
from samples.training.tower import Tower

BATCH = 4  # answers a step
PHOTOGRAPHED = 2  # tiles of photographs in a share of a step's, where there are any
# What is there in most patches counts less: of the background, of those who are nobody, of no crown.
_COMMON_WEIGHTS = {"kind": 0.15, "role": 0.15, "crown": 0.05}
# What was still wrong most often when clothes had long been learnt.
_NEAREST_WEIGHTS = {"action": 2.0, "bag": 3.0, "hat": 2.0, "lower_kind": 0.5}
_PHRASE_WEIGHTS = {"count": 3.0, "action": 2.0, "bag": 2.0, "hat": 1.5}
_AIDING_SHARE = 0.3  # of what `see` teaches, while the language model is asked
_LEAST_WEIGHT = 0.1  # of a place whose code never changes; the others weigh as much as they tell, in nats
_SHARPNESS = 8.0  # of the choice between codes


class Teacher:
    """The losses of the stages."""

    def __init__(self, checkpoint: Path, *, bfloat16: bool) -> None:
        self.language = Language(checkpoint, torch.bfloat16 if bfloat16 else torch.float32)
        self.bfloat16 = bfloat16
        self.codebook = Codebook(self.language)
        self.patch_weights = {question: torch.ones(answers) for question, answers in PATCHED.items()}
        for question, weight in _COMMON_WEIGHTS.items():
            self.patch_weights[question][0] = weight

    def products(self) -> AbstractContextManager[None]:
        """Inside, the tower's large products are taken in bfloat16, where that was asked for; never its losses."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bfloat16)

    @cached_property
    def place_weights(self) -> Tensor:
        """How much each of a tile's 64 codes counts; takes thousands of sentences, which only `coding` needs."""
        told = self.codebook.entropies(np.random.default_rng(0)).clamp_min(_LEAST_WEIGHT)
        shares = [_PHRASE_WEIGHTS.get(phrase, 1.0) for phrase in facts.PHRASES]
        told[: sum(WIDTHS)] *= torch.tensor(np.repeat(shares, WIDTHS), dtype=torch.float32)
        return told

    def wording(self, rng: np.random.Generator) -> dict[str, Tensor]:
        """The loss of whole answers when every image token has its right code, give or take some noise."""
        name, layout, tiles_used = self._layout(rng, frames=False)
        size = max(1, BATCH // 2) if name == "answer_all" else BATCH
        prompt = facts.random_prompt(rng)
        rows: list[Tensor] = []
        replies: list[str] = []
        while len(rows) < size:
            people = imagined(rng)
            reply = facts.answers(people).get(prompt)
            if reply is None:
                continue
            empty = self.codebook.sentence([])
            local = [self.codebook.part if people and rng.random() < 0.6 else empty for _ in tiles_used[:-1]]
            rows.append(torch.cat([*local, self.codebook.sentence(people)]))
            replies.append(reply)
        codes = self.codebook.noisy(torch.stack(rows), float(rng.uniform(0, 0.5)))
        return {name: self.language.loss(codes[:, self._cells(layout, tiles_used)], layout, prompt, replies)}

    def _layout(self, rng: np.random.Generator, *, frames: bool) -> tuple[str, Layout, list[int]]:
        """(name of the loss, layout, tiles it needs): one tile, some tokens of some tiles, or all of them."""
        kind = rng.random()
        if kind < 0.3:
            return "answer_one", self.language.layout(0, 0), [WHOLE]
        whole = self.language.layout(*((2, 4) if frames else (4, 2)))
        if kind > 0.97:
            return "answer_all", whole, list(range(9))
        chosen = [*sorted(rng.choice(8, 2, replace=False).tolist()), 8]
        local = [tile * 64 + rng.permutation(64)[:16] for tile in chosen[:-1]]
        cells = np.concatenate([*local, 8 * 64 + np.arange(64)])
        return "answer_few", thinned(whole, frozenset(cells.tolist())), chosen

    @staticmethod
    def _cells(layout: Layout, tiles_used: list[int]) -> list[int]:
        """Where the layout's embeddings lie among those of the tiles in use."""
        first = {tile: place * 64 for place, tile in enumerate([0] if len(tiles_used) == 1 else tiles_used)}
        return [first[cell // 64] + cell % 64 for cell in layout.cells]

    def looking(self, tower: Tower, tiles: Tiles, seen: Tensor, kept: Tensor | None = None) -> dict[str, Tensor]:
        """The first layers' losses from what they have `seen` (N, P, width) in the patches `kept` (N, P), default all.

        What each patch shows, what its person does, how many people there are, and what the nearest one is like.
        """
        features = tower.norm(seen.float())
        losses: dict[str, Tensor] = {}
        for (question, weights), said, true in zip(
            self.patch_weights.items(), tower.patched(features), tiles.patches.unbind(1), strict=True
        ):
            asked = (true if kept is None else true.gather(1, kept)).flatten()
            if bool((asked >= 0).any()):
                losses[question] = nn.functional.cross_entropy(said.flatten(0, 1), asked, weights, ignore_index=UNKNOWN)
        if bool((tiles.counts >= 0).any()):
            losses["count"] = nn.functional.cross_entropy(tower.count(features), tiles.counts, ignore_index=UNKNOWN)
        if bool((tiles.nearest >= 0).any()):
            each: list[Tensor] = []
            shares: list[float] = []
            for question, said, true in zip(NEAREST, tower.nearest(features), tiles.nearest.unbind(1), strict=True):
                if bool((true >= 0).any()):
                    shares.append(_NEAREST_WEIGHTS.get(question, 1.0))
                    each.append(shares[-1] * nn.functional.cross_entropy(said, true, ignore_index=UNKNOWN))
            losses["nearest"] = torch.stack(each).sum() / sum(shares)
        return losses

    def coding(self, rows: Tensor, outputs: Tensor) -> dict[str, Tensor]:
        """The connector's losses: outputs (N, 64, width) should be the codes `rows` (N, 64), and near them.

        Where OPEN, that is the code which each is nearest to as it is: half a word is worse than any.
        """
        distances = self.codebook.distances(outputs.float())
        rows = torch.where(rows == OPEN, distances.argmin(-1), rows)
        weight = self.place_weights.expand(rows.shape).flatten()
        wrong = nn.functional.cross_entropy(-_SHARPNESS * distances.flatten(0, 1), rows.flatten(), reduction="none")
        far = distances.gather(-1, rows[..., None]).flatten()
        return {"code": (wrong * weight).sum() / weight.sum(), "distance": (far * weight).sum() / weight.sum()}

    def telling(
        self, rng: np.random.Generator, tower: Tower, backgrounds: list[Path], photographs: Pool | None
    ) -> dict[str, Tensor]:
        """The loss of whole answers on a batch that shares prompt and layout, and those of looking and coding.

        These are taken of some tiles of photographs, too, to which no whole answer is known.
        """
        frames = bool(rng.random() < 0.2)
        name, layout, tiles_used = self._layout(rng, frames=frames)
        size = max(1, BATCH // 2) if name == "answer_all" else BATCH
        prompt = facts.random_prompt(rng)
        parts: list[Tiles] = []
        rows: list[Tensor] = []
        replies: list[str] = []
        while len(parts) < size:
            for view in taught_views(rng, backgrounds, frames=frames):
                reply = facts.answers(view.people, view.unknown).get(prompt)
                if reply is not None and len(parts) < size:
                    parts.append(labelled_tiles(view, tiles_used))
                    rows += [rows_of(self.codebook, told) for told in told_of(view, parts[-1], tiles_used)]
                    replies.append(reply)
        answered = len(rows)
        if photographs:
            further, their_rows = photographs.batch(rng, PHOTOGRAPHED)
            parts.append(further)
            rows += their_rows.unbind()
        tiles = joined(parts)
        with self.products():
            seen = tower.seen(tiles.images)
            outputs = tower.connector(tower.spelled(seen))
        images = outputs[:answered].reshape(size, -1, outputs.shape[-1])[:, self._cells(layout, tiles_used)]
        aiding = self.looking(tower, tiles, seen) | self.coding(torch.stack(rows), outputs)
        return {name: self.language.loss(images, layout, prompt, replies)} | {
            name: _AIDING_SHARE * loss for name, loss in aiding.items()
        }

"""Trains the sample VLM's vision tower and connector on generated scenes; the language model stays frozen.

    python -m samples.training.vlm words --steps 200    the codes that image tokens should have; no pictures
    python -m samples.training.vlm see --steps 3000     the tower: what each patch shows, and the codes for it
    python -m samples.training.vlm tell --steps 2000    tower and connector, through the language model: whole answers

Uses the model server's environment (transformers). Each stage goes on where it stopped and starts from what the one
before has reached; --export writes the weights so far. The schedules count steps, so pauses do no harm.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from samples import vlm
from samples.training import facts
from samples.training.codebook import Codebook, imagined
from samples.training.language import Language, Layout, thinned
from samples.training.pictures import camera_like, is_held_out, random_scene, read_photographs, without_people
from samples.training.tower import COUNTS, Tower, make_tower
from samples.training.views import (
    CLASSES,
    Person,
    View,
    crop_region,
    label_tiles,
    patch_labels,
    tiles_of,
    view_of,
)

SAVE_EVERY = 10
TILES_A_STEP = 16
_PART_SHARE = 0.3  # of the views of which a part is shown beside the whole
BATCH = 4  # answers a step
_BACKGROUND_WEIGHT = 0.15
STAGES = ("words", "see", "tell")
_SHARES = {"patch": 1.0, "action": 0.5, "count": 0.5, "code": 1.0, "distance": 0.5}
_AIDING_SHARE = 0.3  # of what `see` teaches, while the language model is asked
_PLAIN_WEIGHT = 0.1  # of codes that no picture changes
_SHARPNESS = 8.0  # of the choice between codes


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles (N, 256, 256, 3) with their patch labels (N, 256); `counts` (N) of people, -100 on parts of pictures.

    `people` are those that a tile should tell of: of a part of a picture none if it shows nobody, else None.
    """

    images: Tensor
    kinds: Tensor
    actions: Tensor
    counts: Tensor
    people: tuple[Sequence[Person] | None, ...]


def random_views(rng: np.random.Generator, backgrounds: list[Path], *, frames: bool) -> Iterator[View]:
    """Crops of the people of one generated scene, or the scene as a whole frame."""
    width = int(rng.integers(480, 961))
    scene = random_scene(rng, width, int(width * 0.5625), backgrounds, largest=0.75)
    image = camera_like(rng, scene.image)
    height = scene.image.shape[0]
    if frames:
        yield view_of(scene, (0, 0, width, height), image, upright=False)
        return
    if not scene.seen or rng.random() < 0.05:  # a false alarm of the detector
        high = height * rng.uniform(0.3, 0.9)
        x, y = rng.uniform(0, width - high / 2), rng.uniform(0, height - high)
        yield view_of(scene, (int(x), int(y), int(x + high / 2), int(y + high)), image, upright=True)
    shown = [seen for seen in scene.seen if seen.visible > 0.4 and seen.box_px[3] - seen.box_px[1] > 36]
    for seen in shown[:2]:
        yield view_of(scene, crop_region(rng, scene, seen.box_px, 0.05), image, upright=True)


def labelled_tiles(view: View, chosen: list[int]) -> Tiles:
    """The tiles `chosen` (8: the whole picture) of a view."""
    kinds, actions = patch_labels(label_tiles(view.classes)[chosen], label_tiles(view.owners)[chosen], view.scene)
    count = min(len(view.people), COUNTS - 1)
    return Tiles(
        torch.from_numpy(tiles_of(view.picture)[chosen]),
        torch.from_numpy(kinds),
        torch.from_numpy(actions),
        torch.tensor([count if tile == 8 else -100 for tile in chosen]),
        tuple(view.people if tile == 8 else None if kinds[place].any() else () for place, tile in enumerate(chosen)),
    )


def joined(parts: list[Tiles]) -> Tiles:
    """All tiles of all parts."""
    return Tiles(
        torch.cat([part.images for part in parts]),
        torch.cat([part.kinds for part in parts]),
        torch.cat([part.actions for part in parts]),
        torch.cat([part.counts for part in parts]),
        tuple(people for part in parts for people in part.people),
    )


class Teacher:
    """The losses of the stages."""

    def __init__(self, checkpoint: Path) -> None:
        self.language = Language(checkpoint)
        self.codebook = Codebook(self.language)
        self.weights = torch.ones(CLASSES)
        self.weights[0] = _BACKGROUND_WEIGHT

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
            return "answer_one", self.language.layout(0, 0), [8]
        whole = self.language.layout(*((2, 4) if frames else (4, 2)))
        if kind > 0.85:
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

    def seeing(self, tower: Tower, tiles: Tiles, features: Tensor, outputs: Tensor) -> dict[str, Tensor]:
        """Patch, action and count losses of the tower, and the codes' of the connector."""
        kinds = nn.functional.cross_entropy(tower.classes(features).flatten(0, 1), tiles.kinds.flatten(), self.weights)
        losses = {"patch": kinds}
        if bool((tiles.actions >= 0).any()):
            actions = tower.actions(features).flatten(0, 1)
            losses["action"] = nn.functional.cross_entropy(actions, tiles.actions.flatten(), ignore_index=-100)
        if bool((tiles.counts >= 0).any()):
            counts = tower.counts(features.mean(1))
            losses["count"] = nn.functional.cross_entropy(counts, tiles.counts, ignore_index=-100)
        rows = torch.stack(
            [self.codebook.part if people is None else self.codebook.sentence(people) for people in tiles.people]
        )
        distances = self.codebook.distances(outputs)
        weight = torch.where(self.codebook.is_told(rows), 1.0, _PLAIN_WEIGHT).flatten()
        wrong = nn.functional.cross_entropy(-_SHARPNESS * distances.flatten(0, 1), rows.flatten(), reduction="none")
        far = distances.gather(-1, rows[..., None]).flatten()
        losses["code"] = (wrong * weight).sum() / weight.sum()
        losses["distance"] = (far * weight).sum() / weight.sum()
        return losses

    def telling(
        self, rng: np.random.Generator, tower: Tower, backgrounds: list[Path]
    ) -> tuple[dict[str, Tensor], Tiles, Tensor, Tensor]:
        """The loss of whole answers on a batch that shares prompt and layout, and what `seeing` needs of it."""
        frames = bool(rng.random() < 0.2)
        name, layout, tiles_used = self._layout(rng, frames=frames)
        size = max(1, BATCH // 2) if name == "answer_all" else BATCH
        prompt = facts.random_prompt(rng)
        views: list[View] = []
        replies: list[str] = []
        while len(views) < size:
            for view in random_views(rng, backgrounds, frames=frames):
                reply = facts.answers(view.people).get(prompt)
                if reply is not None and len(views) < size:
                    views.append(view)
                    replies.append(reply)
        tiles = joined([labelled_tiles(view, tiles_used) for view in views])
        features = tower.features(tiles.images)
        outputs = tower.connector(features)
        images = outputs.reshape(size, -1, outputs.shape[-1])[:, self._cells(layout, tiles_used)]
        return {name: self.language.loss(images, layout, prompt, replies)}, tiles, features, outputs


class Trainer:
    """One stage: its weights, optimiser and place in the schedule."""

    def __init__(self, options: argparse.Namespace) -> None:
        checkpoint = options.checkpoint or vlm.ensure_checkpoint(python=Path(sys.executable))
        self.options, self.step = options, 0
        self.teacher = Teacher(checkpoint)
        self.tower = make_tower(checkpoint)
        self.tower.load(options.start)
        self.state: Path = options.work / f"{options.stage}.pt"
        rate = options.rate
        if options.stage == "words":
            groups = [{"params": [self.teacher.codebook.codes], "base": rate}]
        else:
            heads = [p for name, p in self.tower.named_parameters() if not name.startswith("vision_model")]
            body = list(self.tower.vision_model.parameters())
            groups = [{"params": body, "base": 0.5 * rate}, {"params": heads, "base": rate}]
        self.optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        before = [options.work / f"{stage}.pt" for stage in STAGES[: STAGES.index(options.stage)]]
        for path in [*before, self.state]:
            if path.exists():
                saved = torch.load(path, map_location="cpu", weights_only=True)
                self.tower.load_state_dict(saved["tower"])
                self.teacher.codebook.load_state_dict(saved["codebook"])
        if self.state.exists():
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step = int(saved["step"])

    def advance(self, backgrounds: list[Path]) -> dict[str, float]:
        """One step; returns its losses by name."""
        options = self.options
        rng = np.random.default_rng((options.seed, self.step, STAGES.index(options.stage)))
        torch.manual_seed(int(rng.integers(2**31)))
        share = min(1.0, self.step / options.steps)
        factor = min(1.0, (self.step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in self.optimiser.param_groups:
            group["lr"] = group["base"] * factor
        losses: dict[str, Tensor]
        if options.stage == "words":
            losses = self.teacher.wording(rng)
            total = torch.stack(list(losses.values())).sum()
        else:
            if options.stage == "see":
                losses, tiles = {}, self._tiles(rng, backgrounds)
                features = self.tower.features(tiles.images)
                outputs = self.tower.connector(features)
            else:
                losses, tiles, features, outputs = self.teacher.telling(rng, self.tower, backgrounds)
            seen = self.teacher.seeing(self.tower, tiles, features, outputs)
            share = 1.0 if options.stage == "see" else _AIDING_SHARE
            total = torch.stack(
                [*losses.values(), *(share * _SHARES[name] * loss for name, loss in seen.items())]
            ).sum()
            losses |= seen
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_([p for group in self.optimiser.param_groups for p in group["params"]], 1.0)
        self.optimiser.step()
        self.step += 1
        return {name: float(value.detach()) for name, value in losses.items()}

    @staticmethod
    def _tiles(rng: np.random.Generator, backgrounds: list[Path]) -> Tiles:
        parts, count = [], 0
        while count < TILES_A_STEP:
            for view in random_views(rng, backgrounds, frames=bool(rng.random() < 0.2)):
                peopled = [tile for tile, owners in enumerate(label_tiles(view.owners)[:8]) if owners.any()]
                rng.shuffle(peopled)
                part = labelled_tiles(view, [*peopled[: int(rng.random() < _PART_SHARE)], 8])
                parts.append(part)
                count += len(part.counts)
        return joined(parts)

    def save(self) -> None:
        """Write the state; a kill in between leaves the one before."""
        self.state.parent.mkdir(parents=True, exist_ok=True)
        working = self.state.with_suffix(".tmp")
        state = {
            "tower": self.tower.state_dict(),
            "codebook": self.teacher.codebook.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
        }
        torch.save(state, working)
        working.replace(self.state)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--steps", type=int, default=3000, help="length of the stage's whole schedule")
    parser.add_argument("--until", type=int, help="stop this slice after so many steps in all")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--data", type=Path, help="photographs (images/, labels/) whose empty ones serve as backgrounds"
    )
    parser.add_argument("--start", type=Path, default=vlm.WEIGHTS, help="weights to start the first stage from")
    parser.add_argument(
        "--checkpoint", type=Path, help="built checkpoint for the language model; default: the cached one"
    )
    parser.add_argument("--work", type=Path, default=Path(".training/vlm"))
    parser.add_argument("--export", type=Path, help="write the weights there at the end of the slice")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cv2.setNumThreads(1)
    torch.manual_seed(options.seed)
    photographs = read_photographs(options.data) if options.data else []
    backgrounds = without_people([photo for photo in photographs if not is_held_out(photo.path)])
    trainer = Trainer(options)
    print(f"{options.stage}: from step {trainer.step}, {len(backgrounds)} photographs as backgrounds", flush=True)
    means: dict[str, float] = {}
    first, began_s = trainer.step, time.monotonic()
    last = min(options.steps, options.until or options.steps)
    while trainer.step < last:
        for name, value in trainer.advance(backgrounds).items():
            means[name] = value if name not in means else 0.95 * means[name] + 0.05 * value
        if trainer.step % SAVE_EVERY == 0 or trainer.step == last:
            trainer.save()
            each_s = (time.monotonic() - began_s) / (trainer.step - first)
            shown = " ".join(f"{name} {value:.3f}" for name, value in sorted(means.items()))
            print(f"step {trainer.step}/{options.steps} {shown} {each_s:.1f} s a step", flush=True)
    if options.export:
        trainer.tower.export(options.export)
        print(f"wrote {options.export}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last saved step", flush=True)
        sys.exit(130)

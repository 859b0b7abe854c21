"""Trains the sample VLM's vision tower and connector on generated scenes; the language model stays frozen.

    python -m samples.training.vlm words --steps 200    the codes that image tokens should have; no pictures
    python -m samples.training.vlm look --steps 4000    the first layers: what each patch shows, and the nearest person
    python -m samples.training.vlm spell --steps 1500   the last layers and the connector: the codes
    python -m samples.training.vlm see --steps 3000     tower and connector: all of that
    python -m samples.training.vlm tell --steps 2000    both through the language model: whole answers

Uses the model server's environment (transformers). Each stage goes on where it stopped and starts from what the one
before has reached; --export writes the weights so far. The schedules count steps, so pauses do no harm.
"""

from __future__ import annotations

import argparse
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import cv2
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from samples import vlm
from samples.training.pictures import Photograph, is_held_out, read_photographs, without_people
from samples.training.pool import (
    Pool,
    Tiles,
    cut,
    drawn,
    joined,
)
from samples.training.questions import row_of
from samples.training.slices import STOPPED, add_slice_options, run_slice
from samples.training.teacher import PHOTOGRAPHED, Teacher
from samples.training.tower import make_tower

TILES_A_STEP = {"look": 32, "spell": 32, "see": 32}
PATCHES_LOOKED_AT = 96  # of a tile's 256: most of them show no person and teach little
STAGES = ("words", "look", "spell", "see", "tell")
# The language model reads codes by their values, so it is the distance that counts; the choice alone overshoots.
_SHARES = {
    "kind": 1.0, "action": 0.5, "facing": 0.5, "role": 0.5, "crown": 1.0,
    "count": 1.0, "nearest": 2.0, "code": 0.25, "distance": 3.0,
}  # fmt: skip
_TEACHING = "teaching.safetensors"  # beside the weights: the heads and the codes, which are not served


def looked_at(tiles: Tiles, count: int) -> Tensor:
    """Which `count` patches (N, count) of each tile to look at: those of people first, then any; in order."""
    peopled = (tiles.kinds > 0) | (tiles.patches[:, row_of("crown")] > 0)
    chosen = (peopled.float() + torch.rand(peopled.shape)).topk(count, dim=1).indices
    return chosen.sort(1).values


def _total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack([_SHARES.get(name, 1.0) * loss for name, loss in losses.items()]).sum()


def _values(losses: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value.detach()) for name, value in losses.items()}


class Trainer:
    """One stage: its weights, optimiser and place in the schedule."""

    def __init__(self, options: argparse.Namespace, photographs: list[Photograph]) -> None:
        checkpoint = options.checkpoint or vlm.ensure_checkpoint(python=Path(sys.executable))
        self.options, self.step = options, 0
        self.photographs, self.backgrounds = photographs, without_people(photographs)
        self.workers = ThreadPoolExecutor(options.threads, initializer=torch.set_num_threads, initargs=(1,))
        self.teacher = Teacher(checkpoint, bfloat16=options.bfloat16)
        self.tower = make_tower(checkpoint)
        self._load(options.start)
        self.state: Path = options.work / f"{options.stage}.pt"
        rate = options.rate
        if options.stage == "words":
            groups = [{"params": [self.teacher.codebook.codes], "base": rate}]
        elif options.stage == "spell":
            groups = [{"params": self.tower.spelling_parameters(), "base": rate}]
        else:
            heads = [p for name, p in self.tower.named_parameters() if not name.startswith("vision_model")]
            body = list(self.tower.vision_model.parameters())
            groups = [{"params": body, "base": 0.5 * rate}, {"params": heads, "base": rate}]
        self.optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        before = [options.work / f"{stage}.pt" for stage in STAGES[: STAGES.index(options.stage)]]
        for path in [*before, self.state]:
            if path.exists():
                saved = torch.load(path, map_location="cpu", weights_only=True)
                self.tower.load_state_dict(saved["tower"], strict=False)  # heads that came later start anew
                self.teacher.codebook.load_state_dict(saved["codebook"])
        if self.state.exists():
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step = int(saved["step"])
        elif options.stage == "spell":
            self.tower.begin_spelling()

    def _load(self, path: Path) -> None:
        """Start from exported weights; from the heads and codes beside them, too, where there are any."""
        self.tower.load(path)
        beside = path.with_name(_TEACHING)
        if beside.exists():
            saved = {name: tensor.float() for name, tensor in load_file(beside).items()}
            self.teacher.codebook.load_state_dict({"codes": saved.pop("codes")})
            self.tower.load_state_dict(self.tower.state_dict() | saved)

    def export(self, path: Path) -> None:
        """Write the weights that are served, and beside them what training needs to go on from them."""
        self.tower.export(path)
        kept = self.tower.heads() | self.teacher.codebook.state_dict()
        state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in kept.items()}
        save_file(state, path.with_name(_TEACHING))

    def advance(self) -> dict[str, float]:
        """One step; returns its losses by name."""
        options = self.options
        rng = np.random.default_rng((options.seed, self.step, STAGES.index(options.stage)))
        torch.manual_seed(int(rng.integers(2**31)))
        share = min(1.0, self.step / options.steps)
        factor = min(1.0, (self.step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in self.optimiser.param_groups:
            group["lr"] = group["base"] * factor
        losses = self._learnt(rng)
        nn.utils.clip_grad_norm_(self._parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        return losses

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimiser.param_groups for parameter in group["params"]]

    def _learnt(self, rng: np.random.Generator) -> dict[str, float]:
        """The losses of one batch; their gradients are left on the parameters."""
        self.optimiser.zero_grad(set_to_none=True)
        if self.options.stage in TILES_A_STEP:
            return self._learnt_in_shares(rng)
        if self.options.stage == "words":
            losses = self.teacher.wording(rng)
        else:
            losses = self.teacher.telling(rng, self.tower, self.backgrounds, self._photographed)
        torch.autograd.backward(_total(losses))
        return _values(losses)

    @cached_property
    def _generated(self) -> Pool:
        options, codebook = self.options, self.teacher.codebook
        folder = options.work / "pool"
        return Pool(drawn(folder, options.pool, options.seed, self.backgrounds, codebook, processes=options.threads))

    @cached_property
    def _photographed(self) -> Pool | None:
        options, codebook = self.options, self.teacher.codebook
        peopled = [photo for photo in self.photographs if len(photo.boxes)]
        folder = options.work / "pool"
        return Pool(cut(folder, options.seed, peopled, codebook, processes=options.threads)) if peopled else None

    def _batch(self, rng: np.random.Generator, count: int) -> tuple[Tiles, Tensor]:
        """`count` tiles with the rows of their codes, some of photographs where there are any."""
        if self._photographed is None:
            return self._generated.batch(rng, count)
        tiles, rows = self._generated.batch(rng, count - PHOTOGRAPHED)
        further, their_rows = self._photographed.batch(rng, PHOTOGRAPHED)
        return joined([tiles, further]), torch.cat([rows, their_rows])

    def _learnt_in_shares(self, rng: np.random.Generator) -> dict[str, float]:
        """As `_learnt`; each core takes a share of the tiles for itself, quicker than sharing every single product."""
        cores, stage, parameters = self.options.threads, self.options.stage, self._parameters()

        def learnt(
            tiles: Tiles, rows: Tensor, kept: Tensor | None
        ) -> tuple[dict[str, float], tuple[Tensor | None, ...]]:
            with torch.set_grad_enabled(stage != "spell"), self.teacher.products():
                seen = self.tower.seen(tiles.images, kept)
            losses = {} if stage == "spell" else self.teacher.looking(self.tower, tiles, seen, kept)
            if stage != "look":
                with self.teacher.products():
                    outputs = self.tower.connector(self.tower.spelled(seen))
                losses |= self.teacher.coding(rows, outputs)
            gradients = torch.autograd.grad(_total(losses), parameters, allow_unused=True)
            return _values(losses), gradients

        batches = [self._batch(rng, TILES_A_STEP[stage] // cores) for _ in range(cores)]
        # Drawn before the threads start, for between them the order would be chance.
        kept = [looked_at(tiles, PATCHES_LOOKED_AT) if stage == "look" else None for tiles, _ in batches]
        shares = list(self.workers.map(learnt, *zip(*batches, strict=True), kept))
        for parameter, *gradients in zip(parameters, *(gradients for _, gradients in shares), strict=True):
            known = [gradient for gradient in gradients if gradient is not None]
            parameter.grad = torch.stack(known).sum(0) / cores if known else None
        names = {name for losses, _ in shares for name in losses}
        return {name: float(np.mean([losses[name] for losses, _ in shares if name in losses])) for name in names}

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
    add_slice_options(parser, steps=3000, seed=3)
    parser.add_argument(
        "--pool", type=int, default=16384, help="tiles drawn once for `look`, `spell` and `see`; 200 kB each"
    )
    parser.add_argument(
        "--data", type=Path, help="photographs (images/, labels/); those without people serve as backgrounds"
    )
    parser.add_argument("--start", type=Path, default=vlm.WEIGHTS, help="weights to start the first stage from")
    parser.add_argument(
        "--checkpoint", type=Path, help="built checkpoint for the language model; default: the cached one"
    )
    parser.add_argument(
        "--bfloat16",
        action=argparse.BooleanOptionalAction,
        default=bool(torch.cpu.get_capabilities().get("amx_bf16")),
        help="large products in bfloat16; default: where the processor has AMX, which makes them several times faster",
    )
    parser.add_argument("--work", type=Path, default=Path(".training/vlm"))
    parser.add_argument("--export", type=Path, help="write the weights there at the end of the slice")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cv2.setNumThreads(1)
    torch.manual_seed(options.seed)
    photographs = read_photographs(options.data) if options.data else []
    trainer = Trainer(options, [photo for photo in photographs if not is_held_out(photo.path)])
    print(f"{options.stage}: from step {trainer.step}, {len(trainer.photographs)} photographs", flush=True)
    run_slice(trainer, trainer.advance, options)
    if options.export:
        trainer.export(options.export)
        print(f"wrote {options.export}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(STOPPED, flush=True)
        sys.exit(130)

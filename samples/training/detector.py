"""Trains the sample detector: YOLO26n, one class, on photographs with people and generated scenes.

    python -m samples.training.detector DATA --steps 4000

DATA holds images/*.jpg and labels/*.txt. Work goes on where it stopped; --export writes the weights so far. Uses the
app's environment; its torchvision need not import. The schedule counts steps, so pauses do no harm.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from ultralytics import YOLO
from ultralytics.cfg import get_cfg
from ultralytics.utils.loss import E2ELoss

from samples.backdrops import Image
from samples.training.pictures import (
    Boxes,
    Photograph,
    camera_like,
    is_held_out,
    random_scene,
    read_labelled,
    read_photographs,
    without_people,
)
from samples.training.slices import STOPPED, add_slice_options, run_slice

WEIGHTS = Path(__file__).parents[1] / "weights" / "person-yolo26n.pt"
SIZE_PX = 320
BATCH = 12
GENERATED = 0.5  # share of generated scenes
BACKBONE_LAYERS = 11
HEAD_STEPS = 150  # at first only neck and head learn: half the time, and enough for a new kind of picture
_MIN_SIDE_PX = 6.0


def _real(rng: np.random.Generator, photographs: list[Photograph]) -> tuple[Image, Boxes]:
    return read_labelled(photographs[int(rng.integers(len(photographs)))])


def _generated(rng: np.random.Generator, backgrounds: list[Path]) -> tuple[Image, Boxes]:
    width = int(rng.integers(416, 641))
    scene = random_scene(rng, width, int(width * rng.uniform(0.56, 0.8)), backgrounds)
    boxes = [person.box_px for person in scene.seen if person.visible > 0.2]
    image = camera_like(rng, np.ascontiguousarray(scene.image[..., ::-1]))
    return image, np.asarray(boxes, np.float32).reshape(-1, 4)


def _framed(rng: np.random.Generator, image: Image, boxes: Boxes) -> tuple[Image, Boxes]:
    """A SIZE_PX square that shows the picture shrunk or part of it enlarged, mirrored half of the time."""
    height, width = image.shape[:2]
    people = (boxes[:, 3] - boxes[:, 1]) if len(boxes) else np.zeros(1, np.float32)
    fit = SIZE_PX / max(height, width)
    zoom = fit * float(np.exp(rng.uniform(math.log(0.75), math.log(1.6))))
    if len(boxes) and rng.random() < 0.3:  # somebody large
        zoom = float(np.clip(SIZE_PX * rng.uniform(0.6, 1.2) / max(8.0, people.max()), fit, 4 * fit))
    focus = np.array([width / 2, height / 2]) + rng.uniform(-0.2, 0.2, 2) * (width, height)
    if len(boxes):
        chosen = boxes[int(rng.integers(len(boxes)))]
        centre = np.array([(chosen[0] + chosen[2]) / 2, (chosen[1] + chosen[3]) / 2])
        focus += (centre - focus) * min(1.0, max(0.0, zoom / fit - 0.9))
    shift = SIZE_PX / 2 - focus * zoom
    matrix = np.array([[zoom, 0, shift[0]], [0, zoom, shift[1]]], np.float32)
    mode = cv2.INTER_AREA if zoom < 1 else cv2.INTER_LINEAR
    square = cv2.warpAffine(image, matrix, (SIZE_PX, SIZE_PX), flags=mode, borderValue=(114, 114, 114))
    moved = boxes * zoom + np.tile(shift, 2).astype(np.float32)
    cut = np.clip(moved, 0, SIZE_PX)
    sides, whole = cut[:, 2:] - cut[:, :2], moved[:, 2:] - moved[:, :2]
    kept = (sides.min(1) > _MIN_SIDE_PX) & (sides.prod(1) > 0.15 * whole.prod(1)) if len(boxes) else np.zeros(0, bool)
    cut = cut[kept]
    if rng.random() < 0.5:
        square = square[:, ::-1]
        cut[:, [0, 2]] = SIZE_PX - cut[:, [2, 0]]
    return np.ascontiguousarray(square, np.uint8), cut.astype(np.float32)


def make_batch(
    rng: np.random.Generator, photographs: list[Photograph], backgrounds: list[Path], size: int = BATCH
) -> dict[str, torch.Tensor]:
    """`size` pictures as ultralytics' loss takes them: img (B, 3, S, S) RGB 0 to 1, boxes as relative cx cy w h."""
    pictures, owners, rows = [], [], []
    for index in range(size):
        made = _generated(rng, backgrounds) if rng.random() < GENERATED else _real(rng, photographs)
        image, boxes = _framed(rng, *made)
        if rng.random() < 0.5:
            image = camera_like(rng, image)
        pictures.append(torch.from_numpy(np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1))))
        relative = boxes / SIZE_PX
        rows.append(np.hstack([(relative[:, :2] + relative[:, 2:]) / 2, relative[:, 2:] - relative[:, :2]]))
        owners += [index] * len(boxes)
    boxes_all = torch.from_numpy(np.concatenate(rows).astype(np.float32))
    return {
        "img": torch.stack(pictures).float() / 255,
        "batch_idx": torch.tensor(owners, dtype=torch.float32),
        "cls": torch.zeros(len(owners), 1),
        "bboxes": boxes_all,
    }


class Trainer:
    """The model, its average and its optimiser; everything that a resumed run needs."""

    def __init__(self, start: str, work: Path, steps: int, rate: float, seed: int) -> None:
        self.work, self.steps, self.rate, self.seed, self.step = work, steps, rate, seed, 0
        self.model: Any = YOLO(start).model.float()
        self.model.args = get_cfg(overrides={"epochs": 2})  # the loss weights are ultralytics' own
        self.average: Any = copy.deepcopy(self.model).eval()
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 5e-4}, {"params": plain, "weight_decay": 0.0}], lr=rate
        )
        self.loss: Any = E2ELoss(self.model)
        self.loss.o2m, self.loss.o2o = 0.4, 0.6  # the one-to-one head is the one that is used
        state = work / "detector.pt"
        if state.exists():
            saved = torch.load(state, map_location="cpu", weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.average.load_state_dict(saved["average"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step = int(saved["step"])

    def advance(self, photographs: list[Photograph], backgrounds: list[Path]) -> float:
        """One step; returns its loss."""
        rng = np.random.default_rng((self.seed, self.step))
        batch = make_batch(rng, photographs, backgrounds)
        warm = min(1.0, (self.step + 1) / 40)
        share = min(1.0, self.step / self.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * share)))
        self._thaw(self.step >= HEAD_STEPS)
        loss, _items = self.loss(self.model(batch["img"]), batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.sum().backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], 10.0)
        self.optimiser.step()
        self.step += 1
        keep = min(0.998, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for mine, theirs in zip(self.average.state_dict().values(), self.model.state_dict().values(), strict=True):
                if mine.dtype.is_floating_point:
                    mine.lerp_(theirs, 1 - keep)
                else:
                    mine.copy_(theirs)
        return float(loss.detach().sum()) / BATCH

    def _thaw(self, whole: bool) -> None:
        """Training mode: the whole model, or the layers behind the backbone only."""
        self.model.train()
        for index, layer in enumerate(self.model.model):
            trained = whole or index >= BACKBONE_LAYERS
            layer.requires_grad_(trained)
            if not trained:
                layer.eval()  # its batch norms keep their statistics

    def save(self) -> None:
        """Write the state; a kill in between leaves the one before."""
        self.work.mkdir(parents=True, exist_ok=True)
        working = self.work / "detector.tmp"
        torch.save(
            {
                "model": self.model.state_dict(),
                "average": self.average.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "step": self.step,
            },
            working,
        )
        working.replace(self.work / "detector.pt")

    def export(self, path: Path) -> None:
        """The averaged weights as an ultralytics checkpoint in half precision."""
        model = copy.deepcopy(self.average).half()
        model.args = {"task": "detect", "imgsz": 416, "single_cls": True}
        model.__dict__.pop("pt_path", None)  # a place on this machine
        model.names = {0: "person"}
        torch.save({"model": model, "epoch": -1, "train_args": {"imgsz": 416, "task": "detect"}}, path)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with images/ and labels/")
    add_slice_options(parser, steps=4000, seed=26)
    parser.add_argument("--start", default=str(WEIGHTS), help="weights to start from; yolo26n.yaml: random ones")
    parser.add_argument("--work", type=Path, default=Path(".training/detector"))
    parser.add_argument("--export", type=Path, help="write the weights there at the end of the slice")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cv2.setNumThreads(1)
    torch.manual_seed(options.seed)
    photographs = [photo for photo in read_photographs(options.data) if not is_held_out(photo.path)]
    backgrounds = without_people(photographs)
    trainer = Trainer(options.start, options.work, options.steps, options.rate, options.seed)
    print(
        f"{len(photographs)} photographs, {len(backgrounds)} of them without people; from step {trainer.step}",
        flush=True,
    )
    run_slice(trainer, lambda: {"loss": trainer.advance(photographs, backgrounds)}, options)
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

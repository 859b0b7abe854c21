"""AP50, recall and speed of the person detector on pictures that its training did not see."""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from ultralytics import YOLO

from samples.backdrops import Image
from samples.training.detector import WEIGHTS
from samples.training.pictures import Boxes, is_held_out, random_scene, read_labelled, read_photographs

PRODUCT_CONFIDENCE = 0.25
PRODUCT_SIZE_PX = 416
SIZES_PX = (320, 416, 640)
TAIL_LABELS = Path(__file__).parent / "vtest_tail.csv"
_SCENE_SEED = 1_000_033
Labelled = tuple[Image, Boxes]  # BGR picture, (N, 4) pixel boxes


def overlaps(ones: Boxes, others: Boxes) -> NDArray[np.float32]:
    """Intersection over union of each pair, (N, M)."""
    low = np.maximum(ones[:, None, :2], others[None, :, :2])
    high = np.minimum(ones[:, None, 2:], others[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (ones, others)]
    return np.asarray(shared / (areas[0][:, None] + areas[1][None] - shared + 1e-9), np.float32)


def matched(found: Boxes, scores: NDArray[np.float32], true: Boxes, least: float = 0.5) -> NDArray[np.bool_]:
    """Which of `found` are right: the best-scored first, each true box once, overlap at least `least`."""
    right = np.zeros(len(found), bool)
    if not len(found) or not len(true):
        return right
    table = overlaps(found, true)
    for index in np.argsort(-scores):
        best = int(table[index].argmax())
        if table[index, best] >= least:
            right[index] = True
            table[:, best] = 0
    return right


def average_precision(right: NDArray[np.bool_], scores: NDArray[np.float32], total: int) -> float:
    """Area under the precision-recall curve with precision made monotone (as COCO does, at every point)."""
    if not total or not len(right):
        return 0.0
    hits = right[np.argsort(-scores, kind="stable")].cumsum()
    precision = hits / np.arange(1, len(hits) + 1)
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    recall = np.concatenate([[0.0], hits / total])
    return float((np.diff(recall) * precision).sum())


def measure(predict: Callable[[Image], tuple[Boxes, NDArray[np.float32]]], pictures: list[Labelled]) -> str:
    """One row: pictures, people, AP50, recall and precision at the product's confidence."""
    rights, scores_all, total = [], [], 0
    for image, true in pictures:
        found, scores = predict(image)
        rights.append(matched(found, scores, true))
        scores_all.append(scores)
        total += len(true)
    right, scores = np.concatenate(rights), np.concatenate(scores_all)
    sure = scores >= PRODUCT_CONFIDENCE
    recall = right[sure].sum() / max(1, total)
    precision = right[sure].sum() / max(1, sure.sum())
    ap = average_precision(right, scores, total)
    return f"{len(pictures)} | {total} | {ap:.3f} | {recall:.3f} | {precision:.3f}"


def _held_out(data: Path, street: bool) -> list[Labelled]:
    pictures = []
    for photo in read_photographs(data):
        if is_held_out(photo.path) and photo.path.stem.startswith("p") == street:
            pictures.append(read_labelled(photo))
    return pictures


def _generated(count: int) -> list[Labelled]:
    pictures = []
    for index in range(count):
        scene = random_scene(np.random.default_rng((_SCENE_SEED, index)), 960, 540, [])
        boxes = np.asarray([seen.box_px for seen in scene.seen if seen.visible > 0.3], np.float32).reshape(-1, 4)
        pictures.append((np.ascontiguousarray(scene.image[..., ::-1]), boxes))
    return pictures


def _tail(video: Path) -> list[Labelled]:
    """The frames of vtest.avi in vtest_tail.csv (frame, x1, y1, x2, y2: boxes of a larger person model)."""
    boxes: dict[int, list[list[float]]] = defaultdict(list)
    with TAIL_LABELS.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            boxes[int(row["frame"])].append([float(row[key]) for key in ("x1", "y1", "x2", "y2")])
    capture, pictures, index = cv2.VideoCapture(str(video)), [], 0
    while True:
        more, frame = capture.read()
        if not more:
            break
        if index in boxes:
            pictures.append((np.asarray(frame, np.uint8), np.asarray(boxes[index], np.float32)))
        index += 1
    capture.release()
    return pictures


def run(options: argparse.Namespace) -> int:
    """The `detector` part of the command line."""
    model: Any = YOLO(str(options.weights or WEIGHTS))

    def predict(image: Image, size_px: int = PRODUCT_SIZE_PX) -> tuple[Boxes, NDArray[np.float32]]:
        boxes = model.predict(image, imgsz=size_px, conf=0.01, nms=False, verbose=False)[0].boxes
        return boxes.xyxy.numpy().astype(np.float32), boxes.conf.numpy().astype(np.float32)

    sets = {
        "held-out street scenes": _held_out(options.data, street=True),
        "held-out COCO pictures": _held_out(options.data, street=False),
        "generated scenes": _generated(options.count),
    }
    if options.tail:
        sets["vtest.avi, frames from 560"] = _tail(options.tail)
    print(f"at {PRODUCT_SIZE_PX} px; recall and precision at confidence {PRODUCT_CONFIDENCE}")
    print("| pictures of | pictures | people | AP50 | recall | precision |\n|---|---|---|---|---|---|")
    for name, pictures in sets.items():
        print(f"| {name} | {measure(predict, pictures)} |", flush=True)
    frame = np.asarray(cv2.resize(sets["generated scenes"][0][0], (960, 540)), np.uint8)
    for size in SIZES_PX:
        predict(frame, size)
        began_s, runs = time.perf_counter(), 30
        for _ in range(runs):
            predict(frame, size)
        rate = runs / (time.perf_counter() - began_s)
        print(f"| {size} px | {rate:.1f} frames/s, threads: {torch.get_num_threads()} |", flush=True)
    return 0

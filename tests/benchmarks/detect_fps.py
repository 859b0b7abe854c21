"""Frames a second of our detector against a bare loop over `YOLO.predict`, same settings, same run.

    python -m tests.benchmarks.detect_fps VIDEO [--frames 100] [--rounds 5] [--set detect.image_size_px=416 ...]

The three take turns, some frames each, so that whatever else the machine does meets all of them alike; a round's
order changes. Ours includes tracking, and as a process also the way there and back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import av

from pipeline.config import load_config
from pipeline.detect import Detector, DetectorProcess, default_threads
from pipeline.frame import Image
from pipeline.weights import ultralytics_environment

CHUNK = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("video")
    parser.add_argument("--frames", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="items")
    arguments = parser.parse_args()
    config = load_config(None, overrides=["detect.weights=sample", *arguments.items]).detect
    frames: list[Image] = []
    with av.open(arguments.video) as container:
        for picture in container.decode(video=0):
            frames.append(picture.to_ndarray(format="bgr24"))
            if len(frames) == arguments.frames:
                break

    os.environ.update(ultralytics_environment())
    here = Detector(config)
    from ultralytics import YOLO

    model = YOLO(here.weights_used, task="detect")

    def bare(image: Image) -> None:
        model.predict(
            image, imgsz=config.image_size_px, conf=0.1, classes=[0], nms=False, device=config.device, verbose=False
        )

    with DetectorProcess(config) as process:
        ways: dict[str, Callable[[Image], object]] = {
            "bare": bare,
            "detector": lambda image: here.track("camera", image),
            "process": lambda image: process.track("camera", image),
        }
        for way in ways.values():
            for image in frames[:5]:
                way(image)
        spent: dict[str, list[float]] = {name: [] for name in ways}
        order = list(ways)
        for _ in range(arguments.rounds):
            for start in range(0, len(frames), CHUNK):
                order = order[1:] + order[:1]
                for name in order:
                    for image in frames[start : start + CHUNK]:
                        begun = time.perf_counter()
                        ways[name](image)
                        spent[name].append(time.perf_counter() - begun)
    mean = {name: len(times) / sum(times) for name, times in spent.items()}
    median = {name: 1 / statistics.median(times) for name, times in spent.items()}
    print(json.dumps({
        "threads": config.threads or default_threads(), "image_size_px": config.image_size_px,
        "frames_each": len(spent["bare"]),
        "fps": {name: round(value, 2) for name, value in mean.items()},
        "fps_of_median": {name: round(value, 2) for name, value in median.items()},
        "detector_to_bare": round(mean["detector"] / mean["bare"], 3),
        "process_to_bare": round(mean["process"] / mean["bare"], 3),
        "process_to_bare_of_median": round(median["process"] / median["bare"], 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()

"""Whom the trigger picks in a video, as contact sheets to be counted by eye.

    python -m tests.benchmarks.people_in_video VIDEO OUT_FOLDER [--frames 300] [--set detect.rate_hz=5 ...]

Plays the video as fast as possible through the reader, the detector and the trigger, at the configured detection rate
in the video's own time. Writes sheet-*.png (one picked view a tile: person, tracks, time, reason), strip.png (every
2 s one frame with boxes and person ids) and people.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import cv2
import numpy as np

from pipeline.config import CameraConfig, Config, load_config
from pipeline.decisions import Decision, PersonState
from pipeline.detect import DetectorProcess
from pipeline.frame import Image
from pipeline.source import open_source
from pipeline.trigger import Trigger

TILE_PX = (170, 300)


def tile(image: Image, box: tuple[float, float, float, float], lines: list[str]) -> Image:
    """One picked person with 25 % margin, and what is known of them."""
    width, height = TILE_PX
    x1, y1, x2, y2 = box
    margin = 0.25 * (y2 - y1)
    left, top = max(0, int(x1 - margin)), max(0, int(y1 - margin))
    right, bottom = min(image.shape[1], int(x2 + margin)), min(image.shape[0], int(y2 + margin))
    marked = image.copy()
    cv2.rectangle(marked, (int(x1), int(y1)), (int(x2), int(y2)), (0, 255, 255), 1)
    crop = marked[top:bottom, left:right]
    scale = min(width / crop.shape[1], (height - 50) / crop.shape[0])
    crop = cv2.resize(crop, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
    canvas = np.zeros((height, width, 3), dtype=np.uint8)
    canvas[50 : 50 + crop.shape[0], : crop.shape[1]] = crop
    for number, line in enumerate(lines):
        cv2.putText(canvas, line, (2, 12 + 12 * number), cv2.FONT_HERSHEY_SIMPLEX, 0.36, (255, 255, 255), 1)
    return canvas


def sheet(tiles: list[Image], columns: int = 8) -> Image:
    """Tiles in rows."""
    blank = np.zeros_like(tiles[0])
    rows = [tiles[i : i + columns] for i in range(0, len(tiles), columns)]
    return np.vstack([np.hstack([*row, *[blank] * (columns - len(row))]) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("video")
    parser.add_argument("out", type=Path)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], dest="items")
    arguments = parser.parse_args()
    config: Config = load_config(None, overrides=["source.as_fast_as_possible=true", *arguments.items])
    arguments.out.mkdir(parents=True, exist_ok=True)

    trigger = Trigger(config.trigger, batch=True)
    picked: list[Decision] = []
    strip: list[Image] = []
    everyone: dict[str, PersonState] = {}
    detections = 0
    next_detection_s = next_strip_s = 0.0
    camera = CameraConfig(name="video", source=arguments.video)
    with DetectorProcess(config.detect) as detector, open_source(camera, config.source) as reader:
        index, last_s = -1, 0.0
        while index < arguments.frames - 1:
            frame = reader.wait_frame(index, 1.0)
            if frame is None:
                if reader.status().finished:
                    break
                continue
            index, last_s = frame.index, frame.media_s or 0.0
            if last_s + 1e-6 < next_detection_s:
                continue
            next_detection_s = max(next_detection_s + 1 / config.detect.rate_hz, last_s)
            found = detector.track("video", frame.image, scene=frame.scene)
            detections += len(found)
            decisions = trigger.update(frame, found)
            if last_s >= next_strip_s:
                next_strip_s += 2.0
                shown = frame.image.copy()
                for person in trigger.tracks():
                    x1, y1, x2, y2 = (
                        int(v * s) for v, s in zip(person.box, (frame.width_px, frame.height_px) * 2, strict=True)
                    )
                    cv2.rectangle(shown, (x1, y1), (x2, y2), (0, 255, 0), 2)
                    name = f"{person.person_id or '?'}/{person.track_id}"
                    cv2.putText(shown, name, (x1, y1 - 4), cv2.FONT_HERSHEY_SIMPLEX, 0.7, (0, 0, 255), 2)
                cv2.putText(shown, f"{last_s:.1f} s", (8, 24), cv2.FONT_HERSHEY_SIMPLEX, 0.8, (255, 255, 255), 2)
                strip.append(cv2.resize(shown, (512, 384), interpolation=cv2.INTER_AREA))
            for decision in decisions:
                picked.append(decision)
                trigger.finished(decision.person_id, last_s)
            everyone |= {person.person_id: person for person in trigger.people()}
        picked += (late := trigger.flush(last_s))
        for decision in late:
            trigger.finished(decision.person_id, last_s)
        everyone |= {person.person_id: person for person in trigger.people()}
        weights = detector.weights_used

    tiles = []
    for decision in picked:
        view = decision.view
        if view is not None:
            tracks = ",".join(map(str, everyone[decision.person_id].track_ids))
            lines = [
                f"person {decision.person_id} tr {tracks} {view.media_s or 0:.1f} s",
                f"{view.quality.height_px:.0f} px, conf {view.confidence:.2f}, overlap {view.quality.overlap:.2f}",
                decision.reason[:28],
                decision.reason[28:56],
            ]
            tiles.append(tile(view.image, view.box_px, lines))
    for number in range(0, len(tiles), 24):
        cv2.imwrite(str(arguments.out / f"sheet-{number // 24}.png"), sheet(tiles[number : number + 24]))
    if strip:
        cv2.imwrite(str(arguments.out / "strip.png"), sheet(strip, columns=4))
    counts = trigger.counts()
    summary = {
        "weights": Path(weights).name,
        "frames": index + 1,
        "detections": detections,
        "picked": len(picked),
        "seen": counts.seen,
        "rejoined": counts.rejoined,
        "unconfirmed_tracks": counts.unconfirmed,
        "not_picked": [
            {"person": p.person_id, "reason": p.reason, "tracks": p.track_ids}
            for p in everyone.values()
            if p.descriptions == 0
        ],
    }
    (arguments.out / "people.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

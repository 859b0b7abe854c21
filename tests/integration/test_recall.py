"""Whom the default deployment picks in the sample video: the real detector, tracker and trigger, no model server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from pipeline.config import load_config
from pipeline.detector import Detector
from pipeline.frame import Frame
from pipeline.trigger import Trigger
from samples.video import FPS, ensure_video
from tests.sample_truth import expected_walkers, people_of_the_sample, who_is_there

CONFIG = load_config(Path(__file__).parents[2] / "configs" / "sample.yaml", environ={})


def picked(detector: Detector, camera_id: str, first_s: float) -> Counter[int]:
    """How often each walker is picked when detection begins at `first_s`. -1: nobody is there."""
    trigger = Trigger(CONFIG.trigger, batch=True, keep_margin=0.25)
    people, stage = people_of_the_sample()
    capture = cv2.VideoCapture(str(ensure_video()))
    found: Counter[int] = Counter()
    index, next_s = -1, first_s
    while True:
        more, image = capture.read()
        index += 1
        at_s = index / FPS
        if more and at_s + 1e-6 < next_s:
            continue
        next_s = max(next_s + 1 / CONFIG.detect.rate_hz, at_s)
        if more:
            frame = Frame(np.asarray(image, np.uint8), index, 1000.0 + at_s, at_s)
            decisions = trigger.update(frame, detector.track(camera_id, frame.image))
        else:
            decisions = trigger.flush(at_s)
        for decision in decisions:
            assert decision.view is not None
            walker, _ = who_is_there(decision.view.frame_box, decision.view.media_s or 0.0, people, stage)
            found[walker] += 1
            trigger.finished(decision.person_id, at_s)
        if not more:
            capture.release()
            return found


@pytest.mark.timeout(300)
def test_most_people_of_the_sample_video_are_picked_once() -> None:
    expected = expected_walkers()
    assert len(expected) == 13
    with Detector(CONFIG.detect) as detector:
        for camera_id, first_s in (("a", 0.0), ("b", 0.12)):
            found = picked(detector, camera_id, first_s)
            described = expected & set(found)
            twice = sum(count - 1 for count in found.values() if count > 1)
            print(f"from {first_s} s: {len(described)} of {len(expected)}, {twice} twice, {found[-1]} nobody")
            # 8 to 10 of 13 and at most 2 twice over five beginnings; 5 or 6 before overlap alone decided about tracks.
            assert len(described) >= 7
            assert twice <= 2
            assert found[-1] <= 1

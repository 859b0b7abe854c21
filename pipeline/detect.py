"""YOLO26 people, tracked, one frame at a time.

    with DetectorProcess(DetectConfig(weights="sample")) as detector:
        for person in detector.track("door", frame.image, scene=frame.scene):
            print(person.track_id, person.box_px)

`Detector` runs the model in this process; `DetectorProcess` has the same surface and runs it in one of its own.
Importing this module does not import torch.
"""

from pipeline.detect_process import DetectorProcess, DetectorStatus
from pipeline.detector import Detector, DetectorError, default_threads
from pipeline.frame import Detection
from pipeline.weights import WeightsError

__all__ = [
    "Detection",
    "Detector",
    "DetectorError",
    "DetectorProcess",
    "DetectorStatus",
    "WeightsError",
    "default_threads",
]

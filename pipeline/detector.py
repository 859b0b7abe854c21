"""The YOLO26 model and the trackers, in this process. `pipeline.detect` is the way in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config import DetectConfig
from pipeline.frame import Detection, Image
from pipeline.weights import resolve_weights, ultralytics_environment

_LOW_CONFIDENCE = 0.1  # ByteTrack keeps a known track alive on detections down to this
_MATCH = 0.9  # of 1 - overlap; the library's 0.8 is for every frame, here people move on in between
_SAME_OVERLAP, _SAME_INSIDE = 0.6, 0.85  # of two boxes: intersection over union, and over the smaller one
# A track not found for so long is over: it only looks for overlap, and would go on with whoever comes by. The trigger's
# re-entry logic, which also asks for the same colours, takes it from there.
_REMEMBER_S = 1.0


class DetectorError(RuntimeError):
    """Detection is not possible now; one line."""


def default_threads() -> int:
    """CPU threads of the detector when the config leaves them open: the model server needs the cores more."""
    return max(1, min(4, (os.cpu_count() or 1) // 4))


def one_box_each(boxes: npt.NDArray[np.float32], scores: npt.NDArray[np.float32]) -> list[int]:
    """Which of (N, 4) x1, y1, x2, y2 boxes to keep: of two around one person the surer one.

    The NMS-free head is trained to give one box a person and mostly does; what is left are boxes that nearly coincide,
    or one around a part of the person.
    """
    kept: list[int] = []
    for index in np.argsort(-scores).tolist():
        x1, y1, x2, y2 = boxes[index].tolist()
        area = (x2 - x1) * (y2 - y1)
        for other in kept:
            ox1, oy1, ox2, oy2 = boxes[other].tolist()
            shared = max(0.0, min(x2, ox2) - max(x1, ox1)) * max(0.0, min(y2, oy2) - max(y1, oy1))
            other_area = (ox2 - ox1) * (oy2 - oy1)
            if shared > _SAME_OVERLAP * (area + other_area - shared) or shared > _SAME_INSIDE * min(area, other_area):
                break
        else:
            kept.append(index)
    return kept


@dataclass(slots=True)
class _Camera:
    """One camera's tracker; `offset` keeps its ids unique when the tracker is made anew."""

    tracker: Any
    scene: int
    offset: int = 0
    highest: int = 0


class Detector:
    """Finds and tracks people. Not for several threads at once: one call at a time.

    Attributes:
        weights_used: The file that was loaded.
        warning: Something the user should see, e.g. that the sample weights stand in; "" otherwise.

    Raises:
        WeightsError: The weights cannot be found.
        DetectorError: They cannot be loaded.
    """

    def __init__(self, config: DetectConfig) -> None:
        self.config = config
        path, self.warning = resolve_weights(config.weights)
        self.weights_used = str(path)
        os.environ.update(ultralytics_environment())
        import torch  # noqa: PLC0415 - seconds to import
        from PIL import Image  # noqa: PLC0415

        # Ultralytics replaces this for the whole process with one that wants more packages for a damaged picture.
        open_picture = Image.open
        from ultralytics import YOLO  # noqa: PLC0415
        from ultralytics.trackers.bot_sort import BOTSORT  # noqa: PLC0415
        from ultralytics.trackers.byte_tracker import BYTETracker  # noqa: PLC0415

        Image.open = open_picture
        self._torch = torch
        self._tracker_class = BOTSORT if config.tracker == "botsort" else BYTETracker
        self._cameras: dict[str, _Camera] = {}
        try:
            model = YOLO(str(path), task="detect")
            people = [number for number, name in model.names.items() if name == "person"]
            blank = np.zeros((config.image_size_px, config.image_size_px, 3), dtype=np.uint8)
            model.predict(
                blank,
                imgsz=config.image_size_px,
                conf=min(_LOW_CONFIDENCE, config.confidence),
                classes=people or [0],  # a model of one class may call it anything
                nms=False,
                device=config.device,
                verbose=False,
            )
        except Exception as error:
            text = " ".join(str(error).split())[:160]
            raise DetectorError(f"detect.weights {path}: cannot be loaded ({type(error).__name__}: {text})") from error
        self._predictor = model.predictor
        torch.set_num_threads(config.threads or default_threads())  # ultralytics has just set its own

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def track(self, camera_id: str, image: Image, *, scene: int = 0) -> list[Detection]:
        """The people in the next picture of `camera_id`.

        Args:
            camera_id: Every camera has tracks of its own.
            image: (H, W, 3) uint8 BGR.
            scene: `Frame.scene`; when it changes, the tracks of before are over.
        """
        boxes = self._detect(image)
        camera = self._cameras.get(camera_id)
        if camera is None or camera.scene != scene:
            offset = camera.highest if camera is not None else 0
            camera = _Camera(self._tracker_class(self._tracker_settings()), scene, offset, offset)
            self._cameras[camera_id] = camera
        rows = camera.tracker.update(boxes, image)
        height, width = image.shape[:2]
        found = []
        for x1, y1, x2, y2, track_id, score, *_ in rows.tolist():
            box = (max(0.0, x1), max(0.0, y1), min(float(width), x2), min(float(height), y2))
            if box[2] > box[0] and box[3] > box[1]:
                number = int(track_id) + camera.offset
                camera.highest = max(camera.highest, number)
                found.append(Detection(number, box, float(score)))
        return found

    def forget(self, camera_id: str) -> None:
        """The camera was removed."""
        self._cameras.pop(camera_id, None)

    def close(self) -> None:
        """Forget every camera."""
        self._cameras.clear()

    def _detect(self, image: Image) -> Any:
        """The steps of ultralytics' predictor on one array, without its per-call set-up: boxes on the CPU."""
        predictor = self._predictor
        with self._torch.inference_mode():
            predictor.batch = ([""], [image], [""])
            tensor = predictor.preprocess([image])
            result = predictor.postprocess(predictor.inference(tensor), tensor, [image])[0]
        boxes = result.boxes.cpu().numpy()
        return boxes[one_box_each(boxes.xyxy, boxes.conf)]

    def _tracker_settings(self) -> Any:
        """The library's own tracker settings, for detections that are `1 / rate_hz` apart instead of every frame."""
        from ultralytics.utils import YAML, IterableSimpleNamespace  # noqa: PLC0415
        from ultralytics.utils.checks import check_yaml  # noqa: PLC0415

        settings = YAML.load(check_yaml(f"{self.config.tracker}.yaml"))
        settings.update(
            track_high_thresh=self.config.confidence,
            new_track_thresh=self.config.confidence,
            track_low_thresh=min(_LOW_CONFIDENCE, self.config.confidence),
            match_thresh=_MATCH,
            # Overlap counts alone. Times a confidence of 0.2 to 0.5 it stays below what the tracker asks before it
            # believes a new track (0.3, fixed), and people who are found in every picture never get one.
            fuse_score=False,
            track_buffer=max(2, round(self.config.rate_hz * _REMEMBER_S)),
        )
        if self.config.tracker == "botsort":
            settings["with_reid"] = False  # it would ask for one more download
        return IterableSimpleNamespace(**settings)

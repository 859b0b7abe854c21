"""Measures the sample models on data that no training saw, and prints the tables of docs/sample-models.md.

    .venv-vllm/bin/python -m samples.training.evaluate scenes --count 500
    .venv-vllm/bin/python -m samples.training.evaluate scenes --frames --one-tile
    .venv-vllm/bin/python -m samples.training.evaluate questions --count 60
    .venv-vllm/bin/python -m samples.training.evaluate photographs DATA
    .venv-vllm/bin/python -m samples.training.evaluate served http://127.0.0.1:8000/v1
    .venv/bin/python -m samples.training.evaluate detector DATA --tail vtest.avi

DATA holds images/*.jpg and labels/*.txt. All but the last need the model server's environment (`served` a running
server with the sample model, too), that one the app's.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

_PARTS = {
    "scenes": "evaluate_vlm",
    "questions": "evaluate_vlm",
    "photographs": "evaluate_vlm",
    "served": "evaluate_served",
    "detector": "evaluate_detector",
}


def main() -> int:
    """Command line; each part's module has a `run(options)` of its own, for they need different environments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    scenes = parts.add_parser("scenes", help="descriptions of generated scenes")
    scenes.add_argument("--count", type=int, default=500)
    scenes.add_argument("--frames", action="store_true", help="of whole frames instead of crops around people")
    questions = parts.add_parser("questions", help="every phrasing and question that is taught, on generated scenes")
    questions.add_argument("--count", type=int, default=60)
    photographs = parts.add_parser("photographs", help="descriptions of people in photographs, against facts by eye")
    photographs.add_argument("data", type=Path)
    for part in (scenes, questions, photographs):
        part.add_argument("--weights", type=Path, help="vision weights; default: the committed ones")
        part.add_argument("--show", type=int, default=5, help="print so many answers beside the truth")
        part.add_argument("--one-tile", action="store_true", help="pictures whole in one tile, not cut into tiles")
    served = parts.add_parser("served", help="the running server against transformers, and its speed")
    served.add_argument("endpoint")
    served.add_argument("--count", type=int, default=20)
    served.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="the server's `serving.server.dtype`"
    )
    detector = parts.add_parser("detector", help="AP50, recall and speed of the person detector")
    detector.add_argument("data", type=Path)
    detector.add_argument("--weights", type=Path, help="default: the committed ones")
    detector.add_argument("--tail", type=Path, help="vtest.avi, for the frames after 560")
    detector.add_argument("--count", type=int, default=200, help="generated scenes")
    options = parser.parse_args()
    module = importlib.import_module(f"samples.training.{_PARTS[options.part]}")
    return int(module.run(options))


if __name__ == "__main__":
    sys.exit(main())

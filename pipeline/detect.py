"""YOLO26 people, tracked."""

from __future__ import annotations

from pipeline.frame import Detection

__all__ = ["Detection"]

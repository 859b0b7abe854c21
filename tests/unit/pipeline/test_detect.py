"""Weights, boxes and settings of the detector; what needs the model is in tests/integration/test_detector.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from pipeline import weights
from pipeline.config import DetectConfig
from pipeline.detect import WeightsError, default_threads
from pipeline.detector import one_box_each
from pipeline.weights import SAMPLE_WEIGHTS, resolve_weights


@pytest.mark.parametrize(
    ("boxes", "scores", "kept"),
    [
        pytest.param([], [], [], id="none"),
        pytest.param([(0, 0, 40, 100)], [0.5], [0], id="one"),
        pytest.param([(0, 0, 40, 100), (4, 2, 44, 98)], [0.5, 0.8], [1], id="nearly the same: the surer"),
        pytest.param([(0, 0, 40, 100), (5, 0, 35, 45)], [0.5, 0.3], [0], id="a part of a person"),
        pytest.param([(0, 0, 40, 100), (30, 0, 70, 100)], [0.5, 0.6], [1, 0], id="side by side"),
        pytest.param([(0, 0, 40, 100), (20, 20, 60, 120)], [0.5, 0.6], [1, 0], id="one half in front of another"),
        pytest.param([(0, 0, 40, 100), (200, 0, 240, 100), (2, 0, 42, 100)], [0.9, 0.8, 0.7], [0, 1], id="three"),
    ],
)
def test_one_box_each(boxes: list[tuple[float, ...]], scores: list[float], kept: list[int]) -> None:
    array = np.array(boxes, np.float32).reshape(-1, 4)
    assert one_box_each(array, np.array(scores, np.float32)) == kept


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network, and an empty cache folder."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path))
    return tmp_path


def test_sample_weights_are_there_and_ask_for_no_warning() -> None:
    path, warning = resolve_weights("sample")
    assert path == SAMPLE_WEIGHTS
    assert path.stat().st_size > 1_000_000
    assert warning == ""


def test_a_path_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").write_bytes(b"x")
    assert resolve_weights(str(tmp_path / "mine.pt")) == (tmp_path / "mine.pt", "")


def test_offline_the_sample_weights_stand_in_with_a_warning(offline: Path) -> None:
    path, warning = resolve_weights("yolo26n.pt")
    assert path == SAMPLE_WEIGHTS
    assert "yolo26n.pt" in warning
    assert "Network is unreachable" in warning
    assert "bundled sample weights" in warning


def test_what_was_downloaded_before_is_used(offline: Path) -> None:
    (offline / "weights").mkdir()
    (offline / "weights" / "yolo26s.pt").write_bytes(b"x")
    assert resolve_weights("yolo26s.pt") == (offline / "weights" / "yolo26s.pt", "")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param("import sys; print('boom', file=sys.stderr); sys.exit(3)", "boom", id="fails"),
        pytest.param("import time; time.sleep(60)", "not done after 1 s", id="never ends"),
        pytest.param("pass", "no file came", id="brings nothing"),
    ],
)
def test_a_download_that_fails_is_bounded(
    script: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path))
    monkeypatch.setattr(weights, "_DOWNLOAD", script)
    monkeypatch.setattr(weights, "_DOWNLOAD_S", 1.0 if "sleep" in script else 30.0)
    path, warning = resolve_weights("yolo26n.pt")
    assert path == SAMPLE_WEIGHTS
    assert words in warning


def test_a_download_that_works_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy"})
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path))
    monkeypatch.setattr(weights, "_DOWNLOAD", "import sys; open(sys.argv[1], 'wb').write(b'weights')")
    assert resolve_weights("yolo26n.pt") == (tmp_path / "weights" / "yolo26n.pt", "")
    assert (tmp_path / "weights" / "yolo26n.pt").read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["nothing.pt", "yolo.pt", "../yolo26n.pt", "http://host/yolo26n.pt"])
def test_what_is_neither_file_nor_name_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="allowed: a file"):
        resolve_weights(name)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 1), (8, 2), (64, 4), (None, 1)])
def test_the_detector_leaves_the_cores_to_the_model_server(
    cores: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert default_threads() == threads


def test_importing_the_detector_imports_no_torch() -> None:
    script = "import pipeline.detect, pipeline.source, pipeline.trigger, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_settings_are_validated() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        DetectConfig(image_size_px=400)

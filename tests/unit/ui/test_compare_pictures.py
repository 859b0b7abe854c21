from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from ui.compare_pictures import MOST, PicturesError, load_pictures


def picture(path: Path, colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 48), colour).save(path)
    return path


def test_a_folder_with_folders_of_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.jpg")
    picture(tmp_path / "b" / "2.png", "blue")
    (tmp_path / "note.txt").write_text("no picture")
    pictures = load_pictures(str(tmp_path))
    assert len(pictures) == 2
    first = pictures.picture(0, 32, 64)
    assert first.shape == (64, 32, 3)
    assert (first == pictures.picture(2, 32, 64)).all()  # they repeat
    assert abs(int(pictures.picture(1, 32, 64)[5, 5, 2]) - 255) < 5


def test_what_watch_recorded(tmp_path: Path) -> None:
    made = picture(tmp_path / "thumb.jpg")
    lines = [{"thumbnail": str(made)}, {"thumbnail": None}, {}]
    path = tmp_path / "people.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert len(load_pictures(str(path))) == 1


def test_frames_of_a_video(tmp_path: Path) -> None:
    path = tmp_path / "short.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=12)
        stream.width, stream.height = 64, 48
        for number in range(30):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number * 8, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert 1 < len(load_pictures(str(path))) <= MOST


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda path: None, "no such file", id="missing"),
        pytest.param(lambda path: path.mkdir(), "holds no picture", id="empty folder"),
        pytest.param(lambda path: path.write_bytes(b"nothing"), "cannot be read", id="no video"),
    ],
)
def test_what_holds_no_pictures(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "thing"
    make(path)  # type: ignore[operator]
    with pytest.raises(PicturesError, match=message):
        load_pictures(str(path))

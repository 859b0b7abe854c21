from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from samples import video


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Videos of half a second, in a cache folder of their own."""
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path / "cache"))
    frames = video.street
    monkeypatch.setattr(video, "street", lambda: frames(seconds=0.5))
    monkeypatch.setattr(video, "PHOTO_S", 0.25)
    pan = video.photographs
    monkeypatch.setattr(video, "photographs", lambda: pan(seconds=0.25))
    return tmp_path / "cache"


def test_the_street_shows_people_from_the_start_and_the_same_ones_for_a_seed() -> None:
    one = list(video.street(seconds=0.25))
    again = list(video.street(seconds=0.25))
    other = list(video.street(seed=video.SEED + 1, seconds=0.25))
    assert len(one) == round(0.25 * video.FPS)
    assert one[0].shape == (video.HEIGHT_PX, video.WIDTH_PX, 3)
    assert all(np.array_equal(left, right) for left, right in zip(one, again, strict=True))
    assert not np.array_equal(one[0], other[0])
    assert np.abs(one[-1].astype(int) - one[0]).max() > 60  # somebody moves


@pytest.mark.parametrize("name", video.VIDEOS)
def test_a_video_is_made_once_and_opencv_reads_it(short: Path, name: str) -> None:
    path = video.ensure_video(name)
    written = path.stat().st_mtime_ns
    assert video.ensure_video(name) == path
    assert path.stat().st_mtime_ns == written
    assert path.parent == short
    assert not list(short.glob("*.tmp*"))
    capture = cv2.VideoCapture(str(path))
    more, frame = capture.read()
    assert more
    assert frame.shape == (video.HEIGHT_PX, video.WIDTH_PX, 3)
    assert capture.get(cv2.CAP_PROP_FPS) == pytest.approx(video.FPS)
    assert frame.std() > 15
    capture.release()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(video.SampleVideoError, match="'nothing'; allowed: sample, sample-photos"):
        video.ensure_video("nothing")


def test_a_cache_that_cannot_be_written_is_one_line_with_the_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FRAMECHAT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(video.SampleVideoError, match="set FRAMECHAT_CACHE") as failure:
        video.ensure_video("sample")
    assert "\n" not in str(failure.value)


def test_a_failed_video_leaves_nothing_behind(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        yield np.zeros((video.HEIGHT_PX, video.WIDTH_PX, 3), np.uint8)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(video, "street", broken)
    with pytest.raises(video.SampleVideoError, match="No space left"):
        video.ensure_video("sample")
    assert not list(short.glob("*.mp4"))

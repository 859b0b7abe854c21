from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from samples.skeleton import stride_shown
from samples.training import pictures
from samples.training.views import ACTIONS


def photograph(folder: Path, name: str, label: str | None) -> None:
    (folder / "images").mkdir(exist_ok=True)
    (folder / "labels").mkdir(exist_ok=True)
    cv2.imwrite(str(folder / "images" / f"{name}.jpg"), np.full((40, 60, 3), 90, np.uint8))
    if label is not None:
        (folder / "labels" / f"{name}.txt").write_text(label)


def test_labels_become_corner_boxes(tmp_path: Path) -> None:
    photograph(tmp_path, "p1", "0 0.5 0.5 0.2 0.4\n0 0.1 0.2 0.1 0.2\n")
    photograph(tmp_path, "p2", "")
    one, empty = pictures.read_photographs(tmp_path)
    assert one.boxes == pytest.approx(np.array([[0.4, 0.3, 0.6, 0.7], [0.05, 0.1, 0.15, 0.3]]))
    assert empty.boxes.shape == (0, 4)
    assert pictures.without_people([one, empty]) == [empty.path]


def test_a_folder_without_pictures_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no"):
        pictures.read_photographs(tmp_path)


def test_a_damaged_label_is_named(tmp_path: Path) -> None:
    photograph(tmp_path, "p1", "0 0.5 0.5\n")
    with pytest.raises(ValueError, match="labels/p1"):
        pictures.read_photographs(tmp_path)


@pytest.mark.parametrize(
    ("name", "held_out"),
    [
        pytest.param("p000003.jpg", True, id="street scene 3"),
        pytest.param("p000023.jpg", True, id="street scene 23"),
        pytest.param("p000004.jpg", False, id="street scene 4"),
        pytest.param("c000007.jpg", True, id="other 7"),
        pytest.param("c000008.jpg", False, id="other 8"),
    ],
)
def test_what_is_held_out(name: str, held_out: bool) -> None:
    assert pictures.is_held_out(Path(name)) is held_out


def test_walkers_show_their_stride_and_go_everywhere() -> None:
    rng = np.random.default_rng(2)
    poses = [pictures.random_pose(rng) for _ in range(300)]
    walking = [pose for pose in poses if pose.phase is not None]
    assert 180 < len(walking) < 240
    assert min(stride_shown(pose) for pose in walking) >= 0.06
    assert {pose.action for pose in poses} == set(ACTIONS)


def test_scenes_vary_and_some_are_empty() -> None:
    scenes = [pictures.random_scene(np.random.default_rng((1, index)), 240, 160, []) for index in range(25)]
    counts = [len(scene.seen) for scene in scenes]
    assert min(counts) == 0
    assert max(counts) >= 4
    again = pictures.random_scene(np.random.default_rng((1, 3)), 240, 160, [])
    assert np.array_equal(again.image, scenes[3].image)


def test_a_camera_changes_a_picture_but_not_its_content() -> None:
    scene = pictures.random_scene(np.random.default_rng((1, 3)), 240, 160, [])
    changed = [pictures.camera_like(np.random.default_rng(seed), scene.image) for seed in range(6)]
    differences = [np.abs(picture.astype(int) - scene.image).mean() for picture in changed]
    assert max(differences) > 3
    assert max(differences) < 60
    assert all(picture.shape == scene.image.shape and picture.dtype == np.uint8 for picture in changed)

"""Webcams are listed from what the system says of them."""

from __future__ import annotations

from pathlib import Path

from pipeline.webcams import list_webcams


def _device(system: Path, number: int, name: str, index: int) -> None:
    folder = system / f"video{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    (folder / "index").write_text(f"{index}\n")


def test_metadata_devices_are_left_out_and_order_is_by_index(tmp_path: Path) -> None:
    for number, name, index in [(10, "USB camera", 0), (2, "Built-in", 0), (3, "Built-in", 1)]:
        _device(tmp_path / "sys", number, name, index)
    (tmp_path / "sys" / "videofoo").mkdir()
    found = list_webcams(tmp_path / "sys", tmp_path / "dev")
    assert [(d.index, d.name, d.path) for d in found] == [
        (2, "Built-in", str(tmp_path / "dev" / "video2")),
        (10, "USB camera", str(tmp_path / "dev" / "video10")),
    ]


def test_no_webcams(tmp_path: Path) -> None:
    assert list_webcams(tmp_path / "nothing") == []


def test_a_device_that_is_no_camera_is_asked_and_falls_back_to_its_index(tmp_path: Path) -> None:
    _device(tmp_path / "sys", 0, "Camera", 0)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "video0").write_bytes(b"")  # answers no ioctl
    assert [d.index for d in list_webcams(tmp_path / "sys", tmp_path / "dev")] == [0]

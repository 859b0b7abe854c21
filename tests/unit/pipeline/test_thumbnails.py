"""Thumbnail files: whole or not there, and the strays among them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pipeline.database import StoreError
from pipeline.thumbnails import _FOLDERS, ORPHAN_AGE_S, Thumbnails, _folder_of


@pytest.fixture
def thumbnails(tmp_path: Path) -> Thumbnails:
    return Thumbnails(tmp_path / "thumbnails")


def aged(file: Path, seconds: float = ORPHAN_AGE_S + 60) -> Path:
    at_s = time.time() - seconds
    os.utime(file, (at_s, at_s))
    return file


def sweep_all(thumbnails: Thumbnails, known: set[str], limit: int = 100) -> int:
    """Every folder once."""
    return sum(thumbnails.sweep(lambda names: known & set(names), limit) for _ in range(_FOLDERS))


def test_a_thumbnail_is_written_read_replaced_and_removed(thumbnails: Thumbnails) -> None:
    assert thumbnails.find("abc") is None
    for jpeg in (b"one", b"two"):
        thumbnails.add("abc", jpeg)
        file = thumbnails.find("abc")
        assert file is not None
        assert file.read_bytes() == jpeg
        assert [item.name for item in file.parent.iterdir()] == ["abc.jpg"]
    thumbnails.remove("abc")
    thumbnails.remove("abc")
    assert thumbnails.find("abc") is None


@pytest.mark.parametrize("name", ["", "..", "../abc", "a/b", "a.b", "a\0b", "x" * 65])
def test_names_that_no_thumbnail_has(thumbnails: Thumbnails, name: str) -> None:
    assert thumbnails.find(name) is None


def test_ids_are_spread_evenly_and_always_alike() -> None:
    folders = [_folder_of(f"{number:032x}") for number in range(0, 1_000_000, 997)]
    assert _folder_of("abc") == f"{(97 * 31 + 98 * 32 + 99 * 33) % 256:02x}"
    assert len(set(folders)) > 100
    assert all(len(folder) == 2 for folder in folders)


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"set store\.folder"):
        Thumbnails(tmp_path / "file" / "thumbnails")
    thumbnails = Thumbnails(tmp_path / "thumbnails")
    (tmp_path / "thumbnails" / _folder_of("abc")).write_text("")  # in the way
    with pytest.raises(StoreError, match=r"free disk space or set store\.folder"):
        thumbnails.add("abc", b"jpeg")


def test_only_old_files_that_nobody_knows_are_strays(thumbnails: Thumbnails) -> None:
    for name in ("known", "young", "stray"):
        thumbnails.add(name, b"jpeg")
    known, stray = thumbnails.find("known"), thumbnails.find("stray")
    assert known is not None and stray is not None
    aged(known)
    aged(stray)
    half = known.with_suffix(".part")
    half.write_bytes(b"jp")
    aged(half)  # a kill in mid-write of one that was written again later
    assert sweep_all(thumbnails, {"known"}) == 2
    assert not half.exists()
    assert [thumbnails.find(name) is not None for name in ("known", "young", "stray")] == [True, True, False]
    assert sweep_all(thumbnails, {"known"}) == 0


def test_a_sweep_is_bounded(thumbnails: Thumbnails) -> None:
    names = [name for name in (f"{number:032x}" for number in range(5000)) if _folder_of(name) == _folder_of("0" * 32)]
    names = names[:5]
    for name in names:
        thumbnails.add(name, b"jpeg")
        file = thumbnails.find(name)
        assert file is not None
        aged(file)
    asked: list[int] = []

    def known(some: list[str]) -> set[str]:
        asked.append(len(some))
        return set()

    counts = [sum(thumbnails.sweep(known, 2) for _ in range(_FOLDERS)) for _ in range(3)]
    assert counts == [2, 2, 1]
    assert max(asked) == 2

"""The folder of uploaded videos: what is removed from it, and what never."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from python_multipart.multipart import MultipartParser

from pipeline.config import Config
from pipeline.uploads import Uploads, _File


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    found = Uploads(Config.model_validate({"store": {"folder": str(tmp_path / "data")}}))
    found.clear(set())
    return found


def put(folder: Path, number: int, suffix: str = ".mp4") -> Path:
    """An uploaded video; a higher number is a newer one."""
    file = folder / f"{number:032x}{suffix}"
    file.write_bytes(b"video")
    os.utime(file, (number, number))
    return file


def test_clearing_keeps_what_is_watched_and_what_is_not_ours(uploads: Uploads) -> None:
    watched, left, part = put(uploads.folder, 1), put(uploads.folder, 2), put(uploads.folder, 3, ".part")
    foreign = uploads.folder / "holiday.mp4"
    foreign.write_bytes(b"")
    uploads.clear({str(watched)})
    assert [file.exists() for file in (watched, left, part, foreign)] == [True, False, False, True]


@pytest.mark.parametrize("name", ["holiday.mp4", f"{1:031x}.mp4", f"{1:032x}.tar.gz", f"{1:032X}A.mp4"])
def test_only_uploads_are_removed(uploads: Uploads, name: str) -> None:
    file = uploads.folder / name
    file.write_bytes(b"")
    uploads.remove(str(file))
    assert file.exists()


def test_a_video_elsewhere_is_not_removed_whatever_its_name(uploads: Uploads, tmp_path: Path) -> None:
    mine, other = put(uploads.folder, 1), put(tmp_path, 1)
    for source in (str(other), f"{uploads.folder}/../{other.name}", "rtsp://cam/live", "0", ""):
        uploads.remove(source)
    assert other.exists()
    uploads.remove(str(mine))
    uploads.remove(str(mine))  # gone already
    assert not mine.exists()


def test_room_is_made_by_the_oldest_that_nobody_watches(uploads: Uploads) -> None:
    files = [put(uploads.folder, number) for number in range(1, 7)]
    uploads.make_room({str(files[0])})
    assert [file.exists() for file in files] == [True, False, False, True, True, True]  # one more comes: four


def test_two_may_make_room_at_once(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [put(uploads.folder, number) for number in range(1, 7)]
    listed = list(uploads.folder.iterdir())
    files[0].unlink()  # by the other, between listing and looking
    monkeypatch.setattr(Path, "iterdir", lambda _folder: iter(listed))
    uploads.make_room(set())
    assert [file.exists() for file in files] == [False, False, False, True, True, True]


def parsed(body: bytes, step: int) -> _File:
    """A form that arrives in pieces of `step` bytes."""
    form = _File()
    parser = MultipartParser(b"b", form.callbacks())  # type: ignore[arg-type]
    for start in range(0, len(body), step):
        parser.write(body[start : start + step])
    return form


def part(disposition: str, content: str) -> str:
    return f"--b\r\nContent-Disposition: form-data; {disposition}\r\nContent-Type: text/plain\r\n\r\n{content}\r\n"


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_the_first_file_of_a_form_is_taken_however_it_arrives(step: int) -> None:
    body = part('name="note"', "words") + part('name="file"; filename="yard.mp4"', "first\r\n--not the end")
    body += part('name="file"; filename="two.mp4"', "second") + "--b--\r\n"
    form = parsed(body.encode(), step)
    assert (form.found, form.name, b"".join(form.chunks)) == (True, "yard.mp4", b"first\r\n--not the end")


def test_a_form_without_a_file() -> None:
    form = parsed((part('name="file"', "words") + "--b--\r\n").encode(), 100)
    assert (form.found, form.chunks) == (False, [])

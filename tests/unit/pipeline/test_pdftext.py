"""The text of small PDFs, and the bounds of what is read."""

from __future__ import annotations

import resource
from pathlib import Path

import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from pipeline import pdftext
from pipeline.pdftext import EXIT_UNREADABLE, UnreadableError, main, read_pdf


def write_pdf(path: Path, *pages: str, password: str | None = None) -> Path:
    writer = pypdf.PdfWriter()
    names = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in names.items()})
    for text in pages:
        page = writer.add_blank_page(200, 200)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode())
        fonts = DictionaryObject({NameObject("/F1"): writer._add_object(font)})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = writer._add_object(stream)
    if password is not None:
        writer.encrypt(user_password=password, owner_password="owner", algorithm="RC4-128")  # noqa: S106
    writer.write(path)
    return path


def test_pages_are_apart(tmp_path: Path) -> None:
    assert read_pdf(str(write_pdf(tmp_path / "a.pdf", "Gate five", "", "Noon"))) == "Gate five\n\n\n\nNoon"


def test_one_that_anybody_may_open_is_read(tmp_path: Path) -> None:
    assert read_pdf(str(write_pdf(tmp_path / "a.pdf", "Noon", password=""))) == "Noon"


@pytest.mark.parametrize(
    ("pages", "password", "words"),
    [
        pytest.param(("Noon",), "x", "is encrypted; remove its password first", id="encrypted"),
        pytest.param(("a",) * 4, None, "has 4 pages, allowed: 3; upload a part of it", id="too many pages"),
        pytest.param(("abcdef", "abcdef"), None, "has more than 10 characters; upload a part of it", id="too long"),
    ],
)
def test_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: tuple[str, ...], password: str | None, words: str
) -> None:
    monkeypatch.setattr(pdftext, "MAX_PAGES", 3)
    monkeypatch.setattr(pdftext, "MAX_CHARACTERS", 10)
    with pytest.raises(UnreadableError) as error:
        read_pdf(str(write_pdf(tmp_path / "a.pdf", *pages, password=password)))
    assert str(error.value) == words


@pytest.mark.parametrize("content", [b"", b"%PDF-1.7 and then nothing", b"plain text"])
def test_what_is_no_pdf_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, _limit: limits.append(kind))
    (tmp_path / "a.pdf").write_bytes(content)
    assert main(str(tmp_path / "a.pdf")) == EXIT_UNREADABLE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("is not a PDF that can be read (")
    assert "\n" not in printed.err
    assert limits == [resource.RLIMIT_AS, resource.RLIMIT_CPU]

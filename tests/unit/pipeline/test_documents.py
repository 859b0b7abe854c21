"""Uploaded text: which encodings, names and sizes are taken, and how many documents are kept."""

from __future__ import annotations

import pytest

from pipeline import documents
from pipeline.documents import MAX_DOCUMENTS, Document, DocumentError, Documents


async def nowhere(_document: Document) -> None:
    pass


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param("Größe".encode(), "Größe", id="UTF-8"),
        pytest.param("Größe".encode("utf-8-sig"), "Größe", id="UTF-8 with a mark"),
        pytest.param("Größe".encode("utf-16"), "Größe", id="UTF-16"),
        pytest.param(b"\xfe\xff" + "Größe".encode("utf-16-be"), "Größe", id="UTF-16, big end first"),
        pytest.param(b"  a\0b \n", "a b", id="no NULs, nothing around it"),
    ],
)
async def test_texts(content: bytes, text: str) -> None:
    assert (await Documents(nowhere).add("a.txt", content)).text == text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("Größe".encode("latin-1"), "is neither UTF-8 text nor a PDF", id="Latin-1"),
        pytest.param(b"\xff\xfea", "is neither UTF-8 text nor a PDF", id="half a letter"),
        pytest.param(b" \n\0 ", "holds no text", id="blank"),
        pytest.param(b"", "holds no text", id="empty"),
        pytest.param(b"x" * 21, "21 characters, allowed: 20", id="too long"),
    ],
)
async def test_what_is_no_text_is_not_kept(content: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_CHARACTERS", 20)
    kept = Documents(nowhere)
    with pytest.raises(DocumentError, match=f"^a.txt: {words}"):
        await kept.add("a.txt", content)
    assert kept.all() == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        pytest.param("../../etc/plan.txt", "plan.txt", id="path"),
        pytest.param("C:\\Users\\me\\plan.txt", "plan.txt", id="path of Windows"),
        pytest.param("", "document", id="none"),
        pytest.param("x" * 500, "x" * 120, id="long"),
    ],
)
async def test_names(given: str, name: str) -> None:
    assert (await Documents(nowhere).add(given, b"text")).view().name == name


async def test_a_bounded_number_is_kept_and_each_is_stored() -> None:
    stored: list[Document] = []

    async def keep(document: Document) -> None:
        stored.append(document)

    before = [Document(f"old{number}", "a", "b") for number in range(MAX_DOCUMENTS)]
    kept = Documents(keep, before)
    new = await kept.add("plan.txt", b"Meet at noon.")
    assert stored == [new]
    assert kept.all() == [*before[1:], new]
    assert kept.get("old0") is None
    assert kept.get(new.document_id) is new
    assert (new.view().characters, new.view().estimated_tokens) == (13, 5)

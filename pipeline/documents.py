"""Documents that users attach to a chat: text or PDF, read into text within bounds of size, pages and time.

A PDF is read in a process of its own (`pipeline/pdftext.py`): a hostile one can keep a parser busy or hungry for as
long as it likes, and that process may be killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline import pdftext
from pipeline.api import DocumentView
from pipeline.pdftext import EXIT_UNREADABLE, MAX_CHARACTERS, TIMEOUT_S
from pipeline.tokens import estimate_tokens

MAX_DOCUMENTS = 32
_PDF_START = b"%PDF-"


class DocumentError(ValueError):
    """A document cannot be used; the message is one line that names it and the mend."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document as text."""

    document_id: str
    name: str
    text: str

    def view(self) -> DocumentView:
        """What the page shows of it."""
        return DocumentView(
            document_id=self.document_id,
            name=self.name,
            characters=len(self.text),
            estimated_tokens=estimate_tokens(self.text),
        )


class Documents:
    """The newest uploaded documents, and those of earlier runs that a chat refers to.

    Args:
        keep: Stores a new one; returns when it is stored, or cannot be.
        kept: What is stored already, the one unused longest first.
    """

    def __init__(self, keep: Callable[[Document], Awaitable[object]], kept: Iterable[Document] = ()) -> None:
        self._keep = keep
        self._documents = OrderedDict((document.document_id, document) for document in kept)

    def all(self) -> list[Document]:
        """Every document that is kept."""
        return list(self._documents.values())

    async def add(self, name: str, content: bytes) -> Document:
        """Read an uploaded file.

        Raises:
            DocumentError: It is neither text nor a PDF with text, or is too long.
        """
        name = Path(name.replace("\\", "/")).name[:120] or "document"
        text = await _pdf_text(name, content) if content.lstrip()[:5] == _PDF_START else _plain_text(name, content)
        text = text.replace("\0", " ").strip()
        if not text:
            raise DocumentError(f"{name}: holds no text (a scanned PDF needs text recognition first)")
        if len(text) > MAX_CHARACTERS:
            raise DocumentError(f"{name}: {len(text):,} characters, allowed: {MAX_CHARACTERS:,}; upload a part of it")
        document = Document(uuid.uuid4().hex, name, text)
        self._documents[document.document_id] = document
        await self._keep(document)
        while len(self._documents) > MAX_DOCUMENTS:
            self._documents.popitem(last=False)
        return document

    def get(self, document_id: str) -> Document | None:
        """A document that is still kept."""
        return self._documents.get(document_id)


def _plain_text(name: str, content: bytes) -> str:
    for encoding in ("utf-8-sig", "utf-16") if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8-sig",):
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise DocumentError(f"{name}: is neither UTF-8 text nor a PDF; save it as one of these")


async def _pdf_text(name: str, content: bytes) -> str:
    with tempfile.TemporaryDirectory(prefix="framechat-") as folder:
        file = Path(folder) / "document.pdf"
        await asyncio.to_thread(file.write_bytes, content)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, pdftext.__file__, str(file)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={key: os.environ[key] for key in ("PATH", "LANG", "HOME") if key in os.environ},
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        except TimeoutError:
            raise DocumentError(f"{name}: could not be read within {TIMEOUT_S:.0f} s; upload a part of it") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode == EXIT_UNREADABLE:
        raise DocumentError(f"{name}: {errors.decode('utf-8', 'replace').strip()}")
    if process.returncode != 0:
        raise DocumentError(f"{name}: is not a PDF that can be read")
    return output.decode("utf-8", "replace")

"""Prints the text of a PDF, within bounds; run as a script, in a process of its own that imports nothing of ours."""

from __future__ import annotations

import logging
import resource
import sys

MAX_PAGES = 500
MAX_CHARACTERS = 2_000_000
TIMEOUT_S = 30.0
EXIT_UNREADABLE = 3
_MEMORY_BYTES = 2 * 2**30


class UnreadableError(ValueError):
    """Why the PDF cannot be used, as the end of a sentence that starts with its name."""


def read_pdf(path: str) -> str:
    """The text of every page.

    Raises:
        UnreadableError: Encrypted, too long, or no PDF.
    """
    import pypdf  # noqa: PLC0415 - the service imports this module, not the parser
    from pypdf.errors import PyPdfError  # noqa: PLC0415

    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableError("is encrypted; remove its password first")
        if len(reader.pages) > MAX_PAGES:
            raise UnreadableError(f"has {len(reader.pages)} pages, allowed: {MAX_PAGES}; upload a part of it")
        parts: list[str] = []
        characters = 0
        for page in reader.pages:
            parts.append(page.extract_text())
            characters += len(parts[-1])
            if characters > MAX_CHARACTERS:
                raise UnreadableError(f"has more than {MAX_CHARACTERS:,} characters; upload a part of it")
    except PyPdfError as error:
        cause = " ".join(str(error).split())[:120]
        raise UnreadableError(f"is not a PDF that can be read ({cause})") from error
    return "\n\n".join(parts)


def main(path: str) -> int:
    """Print the text, or the reason on stderr."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # stderr carries our one line
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(TIMEOUT_S), int(TIMEOUT_S) + 1))
    try:
        text = read_pdf(path)
    except UnreadableError as error:
        sys.stderr.write(str(error))
        return EXIT_UNREADABLE
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

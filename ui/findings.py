"""What a check of `framechat doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is; only MISSING keeps the main job from running."""

    OK = "ok"
    NOTE = "note"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table."""

    area: str
    level: Level
    text: str
    mend: str = ""


def ok(area: str, text: str) -> Finding:
    """All is well."""
    return Finding(area, Level.OK, text)


def note(area: str, text: str, mend: str = "") -> Finding:
    """Runs all the same, but not as well as it could."""
    return Finding(area, Level.NOTE, text, mend)


def last_line(text: str) -> str:
    """Of what a program wrote, the line that mostly tells why it failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def missing(area: str, text: str, mend: str) -> Finding:
    """The main job cannot run like this."""
    return Finding(area, Level.MISSING, text, mend)

"""Camera addresses: what kind of source one is, and keeping passwords out of sight."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

SourceKind = Literal["webcam", "url", "pictures", "file", "sample"]
SAMPLES = ("sample", "sample-photos")
SCHEMES = ("rtsp", "rtsps", "http", "https")

_SCHEME = re.compile(r"^([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# user:something@ - but not host:port/ of an address that has an @ further on, unless a host seems to follow that one
_USER = r"(?!\[?[\w.:-]*\]?:\d+/)[^@]*:[^@]*@"
_USER_AND_DIGITS = r"[\w.-]*:\d+/[^?]*@(?:[^/@?]+[/:]|\d+(?:\.\d+){3}$)"
_PASSWORD = re.compile(rf"(?i)^[a-z][a-z0-9+.-]*://(?:{_USER}|{_USER_AND_DIGITS})")
# Recorders have them in the path, joined by underscores; other secrets have such common names that only queries count.
_PASSWORDS = r"(?<![a-z0-9])(?:user|usr|login|admin)?(?:password|passwd|pass|pas|pwd|psw|pw)="
_OTHERS = r"[?&;](?:(?:[a-z]+_)?token|secret|api_?key|key|auth|sig|signature)="
_NONE = r"(?!(?:\{password\})?(?:[&;]|_[a-z]+=|$))"  # left empty, or a placeholder
_SECRET = re.compile(rf"(?i)({_PASSWORDS}|{_OTHERS}){_NONE}([^&\s'\"]+)")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s'\"<>]*@")
_PICTURE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})


def holds_password(source: str) -> bool:
    """Whether an address carries a password, before its host, in its path or in its query."""
    return bool(_PASSWORD.match(source)) or ("://" in source and bool(_SECRET.search(source)))


def mask_source(text: str) -> str:
    """Any text with whatever looks like credentials in an address replaced by `***`.

    User names go with the passwords. When in doubt (an `@` in a path) too much is hidden rather than too little.
    """
    return _SECRET.sub(r"\1***", _USERINFO.sub(r"\1***@", text))


def kind_of(source: str) -> SourceKind:
    """What `source` is, from its looks and the file system.

    Raises:
        ValueError: It is an address of a kind that is not read.
    """
    if source in SAMPLES:
        return "sample"
    if _is_webcam(source):
        return "webcam"
    scheme = _SCHEME.match(source)
    if scheme:
        if scheme.group(1).lower() not in SCHEMES:
            raise ValueError(f"{scheme.group(1)}:// is not read, allowed: {', '.join(f'{s}://' for s in SCHEMES)}")
        return "url"
    path = Path(source)
    return "pictures" if path.is_dir() or path.suffix.lower() in _PICTURE_SUFFIXES else "file"


def is_local(source: str) -> bool:
    """Whether it is a file, folder, picture or sample, from its looks alone: a file system may not answer."""
    return not (_is_webcam(source) or _SCHEME.match(source))


def _is_webcam(source: str) -> bool:
    return source.isdigit() or source.startswith("/dev/")

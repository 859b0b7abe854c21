"""What every test relies on: defaults that the user's own settings cannot change, and no model hub."""

from __future__ import annotations

import os

import pytest
from PIL import Image

from pipeline.config import ENV_PREFIX, Config

os.environ["HF_HUB_OFFLINE"] = "1"
for _name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
    del os.environ[_name]

_OPEN_PICTURE = Image.open


@pytest.fixture(autouse=True)
def pillow_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing ultralytics replaces `Image.open` for the whole process; the product keeps it to one of its own."""
    monkeypatch.setattr(Image, "open", _OPEN_PICTURE)


@pytest.fixture
def config() -> Config:
    return Config()

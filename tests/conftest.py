"""What every test relies on: defaults that the user's own settings cannot change, and no model hub."""

from __future__ import annotations

import os

import pytest

from pipeline.config import ENV_PREFIX, Config

os.environ["HF_HUB_OFFLINE"] = "1"
for _name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
    del os.environ[_name]


@pytest.fixture
def config() -> Config:
    return Config()

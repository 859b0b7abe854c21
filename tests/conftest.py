"""What every test relies on: defaults that the user's own settings cannot change, and no model hub."""

from __future__ import annotations

import os

import pytest
from PIL import Image

from pipeline.config import ENV_PREFIX, Config
from serving.compiled import is_compiled
from serving.simulate import EngineSettings, simulate
from serving.steptime import FEATURE_NAMES, StepTime
from serving.workload import PlannedRequest

os.environ["HF_HUB_OFFLINE"] = "1"
for _name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
    del os.environ[_name]

_OPEN_PICTURE = Image.open


def pytest_configure(config: pytest.Config) -> None:
    """Compile the simulator before a parallel run begins: each of its processes would do it, all at once."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput") and not is_compiled():
        engine = EngineSettings(budget_tokens=64, cache_blocks=100)
        simulate([PlannedRequest(0, "chat", 0.0, 8, 2)], engine, StepTime((0.01,) * len(FEATURE_NAMES), source="test"))


@pytest.fixture(autouse=True)
def pillow_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing ultralytics replaces `Image.open` for the whole process; the product keeps it to one of its own."""
    monkeypatch.setattr(Image, "open", _OPEN_PICTURE)


@pytest.fixture
def config() -> Config:
    return Config()

"""What the unit tests share."""

from __future__ import annotations

import pytest

from serving.compiled import is_compiled
from serving.simulate import EngineSettings, simulate
from serving.steptime import FEATURE_NAMES, StepTime
from serving.workload import PlannedRequest


def pytest_configure(config: pytest.Config) -> None:
    """Compile the simulator before a parallel run begins: each of its processes would do it, all at once."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput") and not is_compiled():
        engine = EngineSettings(budget_tokens=64, cache_blocks=100)
        simulate([PlannedRequest(0, "chat", 0.0, 8, 2)], engine, StepTime((0.01,) * len(FEATURE_NAMES), source="test"))

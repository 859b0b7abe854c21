"""One real vLLM server with the sample model for the whole run of the integration tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from serving.client import ModelClient
from tests.integration.served import ServedModel, served

# A request may say how its picture is prepared: one is measured as one tile.
TRUSTING = 'serving.server.extra_args=["--trust-request-mm-kwargs"]'


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """configs/sample.yaml's server on a free port, with its step log. Do not kill it: `served` makes one to kill."""
    with served(tmp_path_factory.mktemp("model-server"), TRUSTING) as running:
        yield running


@pytest.fixture
def endpoint(model_server: ServedModel) -> str:
    """Base URL of the session's server, ending in /v1."""
    return model_server.endpoint


@pytest.fixture
async def client(model_server: ServedModel) -> AsyncIterator[ModelClient]:
    """A client of the session's server."""
    client = ModelClient(model_server.endpoint, model=None, timeouts=model_server.config.serving.timeouts)
    try:
        yield client
    finally:
        await client.close()

from __future__ import annotations

import pytest

from pipeline.config import load_config
from ui.chat_routes import ServiceRoute
from ui.service_client import ServiceUnreachableError


@pytest.mark.parametrize(
    ("host", "address"),
    [
        pytest.param("127.0.0.1", "http://127.0.0.1:8600", id="IPv4"),
        pytest.param("0.0.0.0", "http://127.0.0.1:8600", id="every address"),  # noqa: S104 - not bound
        pytest.param("::1", "http://[::1]:8600", id="IPv6"),
        pytest.param("::", "http://[::1]:8600", id="every address, IPv6"),
    ],
)
def test_where_the_service_is_looked_for(host: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Nobody:
        def __init__(self, base_url: str) -> None:
            asked.append(base_url)

        def status(self) -> None:
            raise ServiceUnreachableError("nobody there")

        def close(self) -> None:
            pass

    monkeypatch.setattr("ui.chat_routes.ServiceClient", Nobody)
    assert ServiceRoute.find(load_config(None, environ={}, overrides=[f"service.host='{host}'"])) is None
    assert asked == [address]

from __future__ import annotations

import httpx
import pytest

from serving.address import STRAIGHT_TO_LOOPBACK, is_loopback
from tests.scripted_server import Script, ScriptedServer


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("model.localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", True),  # noqa: S104 - compared, not bound
        ("192.168.1.4", False),
        ("localhost.example", False),
        ("model.example", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_proxy_is_not_asked_for_this_machine(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ScriptedServer(Script()) as server, httpx.Client(mounts=STRAIGHT_TO_LOOPBACK) as client:
        assert client.get(f"http://{host}:{server.port}/").status_code == 200
        with pytest.raises(httpx.ConnectError):
            client.get("http://model.example/")  # through the proxy, where nobody listens

from __future__ import annotations

from pathlib import Path

import pytest

from serving.status import ServerStatus, read_status, write_status

STATUS = ServerStatus(
    state="starting", detail="loading weights: 50%", endpoint="http://127.0.0.1:8000/v1", attached=False, since_s=12.5
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    write_status(path, STATUS)
    assert read_status(path) == STATUS
    assert [item.name for item in tmp_path.iterdir()] == ["server.json"], "no temporary file stays"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="no file"),
        pytest.param("", id="empty"),
        pytest.param("{", id="cut"),
        pytest.param("[]", id="a list"),
        pytest.param('{"state": "ready"}', id="keys missing"),
        pytest.param('{"unknown": 1}', id="unknown keys"),
    ],
)
def test_nothing_readable(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "server.json"
    if content is not None:
        path.write_text(content)
    assert read_status(path) is None

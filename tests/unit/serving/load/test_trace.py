from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from serving.load.trace import Trace, TraceError, read_trace, window
from serving.workload import Arrivals, ClassLoad, Workload, draw


def load(duration_s: float = 10) -> Workload:
    chat = ClassLoad(arrivals=Arrivals(process="constant", rate_per_s=1))
    return Workload(duration_s=duration_s, classes={"camera": ClassLoad(), "chat": chat})


def due(workload: Workload, name: str) -> list[float]:
    return [request.due_s for request in draw(workload) if request.traffic_class == name]


def test_a_comparisons_requests_are_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    table = pa.table({"traffic_class": ["chat", "camera", "chat"], "due_s": [101.0, 100.0, 107.5], "other": [1, 2, 3]})
    pq.write_table(table, path)
    assert read_trace(path) == Trace({"camera": (0.0,), "chat": (1.0, 7.5)})


def test_what_watch_wrote_is_a_trace_of_the_camera(tmp_path: Path) -> None:
    path = tmp_path / "people.jsonl"
    lines = [
        {"id": "a", "due_s": 52.0},
        {"id": "b", "due_s": 50.0},
        {"id": "c", "due_s": 53.0, "traffic_class": "chat"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    assert read_trace(path) == Trace({"camera": (0.0, 2.0), "chat": (3.0,)})


def test_each_round_replays_its_own_stretch_and_then_starts_over() -> None:
    trace = Trace({"camera": (0.0, 4.0, 11.0, 15.0, 29.0)})
    found = [due(window(load(), trace, number), "camera") for number in range(4)]
    assert found == [[0.0, 4.0], [1.0, 5.0], [0.0, 4.0], [1.0, 5.0]]
    assert due(window(load(), trace, 0), "chat") == [float(second) for second in range(10)]


def test_a_stretch_without_requests_is_empty() -> None:
    trace = Trace({"camera": (0.0, 12.0, 21.0)})
    assert due(window(load(5), trace, 1), "camera") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("none.jsonl", None, "cannot be read", id="missing"),
        pytest.param("bad.jsonl", b"{", "is no trace", id="not JSON"),
        pytest.param("list.jsonl", b"[1]", "is no trace", id="not objects"),
        pytest.param("other.jsonl", b'{"a": 1}', "is no trace", id="no times"),
        pytest.param("empty.jsonl", b"\n", "holds no request", id="empty"),
        pytest.param("bad.parquet", b"nothing", "is no trace", id="not parquet"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_class_that_the_load_lacks_is_named() -> None:
    with pytest.raises(TraceError, match=r"document.*camera, chat"):
        window(load(), Trace({"document": (0.0,)}), 0)

"""Arrivals that were recorded once, replayed: of a comparison's or the store's requests, or of `framechat watch`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from serving.workload import Arrivals, Workload

_WATCHED_CLASS = "camera"


class TraceError(ValueError):
    """The trace cannot be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class Trace:
    """When requests of each class were due, seconds from the first, ascending."""

    times_s: dict[str, tuple[float, ...]]

    @property
    def length_s(self) -> float:
        """From the first request to the last."""
        return max(times[-1] for times in self.times_s.values())


def read_trace(path: Path) -> Trace:
    """Read a requests.parquet (columns `traffic_class`, `due_s`), or a JSONL file.

    A line of the JSONL file is an object with `due_s` and, where it is not a camera's, `traffic_class`; such as
    `framechat watch --jsonl` writes.

    Raises:
        TraceError: It cannot be read, or holds no request.
    """
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path, columns=["traffic_class", "due_s"])
            rows = list(zip(table["traffic_class"].to_pylist(), table["due_s"].to_pylist(), strict=True))
        else:
            rows = list(_jsonl(path))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise TraceError(
            f"{path} is no trace ({' '.join(str(error).split())[:120]}), allowed: a requests.parquet, or lines of JSON "
            "with due_s"
        ) from error
    if not rows:
        raise TraceError(f"{path} holds no request")
    first = min(due_s for _, due_s in rows)
    found: dict[str, list[float]] = {}
    for name, due_s in sorted(rows, key=lambda row: row[1]):
        found.setdefault(name, []).append(due_s - first)
    return Trace({name: tuple(times) for name, times in found.items()})


def _jsonl(path: Path) -> Iterable[tuple[str, float]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            item = json.loads(line)
            yield str(item.get("traffic_class", _WATCHED_CLASS)), float(item["due_s"])


def window(workload: Workload, trace: Trace, number: int) -> Workload:
    """The load with the arrivals of stretch `number` of the trace, each `duration_s` long; from its end on it starts
    over. Classes that the trace lacks keep their own arrivals.

    Raises:
        TraceError: The trace has a class that the load lacks.
    """
    unknown = sorted(set(trace.times_s) - set(workload.classes))
    if unknown:
        raise TraceError(
            f"the trace has requests of class {', '.join(unknown)}, allowed: the load's ({', '.join(workload.classes)})"
        )
    stretches = max(1, int(trace.length_s // workload.duration_s))
    start_s = number % stretches * workload.duration_s
    classes = dict(workload.classes)
    for name, times in trace.times_s.items():
        inside = tuple(at_s - start_s for at_s in times if start_s <= at_s < start_s + workload.duration_s)
        # A replay needs a time; one behind the end draws nothing.
        arrivals = Arrivals(process="replay", times_s=inside or (workload.duration_s,))
        classes[name] = classes[name].model_copy(update={"arrivals": arrivals})
    return workload.model_copy(update={"classes": classes})

"""The ledger of both traffic classes: pooled TTFT, ITL and TPOT over a sliding window, stalls, counters, gauges.

What a percentile is here: the samples of a class in the window are pooled and sorted, and the q-th percentile is read
at rank q (n - 1) between neighbours, linearly (`numpy.quantile`'s default, as in vLLM's own benchmark, so that figures
can be laid side by side). TTFT, ITL and TPOT are three pools; nothing here adds or averages across them.

Samples count when they happen, not when their request ends: a running answer's gaps move the figures at once. A gap is
one ITL sample, whatever its number of tokens; the same gaps divided by their tokens are a pool of their own. A request
that failed or was cancelled after some tokens keeps the samples it made. One that never got a token has no TTFT and
cannot be in its percentiles, so read them together with the counters beside them.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from serving.config import ClassConfig
from serving.records import Gap, Outcome, RequestRecord, TokenEvent, now_s

Kind = Literal["ttft", "itl"]
_Floats = npt.NDArray[np.float64]

_GAPS_KEPT = 1 << 17  # a class; at 400 tokens/s that is 5 minutes, 4 MiB
_REQUESTS_KEPT = 1 << 14
_OPEN_KEPT = 4096  # begun and never finished is a bug elsewhere; memory stays bounded all the same
_REASONS_KEPT = 64
OTHER = "other reasons"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """One pool in the window, seconds; every figure is None while there is no sample."""

    count: int = 0
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None


def percentiles(values_s: Iterable[float]) -> Percentiles:
    """Percentiles of any samples, by the definition at the top of this module."""
    values = np.fromiter(values_s, dtype=np.float64)
    if values.size == 0:
        return Percentiles()
    p50, p95, p99, most = (float(value) for value in np.quantile(values, (0.5, 0.95, 0.99, 1.0)))
    return Percentiles(int(values.size), p50, p95, p99, most)


@dataclass(frozen=True, slots=True)
class Sample:
    """One TTFT or ITL sample. `at_s` is when it ended: the token's arrival."""

    at_s: float
    traffic_class: str
    kind: Kind
    value_s: float
    stall: bool = False


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One traffic class.

    Attributes:
        ttft, itl, tpot: Pools of the window.
        itl_per_token: The gaps, each divided by its tokens: what a reader of text feels where chunks carry several.
        covered_s: How far back the pools really reach; less than the window when more came than is kept.
        ttft_slo_p95_s, itl_slo_p99_s: The objectives.
        stalls: Gaps in the window longer than the ITL objective.
        stalls_total, done, failed, cancelled, skipped: Since the start. `skipped` is by reason.
        failures: Failed requests by kind of error; cancellations: cancelled ones by reason. Since the start.
        waiting: Due and not yet sent. in_flight: Sent and not yet ended.
    """

    traffic_class: str
    ttft: Percentiles
    itl: Percentiles
    itl_per_token: Percentiles
    tpot: Percentiles
    covered_s: float
    ttft_slo_p95_s: float
    itl_slo_p99_s: float
    stalls: int
    stalls_total: int
    waiting: int
    in_flight: int
    done: int
    failed: int
    cancelled: int
    skipped: dict[str, int]
    failures: dict[str, int]
    cancellations: dict[str, int]


class _Pool:
    """The newest samples, each a row of floats that starts with its time; the oldest are overwritten.

    Rows come nearly in order of time, but not quite: threads race to the lock.
    """

    def __init__(self, capacity: int, columns: int) -> None:
        self._capacity = capacity
        self._rows: _Floats = np.empty((min(capacity, 1024), columns))
        self._count = 0

    def add(self, *row: float) -> None:
        if self._count == len(self._rows) < self._capacity:
            bigger = np.empty((min(self._capacity, 2 * len(self._rows)), self._rows.shape[1]))
            bigger[: self._count] = self._rows
            self._rows = bigger
        self._rows[self._count % self._capacity] = row
        self._count += 1

    def since(self, start_s: float) -> _Floats:
        """Rows of `start_s` and later, shape (n, columns), in no particular order."""
        kept = self._rows[: min(self._count, self._capacity)]
        return kept[kept[:, 0] >= start_s]

    def lost_until(self) -> float | None:
        """Samples before this time may be overwritten; None while every one is kept."""
        return float(self._rows[:, 0].min()) if self._count > self._capacity else None


@dataclass(slots=True)
class _Open:
    traffic_class: str
    due_s: float
    sent_s: float | None = None
    last_token_s: float | None = None
    gaps: int = 0


class _Book:
    """One class's samples and counters. The ledger's lock is held by whoever calls."""

    def __init__(self, name: str, config: ClassConfig) -> None:
        self.name = name
        self.ttft_slo_s = config.ttft_p95_ms / 1000
        self.itl_slo_s = config.itl_p99_ms / 1000
        self.ttft = _Pool(_REQUESTS_KEPT, 2)  # end, value
        self.tpot = _Pool(_REQUESTS_KEPT, 2)  # end, value
        self.gaps = _Pool(_GAPS_KEPT, 3)  # end, duration, tokens
        self.stalls = 0
        self.done = self.failed = self.cancelled = 0
        self.skipped: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.cancellations: Counter[str] = Counter()

    def add_gap(self, end_s: float, duration_s: float, tokens: int) -> None:
        self.gaps.add(end_s, duration_s, tokens)
        self.stalls += duration_s > self.itl_slo_s

    def snapshot(self, start_s: float, at_s: float, opened: Iterable[_Open]) -> _Snapshot:
        mine = [request for request in opened if request.traffic_class == self.name]
        lost = [lost for pool in (self.ttft, self.gaps) if (lost := pool.lost_until()) is not None]
        waiting = sum(request.sent_s is None for request in mine)
        counters = {
            "traffic_class": self.name,
            "covered_s": at_s - max([start_s, *lost]),
            "ttft_slo_p95_s": self.ttft_slo_s,
            "itl_slo_p99_s": self.itl_slo_s,
            "stalls_total": self.stalls,
            "waiting": waiting,
            "in_flight": len(mine) - waiting,
            "done": self.done,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "skipped": dict(self.skipped),
            "failures": dict(self.failures),
            "cancellations": dict(self.cancellations),
        }
        return _Snapshot(counters, self.ttft.since(start_s), self.gaps.since(start_s), self.tpot.since(start_s))


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Copies taken under the lock, so that sorting them keeps no token waiting."""

    counters: dict[str, Any]
    ttft: _Floats
    gaps: _Floats
    tpot: _Floats

    def summary(self) -> ClassSummary:
        durations_s = self.gaps[:, 1]
        return ClassSummary(
            ttft=percentiles(self.ttft[:, 1]),
            itl=percentiles(durations_s),
            itl_per_token=percentiles(durations_s / self.gaps[:, 2]),
            tpot=percentiles(self.tpot[:, 1]),
            stalls=int((durations_s > self.counters["itl_slo_p99_s"]).sum()),
            **self.counters,
        )


class Ledger:
    """Keeps account of every request of every class. Every method may be called from any thread.

    Args:
        classes: The traffic classes and their objectives; a request of another class is a ValueError.
        window_s: How far back percentiles and stalls reach.
    """

    def __init__(self, classes: Mapping[str, ClassConfig], window_s: float) -> None:
        self.window_s = window_s
        self._lock = threading.Lock()
        self._books = {name: _Book(name, config) for name, config in classes.items()}
        self._open: OrderedDict[str, _Open] = OrderedDict()

    def begin(self, request_id: str, traffic_class: str, due_s: float) -> None:
        """A request is due; it counts as waiting until it is sent."""
        self._book(traffic_class)
        with self._lock:
            self._open[request_id] = _Open(traffic_class, due_s)
            while len(self._open) > _OPEN_KEPT:
                self._open.popitem(last=False)

    def sent(self, request_id: str, at_s: float) -> None:
        """A request that was begun has been handed to the HTTP client."""
        with self._lock:
            request = self._open.get(request_id)
            if request is not None:
                request.sent_s = at_s

    def token(self, request_id: str, event: TokenEvent) -> None:
        """A token-bearing chunk of a request that was begun has arrived. Text without a token is no sample."""
        if event.tokens <= 0:
            return
        with self._lock:
            request = self._open.get(request_id)
            if request is None:
                return
            book = self._books[request.traffic_class]
            if request.last_token_s is None:
                book.ttft.add(event.at_s, event.at_s - request.due_s)
            else:
                book.add_gap(event.at_s, event.at_s - request.last_token_s, event.tokens)
                request.gaps += 1
            request.last_token_s = event.at_s

    def finish(self, record: RequestRecord) -> None:
        """A request has ended. What `token` has not told of it (nothing, if it never was begun) is taken from here."""
        book = self._book(record.traffic_class)
        with self._lock:
            request = self._open.pop(record.request_id, None) or _Open(record.traffic_class, record.due_s)
            if request.last_token_s is None and record.first_token_s is not None and record.ttft_s is not None:
                book.ttft.add(record.first_token_s, record.ttft_s)
            for gap in record.gaps[request.gaps :]:
                book.add_gap(gap.end_s, gap.duration_s, gap.tokens)
            if record.tpot_s is not None and record.last_token_s is not None:
                book.tpot.add(record.last_token_s, record.tpot_s)
            match record.outcome:
                case Outcome.DONE:
                    book.done += 1
                case Outcome.FAILED:
                    book.failed += 1
                    book.failures[record.error.kind.value if record.error is not None else OTHER] += 1
                case Outcome.CANCELLED:
                    book.cancelled += 1
                    _count(book.cancellations, record.reason)
                case Outcome.SKIPPED:
                    _count(book.skipped, record.reason)

    def traffic_class_of(self, request_id: str) -> str | None:
        """The class of a request that was begun and has not ended."""
        with self._lock:
            request = self._open.get(request_id)
            return None if request is None else request.traffic_class

    def skip(self, traffic_class: str, reason: str) -> None:
        """A request that was never begun will not be made, and why."""
        book = self._book(traffic_class)
        with self._lock:
            _count(book.skipped, reason)

    def summaries(self, at_s: float | None = None, window_s: float | None = None) -> list[ClassSummary]:
        """Every class over the window (the ledger's, or `window_s`) ending at `at_s` (now), in the config's order."""
        at_s = now_s() if at_s is None else at_s
        start_s = at_s - (self.window_s if window_s is None else window_s)
        with self._lock:
            opened = list(self._open.values())
            snapshots = [book.snapshot(start_s, at_s, opened) for book in self._books.values()]
        return [snapshot.summary() for snapshot in snapshots]

    def timeline(self, seconds: float, at_s: float | None = None, *, most: int = 2000) -> list[Sample]:
        """Samples of the last `seconds`, oldest first.

        Where there are more than `most`, time is cut into slices and each slice keeps, of every class and kind, only
        its largest sample: a stall is never thinned away.
        """
        at_s = now_s() if at_s is None else at_s
        start_s = at_s - seconds
        series: list[tuple[_Book, Kind, _Floats]] = []
        with self._lock:
            for book in self._books.values():
                series += [(book, "ttft", book.ttft.since(start_s)), (book, "itl", book.gaps.since(start_s))]
        if sum(len(rows) for _, _, rows in series) > most:
            slices = max(1, most // len(series))
            series = [(book, kind, _largest(rows, start_s, seconds, slices)) for book, kind, rows in series]
        samples = [
            Sample(float(row[0]), book.name, kind, float(row[1]), kind == "itl" and bool(row[1] > book.itl_slo_s))
            for book, kind, rows in series
            for row in rows
        ]
        return sorted(samples, key=lambda sample: sample.at_s)

    def _book(self, traffic_class: str) -> _Book:
        book = self._books.get(traffic_class)
        if book is None:
            raise ValueError(f"traffic class is {traffic_class!r}, allowed: {', '.join(self._books)}")
        return book


def _count(counter: Counter[str], reason: str | None) -> None:
    """Count a reason; however many different ones there are, memory stays bounded."""
    key = reason or OTHER
    counter[key if key in counter or len(counter) < _REASONS_KEPT else OTHER] += 1


def _largest(rows: _Floats, start_s: float, seconds: float, slices: int) -> _Floats:
    """Of each slice of time the row with the largest value."""
    index = np.clip((rows[:, 0] - start_s) / seconds * slices, 0, slices - 1).astype(np.int64)
    order = np.lexsort((-rows[:, 1], index))
    _, first = np.unique(index[order], return_index=True)
    chosen: _Floats = rows[order[first]]
    return chosen


def gap_percentiles(gaps: Iterable[Gap]) -> Percentiles:
    """ITL percentiles of one request, every gap a sample."""
    return percentiles(gap.duration_s for gap in gaps)

"""The ledger: exact figures from known samples, live, over a window, in bounded memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from serving import latency
from serving.config import ClassConfig
from serving.latency import OTHER, ClassSummary, Ledger, Percentiles, gap_percentiles, percentiles
from serving.records import ErrorKind, Gap, Outcome, RequestError, RequestRecord, TokenEvent

CLASSES = {
    "camera": ClassConfig(ttft_p95_ms=10_000, itl_p99_ms=1_000, max_tokens=48),
    "chat": ClassConfig(ttft_p95_ms=2_000, itl_p99_ms=200, max_tokens=256),
}


def ledger(window_s: float = 100) -> Ledger:
    return Ledger(CLASSES, window_s)


def record(
    *arrivals: tuple[float, int],
    request_id: str = "r",
    traffic_class: str = "chat",
    due_s: float = 0.0,
    outcome: Outcome = Outcome.DONE,
    error: RequestError | None = None,
    reason: str | None = None,
) -> RequestRecord:
    """A request whose token-bearing chunks came at these times with so many tokens."""
    times = [at_s for at_s, _ in arrivals]
    gaps = tuple(
        Gap(at_s, at_s - before_s, tokens) for before_s, (at_s, tokens) in zip(times, arrivals[1:], strict=False)
    )
    return RequestRecord(
        request_id=request_id,
        traffic_class=traffic_class,
        model="m",
        due_s=due_s,
        finished_s=times[-1] if times else due_s,
        outcome=outcome,
        sent_s=due_s,
        first_token_s=times[0] if times else None,
        last_token_s=times[-1] if times else None,
        gaps=gaps,
        completion_tokens=sum(tokens for _, tokens in arrivals),
        error=error,
        reason=reason,
    )


def of(name: str, book: Ledger, at_s: float = 50.0) -> ClassSummary:
    return next(summary for summary in book.summaries(at_s) if summary.traffic_class == name)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([], Percentiles(), id="none"),
        pytest.param([3.0], Percentiles(1, 3.0, 3.0, 3.0, 3.0), id="one"),
        pytest.param([1.0, 2.0], Percentiles(2, 1.5, 1.95, 1.99, 2.0), id="two-between-neighbours"),
        pytest.param([float(n) for n in range(101)], Percentiles(101, 50, 95, 99, 100), id="rank-falls-on-a-sample"),
        pytest.param([5.0, 1.0, 3.0], Percentiles(3, 3.0, 4.8, 4.96, 5.0), id="any-order"),
    ],
)
def test_percentile_definition(values: list[float], expected: Percentiles) -> None:
    found = percentiles(values)
    assert found.count == expected.count
    for name in ("p50_s", "p95_s", "p99_s", "max_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_one_long_gap_shows_in_p99_and_max_not_in_p50() -> None:
    gaps = [Gap(float(n), 0.03, 1) for n in range(59)] + [Gap(60.0, 4.0, 1)]
    found = gap_percentiles(gaps)
    assert (found.count, found.p50_s, found.p95_s, found.max_s) == (60, 0.03, 0.03, 4.0)
    assert found.p99_s == pytest.approx(0.03 + 0.41 * (4.0 - 0.03))  # rank 0.99 * 59 = 58.41


def test_known_requests_give_exactly_those_figures() -> None:
    book = ledger()
    book.finish(record((1.0, 1), (1.125, 1), (1.625, 4), request_id="a"))
    book.finish(record((13.0, 1), (13.25, 1), request_id="b", due_s=10.0))
    chat = of("chat", book)
    ttft = (chat.ttft.p50_s, chat.ttft.p95_s, chat.ttft.p99_s, chat.ttft.max_s)
    assert ttft == pytest.approx((2.0, 2.9, 2.98, 3.0))
    assert (chat.itl.count, chat.itl.p50_s, chat.itl.max_s) == (3, 0.25, 0.5)
    assert (chat.itl_per_token.count, chat.itl_per_token.p50_s, chat.itl_per_token.max_s) == (3, 0.125, 0.25)
    assert (chat.tpot.p50_s, chat.tpot.max_s) == pytest.approx((0.1875, 0.25))  # of 0.625 / 5 and 0.25 / 1
    assert (chat.stalls, chat.stalls_total, chat.done) == (2, 2, 2)


def test_classes_are_apart() -> None:
    book = ledger()
    book.finish(record((5.0, 1), (5.5, 1), traffic_class="camera"))
    camera, chat = of("camera", book), of("chat", book)
    assert (camera.ttft.max_s, camera.itl.max_s, camera.stalls, camera.done) == (5.0, 0.5, 0, 1)  # its SLO is 1 s
    assert (chat.ttft.count, chat.itl.count, chat.tpot.count, chat.done) == (0, 0, 0, 0)
    assert [summary.traffic_class for summary in book.summaries(50.0)] == ["camera", "chat"]
    assert (chat.ttft_slo_p95_s, chat.itl_slo_p99_s) == (2.0, 0.2)


def test_a_running_request_counts_at_once_and_only_once() -> None:
    book = ledger()
    book.begin("r", "chat", due_s=1.0)
    assert (of("chat", book).waiting, of("chat", book).in_flight) == (1, 0)
    book.sent("r", 1.5)
    assert (of("chat", book).waiting, of("chat", book).in_flight) == (0, 1)
    book.token("r", TokenEvent(2.0, 1, "a"))
    assert of("chat", book).ttft.p50_s == 1.0
    book.token("r", TokenEvent(2.0, 0, "thought", reasoning=True))  # text without a token is no sample
    book.token("r", TokenEvent(2.5, 2, "b"))
    running = of("chat", book)
    assert (running.itl.count, running.itl.max_s, running.stalls) == (1, 0.5, 1)
    book.finish(record((2.0, 1), (2.5, 2), due_s=1.0))
    ended = of("chat", book)
    assert (ended.ttft.count, ended.itl.count, ended.tpot.count) == (1, 1, 1)
    assert (ended.waiting, ended.in_flight, ended.done) == (0, 0, 1)


def test_finish_adds_what_was_not_told_live() -> None:
    book = ledger()
    book.begin("r", "chat", due_s=1.0)
    book.token("r", TokenEvent(2.0, 1, "a"))
    book.token("r", TokenEvent(2.5, 1, "b"))
    book.finish(record((2.0, 1), (2.5, 1), (2.75, 1), due_s=1.0))
    assert (of("chat", book).ttft.count, of("chat", book).itl.count) == (1, 2)


@pytest.mark.parametrize(
    ("outcome", "arrivals", "itl", "ttft"),
    [
        pytest.param(Outcome.FAILED, [(1.0, 1), (1.5, 1)], 1, 1, id="failed-after-tokens"),
        pytest.param(Outcome.CANCELLED, [(1.0, 1)], 0, 1, id="cancelled-after-one"),
        pytest.param(Outcome.FAILED, [], 0, 0, id="failed-without-a-token"),
        pytest.param(Outcome.SKIPPED, [], 0, 0, id="skipped"),
    ],
)
def test_unfinished_requests_keep_the_samples_they_made(
    outcome: Outcome, arrivals: list[tuple[float, int]], itl: int, ttft: int
) -> None:
    book = ledger()
    book.finish(record(*arrivals, outcome=outcome, reason="why"))
    assert (of("chat", book).itl.count, of("chat", book).ttft.count) == (itl, ttft)


def test_counters_by_reason() -> None:
    book = ledger()
    timeout = RequestError(ErrorKind.TIMEOUT_GAP, "late")
    book.finish(record(request_id="1", outcome=Outcome.FAILED, error=timeout))
    book.finish(record(request_id="2", outcome=Outcome.CANCELLED, reason="person left"))
    book.begin("3", "chat", 1.0)
    book.finish(record(request_id="3", outcome=Outcome.SKIPPED, reason="queue full"))
    book.skip("chat", "queue full")
    book.skip("chat", "too small")
    chat = of("chat", book)
    assert (chat.done, chat.failed, chat.cancelled) == (0, 1, 1)
    assert chat.failures == {"timeout_gap": 1}
    assert chat.cancellations == {"person left": 1}
    assert chat.skipped == {"queue full": 2, "too small": 1}
    assert (chat.waiting, chat.in_flight) == (0, 0)


def test_the_window_slides_and_the_counters_stay() -> None:
    book = ledger(window_s=10)
    book.finish(record((1.0, 1), (2.0, 1), request_id="old"))
    book.finish(record((20.0, 1), (20.1, 1), request_id="new", due_s=19.5))
    chat = of("chat", book, at_s=25.0)
    assert (chat.ttft.count, chat.ttft.max_s) == (1, 0.5)
    assert (chat.itl.count, chat.stalls, chat.stalls_total, chat.done) == (1, 0, 1, 2)
    assert chat.covered_s == 10
    wide = next(item for item in book.summaries(25.0, window_s=100) if item.traffic_class == "chat")
    assert (wide.ttft.count, wide.stalls) == (2, 1)


def test_a_gap_of_exactly_the_objective_is_no_stall() -> None:
    book = Ledger({"chat": ClassConfig(ttft_p95_ms=1, itl_p99_ms=250, max_tokens=1)}, 100)
    book.finish(record((1.0, 1), (1.25, 1), (1.75, 1)))
    assert book.summaries(50.0)[0].stalls == 1


def test_timeline_is_in_order_and_marks_stalls() -> None:
    book = ledger()
    book.finish(record((41.0, 1), (41.1, 1), (41.5, 1), due_s=40.0))
    book.finish(record((41.05, 1), traffic_class="camera", request_id="c", due_s=39.0))
    book.finish(record((5.0, 1), request_id="old"))
    found = book.timeline(20.0, 50.0)
    assert [(item.at_s, item.traffic_class, item.kind, item.stall) for item in found] == [
        (41.0, "chat", "ttft", False),
        (41.05, "camera", "ttft", False),
        (41.1, "chat", "itl", False),
        (41.5, "chat", "itl", True),
    ]
    assert found[-1].value_s == pytest.approx(0.4)


def test_a_crowded_timeline_keeps_its_stalls() -> None:
    book = ledger()
    arrivals = [(10.0 + n * 0.01, 1) for n in range(2000)]
    arrivals = [(at_s + (0.5 if n > 1234 else 0), tokens) for n, (at_s, tokens) in enumerate(arrivals)]
    book.finish(record(*arrivals))
    found = book.timeline(60.0, 50.0, most=100)
    assert len(found) <= 100
    assert [item.value_s for item in found if item.stall] == pytest.approx([0.51])
    assert len(book.timeline(60.0, 50.0, most=5000)) == 2000


def test_memory_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_GAPS_KEPT", 3000)
    book = ledger(window_s=1e6)
    arrivals = [(float(n), 1) for n in range(5001)]
    book.finish(record(*arrivals))
    chat = of("chat", book, at_s=5000.0)
    assert chat.itl.count == 3000
    assert chat.covered_s == 2999.0  # gaps that ended at 2001 .. 5000
    assert chat.stalls_total == 5000


def test_forgotten_requests_do_not_pile_up() -> None:
    book = ledger()
    for number in range(latency._OPEN_KEPT + 50):
        book.begin(str(number), "chat", 0.0)
    assert of("chat", book).waiting == latency._OPEN_KEPT


def test_endless_reasons_do_not_pile_up() -> None:
    book = ledger()
    for number in range(1000):
        book.skip("chat", f"reason {number}")
    skipped = of("chat", book).skipped
    assert sum(skipped.values()) == 1000
    assert len(skipped) == latency._REASONS_KEPT + 1
    assert skipped[OTHER] == 1000 - latency._REASONS_KEPT


@pytest.mark.parametrize("unknown", ["Chat", "", "video"])
def test_unknown_class(unknown: str) -> None:
    book = ledger()
    with pytest.raises(ValueError, match="allowed: camera, chat"):
        book.begin("r", unknown, 0.0)
    with pytest.raises(ValueError, match="allowed: camera, chat"):
        book.skip(unknown, "x")


def test_late_calls_for_an_ended_request_change_nothing() -> None:
    book = ledger()
    book.finish(record((1.0, 1), (1.5, 1)))
    book.sent("r", 2.0)
    book.token("r", TokenEvent(3.0, 1, "x"))
    chat = of("chat", book)
    assert (chat.itl.count, chat.in_flight, chat.waiting) == (1, 0, 0)


def test_many_threads_lose_nothing() -> None:
    book = ledger()

    def work(worker: int) -> None:
        for number in range(50):
            request_id = f"{worker}-{number}"
            book.begin(request_id, "chat", 1.0)
            book.sent(request_id, 1.0)
            for token in range(20):
                book.token(request_id, TokenEvent(2.0 + token / 100, 1, "x"))
            book.summaries(50.0)
            book.finish(record(*((2.0 + token / 100, 1) for token in range(20)), request_id=request_id, due_s=1.0))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    chat = of("chat", book)
    assert (chat.done, chat.ttft.count, chat.itl.count, chat.in_flight) == (200, 200, 200 * 19, 0)


def test_pooled_percentiles_are_numpys() -> None:
    book = ledger()
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(0.01, 500)) + 1
    book.finish(record(*((float(at_s), 1) for at_s in arrivals)))
    assert of("chat", book).itl.p95_s == pytest.approx(float(np.percentile(np.diff(arrivals), 95)))

"""What a gap between two tokens went to: whose prefill, whose picture, waiting, the front end — or unexplained.

A gap runs from one token's arrival to the next one's. The step records say which step of the engine gave which token,
so the gap is the time from the one step's end to the other's, plus how much later the second token took from there to
the client than the first. Between the two ends lie whole steps, and their time is divided:

- *decode*: what a step takes that only decodes the same tokens, as fitted to all steps (serving/steptime.py);
- *prefill*, *encoder*: the rest of a step that also had prompt tokens or pictures, divided among their requests by
  fitted costs;
- *waiting*: whole steps in which the request was not scheduled, divided by tokens among the prefills that filled them;
- *preempted*: such steps after a preemption, and what the request's own prompt and answer cost to compute again;
- *between_steps*: the engine between its steps (taking in requests), above what is usual;
- *front_end*, *client*: on the way from the engine to our time stamp, above the last token's (less, where negative);
- *unexplained*: what a step took beyond the fit and its 95th percentile of error (at most 30 %). On a CPU that is
  mostly somebody else's work on the same cores.

The parts sum to the gap (to some microseconds). What the division is worth, the share left unexplained says.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from serving.compare.stepcosts import StepCosts, step_costs
from serving.compare.tables import RequestRow, StepRow

Cause = Literal[
    "decode", "prefill", "encoder", "waiting", "preempted", "between_steps", "front_end", "client", "unexplained"
]
#: A token cannot arrive before its step ended, but for rounding in the files.
_CLOCK_S = 0.001
_DUST_S = 1e-6
_SHORT_ID = 10
#: Of a gap: a part that is less is not worth a word.
WORTH = 0.01
NO_STEPS = "no step records: the server is not ours, or runs without the scheduler plugin"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a gap. `request_id` and `traffic_class` are whose work it was; `tokens` the prompt tokens or image
    tokens computed in it. The class is None for a request that is in no table."""

    cause: Cause
    duration_s: float
    request_id: str | None = None
    traffic_class: str | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Attribution:
    """One gap and its parts, the longest first.

    Attributes:
        end_s, duration_s, tokens: As in :class:`serving.records.Gap`.
        steps: Steps of the engine that ended in it.
        fitted: Costs are fitted to measured steps; False: divided by tokens alone, as there were too few.
        missing: Why there are no parts; None where there are.
    """

    block: int
    arm: str
    request_id: str
    traffic_class: str
    end_s: float
    duration_s: float
    tokens: int
    parts: tuple[Part, ...] = ()
    steps: int = 0
    fitted: bool = False
    missing: str | None = None

    @property
    def excess_s(self) -> float:
        """What the gap took beyond decode-only steps."""
        return sum(part.duration_s for part in self.parts if part.cause != "decode")

    @property
    def unexplained_s(self) -> float:
        """The part with no known cause; the whole gap where nothing is known."""
        if self.missing is not None:
            return self.duration_s
        return sum(part.duration_s for part in self.parts if part.cause == "unexplained")

    @property
    def main(self) -> Part | None:
        """The largest part of the excess, or of all where none of it is worth a word; None where nothing is known."""
        excess = [part for part in self.parts if part.cause != "decode" and part.duration_s >= WORTH * self.duration_s]
        return max(excess or self.parts, key=lambda part: part.duration_s, default=None)


def attribute_stalls(
    requests: Sequence[RequestRow],
    steps: Sequence[StepRow],
    objectives_s: Mapping[str, float],
    client_lag_s: Mapping[int, float] | None = None,
) -> list[Attribution]:
    """Every gap longer than its class's ITL objective, the longest first. Classes without an objective have none.

    Args: As for :func:`attribute_gaps`.
    """

    def is_stall(row: RequestRow, place: int) -> bool:
        return row.gap_duration_s[place] > objectives_s.get(row.traffic_class, math.inf)

    found = attribute_gaps(requests, steps, is_stall, client_lag_s)
    return sorted(found, key=lambda gap: -gap.duration_s)


def attribute_gaps(
    requests: Sequence[RequestRow],
    steps: Sequence[StepRow],
    wanted: Callable[[RequestRow, int], bool] = lambda _row, _place: True,
    client_lag_s: Mapping[int, float] | None = None,
) -> list[Attribution]:
    """The parts of every gap that is `wanted` (a row and the place of a gap in it), in the order of the rows.

    Args:
        requests: Of any number of blocks.
        steps: Of the same blocks, in order; none is allowed, and then every gap's `missing` says so.
        client_lag_s: By block, how late the client's own clock readings are (its loop's lag, 99th percentile): as much
            of a token's delay is called the client's. Without it the client's share is in `front_end`.
    """
    by_arm: dict[str, list[StepRow]] = defaultdict(list)
    by_block: dict[int, list[StepRow]] = defaultdict(list)
    for step in steps:
        by_arm[step.arm].append(step)
        by_block[step.block].append(step)
    costs = {arm: step_costs(rows) for arm, rows in by_arm.items()}
    classes = {row.request_id: row.traffic_class for row in requests}
    blocks: dict[int, _Block] = {}
    found = []
    for row in requests:
        places = [place for place in range(len(row.gap_end_s)) if wanted(row, place)]
        if not places:
            continue
        if row.block not in blocks:
            lag_s = (client_lag_s or {}).get(row.block, 0.0)
            blocks[row.block] = _Block(by_block[row.block], costs.get(row.arm), classes, lag_s)
        found += blocks[row.block].gaps(row, places)
    return found


def token_steps(requests: Sequence[RequestRow], steps: Sequence[StepRow]) -> list[list[tuple[float, StepRow | None]]]:
    """For each row, every token-bearing chunk's arrival and the step that gave its last token (None: not recorded).

    `steps` are one block's, in order.
    """
    block = _Block(steps, None, {}, 0.0)
    found = []
    for row in requests:
        givers = block.givers(row)
        arrivals = _arrivals(row)
        found.append(
            [(at_s, None if giver is None else steps[giver]) for at_s, giver in zip(arrivals, givers, strict=True)]
        )
    return found


def _arrivals(row: RequestRow) -> list[float]:
    if not row.gap_end_s:
        return [] if row.first_token_s is None else [row.first_token_s]
    return [row.gap_end_s[0] - row.gap_duration_s[0], *row.gap_end_s]


@dataclass(slots=True)
class _Sum:
    """Parts while they are added up, one for each cause and request."""

    seconds: dict[tuple[Cause, str | None], float] = field(default_factory=lambda: defaultdict(float))
    tokens: dict[tuple[Cause, str | None], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, cause: Cause, seconds: float, request_id: str | None = None, tokens: int = 0) -> None:
        self.seconds[cause, request_id] += seconds
        self.tokens[cause, request_id] += tokens

    def parts(self, classes: Mapping[str, str]) -> tuple[Part, ...]:
        parts = [
            Part(cause, seconds, name, classes.get(name or ""), self.tokens[cause, name])
            for (cause, name), seconds in self.seconds.items()
            if abs(seconds) >= _DUST_S
        ]
        return tuple(sorted(parts, key=lambda part: -part.duration_s))


def _prefills(step: StepRow) -> list[tuple[str, int]]:
    """Whose prompts a step computed, and how many tokens of each."""
    scheduled = zip(step.request_ids, step.request_tokens, step.request_prefill, strict=True)
    return [(name, tokens) for name, tokens, prefill in scheduled if prefill]


class _Block:
    """One block's steps, and which of them gave which request how many tokens."""

    def __init__(
        self, steps: Sequence[StepRow], costs: StepCosts | None, classes: Mapping[str, str], client_lag_s: float
    ) -> None:
        self._steps = steps
        self._costs = costs
        self._classes = classes
        self._client_lag_s = client_lag_s
        self._seen: dict[str, list[tuple[int, bool, int]]] = defaultdict(list)  # step, prompt tokens, tokens given
        for place, step in enumerate(steps):
            for name, prefill, out in zip(step.request_ids, step.request_prefill, step.request_outputs, strict=True):
                self._seen[name].append((place, prefill, out))

    def gaps(self, row: RequestRow, places: Sequence[int]) -> list[Attribution]:
        givers = self.givers(row)
        return [self._gap(row, place, givers) for place in places]

    def givers(self, row: RequestRow) -> list[int | None]:
        """Of each token-bearing chunk the step that gave its last token."""
        arrivals = _arrivals(row)
        if not arrivals:
            return []
        giving = [(step, out) for step, _, out in self._seen.get(row.request_id, []) if out]
        if row.tokens_counted and row.completion_tokens is not None:
            first = row.completion_tokens - sum(row.gap_tokens)
            wanted = list(accumulate(row.gap_tokens, initial=first))
            given = list(accumulate(out for _, out in giving))
            if given and given[-1] >= wanted[-1]:
                by_count = [giving[bisect_right(given, count - 1)][0] for count in wanted]
                if all(
                    self._steps[step].end_s <= at_s + _CLOCK_S for step, at_s in zip(by_count, arrivals, strict=True)
                ):
                    return list(by_count)
        # Without counts, or with steps missing at the start: the last that ended before the arrival.
        ends = [self._steps[step].end_s for step, _ in giving]
        before = [bisect_right(ends, at_s + _CLOCK_S) for at_s in arrivals]
        return [giving[count - 1][0] if count else None for count in before]

    def _gap(self, row: RequestRow, place: int, givers: Sequence[int | None]) -> Attribution:
        end_s, duration_s = row.gap_end_s[place], row.gap_duration_s[place]
        plain = Attribution(
            row.block, row.arm, row.request_id, row.traffic_class, end_s, duration_s, row.gap_tokens[place]
        )
        first, last = givers[place], givers[place + 1]
        if self._costs is None or not self._steps:
            return replace(plain, missing=NO_STEPS)
        if first is None or last is None:
            return replace(plain, missing="the steps of this request were not recorded")
        total = _Sum()
        for step in range(first + 1, last + 1):
            self._add_step(total, self._costs, row.request_id, step)
        self._add_delay(total, duration_s - (self._steps[last].end_s - self._steps[first].end_s))
        return replace(
            plain, parts=total.parts(self._classes), steps=last - first, fitted=self._costs.model is not None
        )

    def _add_step(self, total: _Sum, costs: StepCosts, request_id: str, place: int) -> None:
        """One step, from the end of the one before it to its own end."""
        step = self._steps[place]
        between_s = step.end_s - self._steps[place - 1].end_s - step.duration_s
        usual_s = min(between_s, costs.between_s)
        total.add("decode", usual_s)
        total.add("between_steps", between_s - usual_s)
        if request_id not in step.request_ids:
            self._add_absence(total, request_id, place)
            return
        division = costs.divide(step)
        total.add("decode", division.decode_s)
        total.add("unexplained", division.unexplained_s)
        for name, tokens in _prefills(step):
            cause: Cause = "preempted" if name == request_id else "prefill"
            total.add(cause, division.prefill_s * tokens / step.prefill_tokens, name, tokens)
        for name, tokens in zip(step.encoder_request_ids, step.encoder_request_tokens, strict=True):
            total.add("encoder", division.encoder_s * tokens / step.encoder_tokens, name, tokens)

    def _add_absence(self, total: _Sum, request_id: str, place: int) -> None:
        """A step without the request: it was preempted, or stood behind the prefills of others."""
        step = self._steps[place]
        seen = self._seen[request_id]
        following = bisect_right(seen, place, key=lambda item: item[0])
        if following < len(seen) and seen[following][1]:  # known tokens are computed again when it comes back
            total.add("preempted", step.duration_s, request_id)
        elif not step.prefill_tokens:
            total.add("waiting", step.duration_s)
        else:
            for name, tokens in _prefills(step):
                total.add("waiting", step.duration_s * tokens / step.prefill_tokens, name, tokens)

    def _add_delay(self, total: _Sum, delay_s: float) -> None:
        client_s = min(max(delay_s, 0.0), self._client_lag_s)
        total.add("client", client_s)
        total.add("front_end", delay_s - client_s)


_OF_OTHERS = ("prefill", "encoder", "waiting")
_WORDS: dict[Cause, str] = {
    "decode": "decoding",
    "prefill": "prefill of",
    "encoder": "pictures encoded for",
    "waiting": "not scheduled, though running",
    "preempted": "preempted: thrown out of the cache and computed again",
    "between_steps": "the engine between its steps",
    "front_end": "the server's front end and the way to the client",
    "client": "the client's own lag",
    "unexplained": "unexplained (the machine was busy with something else, or the step was slower than its like)",
}


def in_words(part: Part) -> str:
    """One line for a person: `prefill of camera request 3f2a91c0 (812 tokens): 310 ms`."""
    words = _WORDS[part.cause]
    if part.duration_s < 0:
        words = "less of a delay on the way to the client than the token before had"
    if part.cause in _OF_OTHERS and part.request_id is not None:
        whose = f"{part.traffic_class} request" if part.traffic_class else "another's request"
        behind = ", behind the prefill of" if part.cause == "waiting" else ""
        words = f"{words}{behind} {whose} {short_id(part.request_id)} ({part.tokens:,} {_unit(part)})"
    return f"{words}: {1000 * part.duration_s:.0f} ms"


def short_id(request_id: str) -> str:
    """The end of a long id, which tells requests of one run apart."""
    return request_id if len(request_id) <= _SHORT_ID else request_id[-_SHORT_ID:]


def _unit(part: Part) -> str:
    return "image tokens" if part.cause == "encoder" else "tokens"


def totals_s(gaps: Sequence[Attribution]) -> dict[tuple[Cause, str | None], float]:
    """Seconds by cause, and by the class of whose work it was, over all these gaps."""
    total: dict[tuple[Cause, str | None], float] = defaultdict(float)
    for gap in gaps:
        if gap.missing is not None:
            total["unexplained", None] += gap.duration_s
        for part in gap.parts:
            whose = part.traffic_class if part.cause in _OF_OTHERS else None
            total[part.cause, whose] += part.duration_s
    return dict(total)

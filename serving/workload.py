"""A load as data: classes of requests, when they arrive and how long they are; drawn from a seed before anything runs.

The load is open: a request is due at its arrival whatever the server does. One description serves the simulator and the
load generator. Classes are drawn apart from one another, so adding one changes none of the others.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from serving.config import ImageTokens, PositiveInt, StrictModel

NonNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
MAX_REQUESTS = 1_000_000


class Arrivals(StrictModel):
    """When requests of a class arrive.

    `poisson`: gaps are exponential. `constant`: every 1 / rate seconds. `gamma`: gaps vary `variation` times as much as
    their mean (1 is Poisson, above 1 comes in bursts). `replay`: at `times_s`, and then the rate is not used.
    """

    process: Literal["poisson", "constant", "gamma", "replay"] = "poisson"
    rate_per_s: Positive = 1.0
    variation: Positive = 1.0
    times_s: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()

    @model_validator(mode="after")
    def _times_go_with_replay(self) -> Self:
        if (self.process == "replay") != bool(self.times_s):
            raise ValueError(
                f"process is {self.process} with {len(self.times_s)} times_s; replay needs some, others none"
            )
        if list(self.times_s) != sorted(self.times_s):
            raise ValueError("times_s are not in order, allowed: seconds from the start, ascending")
        return self


class Lengths(StrictModel):
    """How long something is, in tokens: `constant` (mean), `uniform` (minimum to maximum), `normal` or `lognormal`
    (with mean and `spread`, the standard deviation), kept within minimum and maximum.
    """

    kind: Literal["constant", "uniform", "normal", "lognormal"] = "constant"
    mean: Positive = 100
    spread: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0
    minimum: PositiveInt = 1
    maximum: PositiveInt = 1_000_000

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum is {self.minimum}, allowed: at most maximum ({self.maximum})")
        return self


class Pictures(StrictModel):
    """The pictures of each request of a class, all of one size.

    `rule` says how many tokens one becomes where that is not the server's usual rule: a class whose `extra_body` has
    pictures cut into tiles, say.
    """

    count: PositiveInt = 1
    width_px: PositiveInt = 512
    height_px: PositiveInt = 1024
    rule: ImageTokens | None = None

    def tokens_each(self, rule: ImageTokens) -> int:
        """Image tokens of one picture, by its own rule or else by `rule`."""
        return (self.rule or rule).count(self.width_px, self.height_px)


class ClassLoad(StrictModel):
    """The requests of one class.

    Attributes:
        prompt: New text of a request, its shared prefix included, pictures and the turns before excluded.
        prefix_tokens: The first tokens are the same for all requests of one of `prefixes` (such as a system prompt).
        prefix_share: Part of the requests that begin with a shared prefix; the others share nothing.
        turns: A conversation's length. Each turn's prompt is all that was said before, and its new text.
        conversations: How many conversations go on side by side, taking turns.
        priority: Lower is served first, where the engine schedules by priority.
        extra_body: Sent with each request instead of the class's own `extra_body`; None: that one.
    """

    arrivals: Arrivals = Arrivals()
    prompt: Lengths = Lengths()
    output: Lengths = Lengths()
    pictures: Pictures | None = None
    prefix_tokens: NonNegativeInt = 0
    prefix_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    prefixes: PositiveInt = 1
    turns: PositiveInt = 1
    conversations: PositiveInt = 1
    priority: int = 0
    extra_body: dict[str, Any] | None = None


class Workload(StrictModel):
    """A mix of classes over `duration_s` seconds, drawn from `seed`."""

    duration_s: Positive = 600
    seed: NonNegativeInt = 0
    classes: dict[str, ClassLoad]

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if not self.classes:
            raise ValueError("classes is empty, allowed: one or more")
        expected = sum(load.arrivals.rate_per_s * self.duration_s for load in self.classes.values())
        if expected > MAX_REQUESTS:
            raise ValueError(f"the load has about {expected:,.0f} requests, allowed: {MAX_REQUESTS:,}")
        return self


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a drawn load.

    Attributes:
        due_s: Seconds from the start of the load.
        text_tokens: Prompt without pictures: the turns before, then the new text.
        history_tokens: The part of `text_tokens` that earlier turns of the conversation said.
        prefix: Which shared prefix the prompt begins with, or None.
        conversation: Which conversation it continues, or None for a request by itself.
    """

    number: int
    traffic_class: str
    due_s: float
    text_tokens: int
    output_tokens: int
    pictures: Pictures | None = None
    prefix: str | None = None
    prefix_tokens: int = 0
    conversation: str | None = None
    history_tokens: int = 0
    priority: int = 0


def draw(workload: Workload) -> list[PlannedRequest]:
    """Every request of the load, in the order in which they are due; the same seed draws the same load."""
    drawn: list[PlannedRequest] = []
    for name, load in workload.classes.items():
        rng = np.random.default_rng([workload.seed, zlib.crc32(name.encode())])
        drawn.extend(_draw_class(name, load, workload.duration_s, rng))
    drawn.sort(key=lambda request: request.due_s)
    return [replace(request, number=number) for number, request in enumerate(drawn)]


def _draw_class(name: str, load: ClassLoad, duration_s: float, rng: np.random.Generator) -> list[PlannedRequest]:
    due = _arrivals(load.arrivals, duration_s, rng)
    prompts = _lengths(load.prompt, len(due), rng)
    outputs = _lengths(load.output, len(due), rng)
    shares = rng.random(len(due)) < load.prefix_share
    which = rng.integers(0, load.prefixes, len(due))
    history: dict[int, int] = {}
    requests = []
    for index, due_s in enumerate(due):
        slot, turn = index % load.conversations, index // load.conversations % load.turns
        said = history.get(slot, 0) if turn > 0 else 0
        # A conversation keeps the prefix of its first turn.
        first = index - turn * load.conversations
        shared = load.prefix_tokens if load.prefix_tokens and shares[first] else 0
        new = max(int(prompts[index]), shared if turn == 0 else 1)
        text = said + new
        history[slot] = text + int(outputs[index])
        requests.append(
            PlannedRequest(
                number=0,
                traffic_class=name,
                due_s=float(due_s),
                text_tokens=text,
                output_tokens=int(outputs[index]),
                pictures=load.pictures,
                prefix=f"{name}/{which[first]}" if shared else None,
                prefix_tokens=shared,
                conversation=f"{name}/{first}" if load.turns > 1 else None,
                history_tokens=said,
                priority=load.priority,
            )
        )
    return requests


def _arrivals(arrivals: Arrivals, duration_s: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    if arrivals.process == "replay":
        return np.array([time_s for time_s in arrivals.times_s if time_s < duration_s])
    mean_s = 1 / arrivals.rate_per_s
    if arrivals.process == "constant":
        return np.arange(0, duration_s, mean_s)
    shape = 1.0 if arrivals.process == "poisson" else arrivals.variation**-2
    times: list[npt.NDArray[np.float64]] = []
    last = 0.0
    while last < duration_s:
        gaps = rng.gamma(shape, mean_s / shape, size=1024)
        times.append(last + np.cumsum(gaps))
        last = float(times[-1][-1])
    every = np.concatenate(times)
    return every[every < duration_s]


def _lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    if lengths.kind == "uniform":
        return rng.integers(lengths.minimum, lengths.maximum + 1, count)
    if lengths.kind == "constant" or lengths.spread == 0:
        drawn = np.full(count, lengths.mean)
    elif lengths.kind == "normal":
        drawn = rng.normal(lengths.mean, lengths.spread, count)
    else:
        variance = np.log1p((lengths.spread / lengths.mean) ** 2)
        drawn = rng.lognormal(np.log(lengths.mean) - variance / 2, np.sqrt(variance), count)
    whole: npt.NDArray[np.int64] = np.clip(np.rint(drawn), lengths.minimum, lengths.maximum).astype(np.int64)
    return whole

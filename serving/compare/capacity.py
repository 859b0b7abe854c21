"""The highest rate of one class at which another's objective still holds, per arm, by bisection (`capacity.json`).

Every rate is tried with one block of the same seed, so that higher rates send the same requests closer together. A rate
holds when the watched class's ITL p99 is within its objective and every request was answered before the drain ended:
a queue that only grows is no capacity, whatever the gaps look like. The search is on a logarithmic scale: up or down in
factors of two from the load's own rate until one rate holds and one does not, then by halves.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from serving.compare.arms import block_workload
from serving.compare.bench import Bench
from serving.compare.hosts import HostError
from serving.compare.measure import block_of
from serving.compare.plan import Arm, Experiment, PlannedBlock
from serving.compare.samples import MS, figure_samples
from serving.compare.statistics import Resampled, Samples, Unit, slices_per_block
from serving.compare.summary import Figure
from serving.compare.tables import BlockData, ComparisonError, write_json
from serving.config import StrictModel
from serving.records import Outcome
from serving.workload import Workload, draw

CAPACITY_FORMAT = 1
RAISED, WATCHED = "camera", "chat"
PRECISION = 1.15
_MOST_STEPS = 5  # of doubling or halving
_MOST_PROBES = 12
_FEWEST = 3  # requests of the raised class in a block
_FILE = "capacity.json"
_FIRST_BLOCK = 50_000


class Probe(StrictModel):
    """One rate that was tried. `why` says what did not hold; `itl_p99_ms` is the watched class's."""

    rate_per_s: float
    holds: bool
    why: str = ""
    itl_p99_ms: Figure
    requests: int = 0
    invalid: str | None = None


class ArmCapacity(StrictModel):
    """One arm. The rate asked for lies between `holds_per_s` and `fails_per_s`; None: not reached within the search."""

    arm: Arm
    holds_per_s: float | None = None
    fails_per_s: float | None = None
    probes: list[Probe] = []


class Capacity(StrictModel):
    """What the search found."""

    format: int = CAPACITY_FORMAT
    name: str
    raised: str = RAISED
    watched: str = WATCHED
    objective_ms: float
    precision: float = PRECISION
    complete: bool = False
    arms: list[ArmCapacity]


async def bisect(
    try_rate: Callable[[float], Awaitable[bool]], first: float, *, least: float = 0.0, precision: float = PRECISION
) -> tuple[float | None, float | None]:
    """The highest rate known to hold and the lowest known to fail, within a factor `precision` where both are found.

    Nothing below `least` is tried.
    """
    holds: float | None = None
    fails: float | None = None
    rate, steps = first, 0
    for _ in range(_MOST_PROBES):
        if await try_rate(rate):
            holds = rate
        else:
            fails = rate
        if holds is None or fails is None:
            steps += 1
            if steps > _MOST_STEPS:
                break
            rate = rate * 2 if fails is None else rate / 2
            if rate < least:
                break
        elif fails / holds <= precision:
            break
        else:
            rate = math.sqrt(holds * fails)
    return holds, fails


class CapacitySearch:
    """The search of one experiment; its results so far lie in the folder, and what was tried is not tried again.

    Raises:
        ComparisonError: The load lacks a class, or the raised one's arrivals have no rate.
    """

    def __init__(self, folder: Path, experiment: Experiment, bench: Bench, *, say: Callable[[str], None]) -> None:
        load = experiment.workload.classes
        if RAISED not in load or WATCHED not in load:
            raise ComparisonError(f"--find-capacity needs the classes {RAISED} and {WATCHED} in the load")
        if load[RAISED].arrivals.process == "replay" or bench.means.trace is not None:
            raise ComparisonError("--find-capacity moves the camera's rate, which a replay does not have")
        self._path = folder / _FILE
        self._experiment = experiment
        self._bench = bench
        self._say = say
        self._objective_ms = experiment.classes[WATCHED].itl_p99_ms
        self.found = Capacity(name=experiment.name, objective_ms=self._objective_ms,
                              arms=[ArmCapacity(arm=arm) for arm in experiment.arms])  # fmt: skip

    async def run(self) -> Capacity:
        """Search every arm, the one after the other."""
        self._take_up()
        try:
            for index, item in enumerate(self.found.arms):
                if item.arm.reason is None:
                    await self._search(index)
        finally:
            await self._bench.close()
        self._write(complete=True)
        return self.found

    def _take_up(self) -> None:
        """Probes of an interrupted search."""
        before = read_capacity(self._path.parent)
        if before is None:
            return
        kept = {item.arm.name: item for item in before.arms}
        arms = [
            kept[item.arm.name].model_copy(update={"arm": item.arm}) if item.arm.name in kept else item
            for item in self.found.arms
        ]
        self.found = self.found.model_copy(update={"arms": arms})

    async def _search(self, index: int) -> None:
        known = {probe.rate_per_s: probe for probe in self.found.arms[index].probes}
        first = self._experiment.workload.classes[RAISED].arrivals.rate_per_s

        async def try_rate(rate: float) -> bool:
            if rate not in known:
                known[rate] = await self._probe(self.found.arms[index].arm, index, rate, len(known))
                self._set(
                    index,
                    {
                        "probes": list(known.values()),
                        "holds_per_s": max((rate for rate, probe in known.items() if probe.holds), default=None),
                        "fails_per_s": min((rate for rate, probe in known.items() if not probe.holds), default=None),
                    },
                )
            return known[rate].holds

        try:
            # Slower than this, a block may well have none of the requests whose effect is looked for.
            least = _FEWEST / (self._experiment.block_s - self._experiment.warm_up_s)
            await bisect(try_rate, first, least=least)
        except HostError as error:
            refused = self.found.arms[index].arm.model_copy(update={"reason": str(error)})
            self._set(index, {"arm": refused})

    async def _probe(self, arm: Arm, index: int, rate: float, tried: int) -> Probe:
        experiment = self._experiment
        load = with_rate(experiment.workload, rate)
        number = _FIRST_BLOCK + index * 100 + tried
        self._say(f"{arm.name}: {rate:.3f} {RAISED} requests a second")
        measured = await self._bench.measure(
            arm,
            draw(block_workload(load, round_=0, seed=experiment.seed)),
            block=number,
            say=lambda line: self._say(f"{arm.name}: {line}"),
            on_start=lambda: None,
        )
        if measured is None:
            raise HostError("the server died under the load")
        block = block_of(
            measured.run,
            PlannedBlock(number=number, arm=arm.name, round=0, seed=experiment.seed),
            load_s=experiment.block_s,
            warm_up_s=experiment.warm_up_s,
            image_rule=measured.ready.config.image_tokens,
            server={},
        )
        probe = judge(block, rate, self._objective_ms)
        verdict = "holds" if probe.holds else f"does not hold: {probe.why}"
        self._say(f"{arm.name}: {rate:.3f} {RAISED} requests a second: {verdict}")
        return probe

    def _set(self, index: int, changes: dict[str, object]) -> None:
        arms = list(self.found.arms)
        arms[index] = arms[index].model_copy(update=changes)
        self.found = self.found.model_copy(update={"arms": arms})
        self._write()

    def _write(self, *, complete: bool = False) -> None:
        self.found = self.found.model_copy(update={"complete": complete})
        write_json(self._path, self.found)


def read_capacity(folder: Path) -> Capacity | None:
    """What a search in this comparison's folder found so far; None: there was none.

    Raises:
        ComparisonError: The file is there but cannot be read.
    """
    path = folder / _FILE
    try:
        return Capacity.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ComparisonError(f"{path} cannot be read; remove it and --resume") from error


def with_rate(workload: Workload, rate_per_s: float) -> Workload:
    """The load with another rate of the raised class."""
    load = workload.classes[RAISED]
    arrivals = load.arrivals.model_copy(update={"rate_per_s": rate_per_s})
    classes = {**workload.classes, RAISED: load.model_copy(update={"arrivals": arrivals})}
    return workload.model_copy(update={"classes": classes})


def judge(block: BlockData, rate_per_s: float, objective_ms: float) -> Probe:
    """Whether the block shows that the rate holds."""
    info = block.info
    rows = [row for row in block.requests if not row.warm_up]
    slices = slices_per_block(1, info.measured_s)
    by_unit: dict[Unit, list[float]] = {(0, number): [] for number in range(slices)}
    for row in rows:
        if row.traffic_class == WATCHED:
            into_s = row.due_s - info.start_s - info.warm_up_s
            unit = (0, min(slices - 1, max(0, int(into_s / info.measured_s * slices))))
            by_unit[unit] += [gap * MS for gap in figure_samples(row, "itl")]
    estimate = Resampled.of(Samples.of(by_unit), (0.99,)).estimates()[0]
    figure = Figure(value=estimate.value, low=estimate.low, high=estimate.high)
    why = _what_fails(rows_unanswered=sum(row.outcome != Outcome.DONE.value for row in rows),
                      itl_p99_ms=estimate.value, objective_ms=objective_ms)  # fmt: skip
    return Probe(
        rate_per_s=rate_per_s, holds=not why, why=why, itl_p99_ms=figure, requests=len(rows), invalid=info.invalid
    )


def _what_fails(*, rows_unanswered: int, itl_p99_ms: float | None, objective_ms: float) -> str:
    if rows_unanswered:
        return f"{rows_unanswered} requests were not answered in time"
    if itl_p99_ms is None:
        return f"no {WATCHED} request had a gap to measure; make the block longer"
    if itl_p99_ms > objective_ms:
        return f"{WATCHED}'s ITL p99 is {itl_p99_ms:,.0f} ms, above {objective_ms:,.0f}"
    return ""


def capacity_lines(found: Capacity) -> Sequence[str]:
    """The result in words, a line an arm."""
    lines = []
    for item in found.arms:
        if item.arm.reason is not None:
            lines.append(f"{item.arm.name} is refused: {item.arm.reason}")
        elif item.holds_per_s is None and item.fails_per_s is None:
            lines.append(f"{item.arm.name}: not tried")
        elif item.holds_per_s is None:
            lines.append(
                f"{item.arm.name}: not even {item.fails_per_s:.3f} {found.raised} requests a second hold; slower rates "
                "need longer blocks"
            )
        elif item.fails_per_s is None:
            lines.append(f"{item.arm.name}: {item.holds_per_s:.3f} {found.raised} requests a second hold, and more may")
        else:
            lines.append(
                f"{item.arm.name}: {item.holds_per_s:.3f} {found.raised} requests a second hold, "
                f"{item.fails_per_s:.3f} do not"
            )
    return lines

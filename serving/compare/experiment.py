"""Runs a comparison: block after block in the planned order, each written when it ends, so that nothing is lost.

An arm that its server refuses, or under which the server dies twice, is a row with its reason; the others go on. An
interrupted comparison goes on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from serving.compare.arms import block_workload, server_of
from serving.compare.bench import Bench, Means, Measured
from serving.compare.hosts import HostError
from serving.compare.measure import block_of, image_tokens
from serving.compare.plan import Arm, Experiment, PlannedBlock, Progress, ProgressState
from serving.compare.statistics import RESAMPLES
from serving.compare.summary import Summary, summarise
from serving.compare.tables import BlockData, Results, read_results, write_block, write_joined, write_json
from serving.config import ServerConfig, ServingConfig
from serving.records import now_s
from serving.workload import Workload, draw

START_GUESS_S = 60.0
_BETWEEN_S = 5.0  # two blocks: the tables, the summary, the report
_DRAIN_GUESS_S = 10.0
_QUICK_RESAMPLES = 300
_DEATHS_ALLOWED = 1


class Comparison:
    """One comparison in `folder`, described by `experiment`; blocks that are there already are kept.

    `on_progress` is called at every change, `on_block` with everything so far after every block and at the end.
    """

    def __init__(
        self,
        folder: Path,
        experiment: Experiment,
        means: Means,
        *,
        on_progress: Callable[[Progress], None],
        on_block: Callable[[Results, Summary], object] = lambda _results, _summary: None,
    ) -> None:
        self.folder = folder
        self.experiment = experiment
        self._bench = Bench(experiment, means)
        self._serving = means.serving
        self._trace = means.trace
        self._on_progress = on_progress
        self._on_block = on_block
        self._arms = {arm.name: arm for arm in experiment.arms}
        self._blocks: list[BlockData] = []
        self._started_s = now_s()
        self._block_s: list[float] = []  # of wall clock
        self._deaths: dict[str, int] = {}

    @property
    def results(self) -> Results:
        """What there is so far."""
        return Results(self.folder, self.experiment, self._blocks)

    async def run(self) -> Summary:
        """Do what is left of the plan. However it ends, the blocks that ended are written and summed up.

        Raises:
            ComparisonError: Blocks that are there cannot be read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "experiment.json", self.experiment)
        self._blocks = read_results(self.folder).blocks
        state: ProgressState = "failed"
        try:
            for planned in self._left():
                await self._do(planned)
            state = "done"
        except asyncio.CancelledError:
            state = "interrupted"
            raise
        finally:
            await self._bench.close()
            summary = self._sum_up(RESAMPLES)
            self._say(state, f"{len(self._blocks)} of {len(self.experiment.plan)} blocks")
        return summary

    def _left(self) -> Sequence[PlannedBlock]:
        done = {block.info.number for block in self._blocks}
        return [planned for planned in self.experiment.plan if planned.number not in done]

    async def _do(self, planned: PlannedBlock) -> None:
        """One block, tried again after a death of its server; or its arm refused."""
        load = block_workload(self.experiment.workload, round_=planned.round, seed=planned.seed, trace=self._trace)
        requests = draw(load)
        while (arm := self._arms[planned.arm]).reason is None:
            self._say("starting", "getting the server ready", planned)
            try:
                measured = await self._bench.measure(
                    arm,
                    requests,
                    block=planned.number,
                    say=lambda line: self._say("starting", line, planned),
                    on_start=lambda: self._say("running", "", planned),
                )
            except HostError as error:
                self._refuse(arm, str(error))
                return
            if measured is not None:
                self._keep(planned, arm, measured)
                return
            self._deaths[arm.name] = self._deaths.get(arm.name, 0) + 1
            if self._deaths[arm.name] > _DEATHS_ALLOWED:
                trouble = self._bench.means.host.trouble or "nobody answers any more"
                self._refuse(arm, f"the server died under this load again: {trouble}")

    def _keep(self, planned: PlannedBlock, arm: Arm, measured: Measured) -> None:
        ready = measured.ready
        status = ready.status
        step_budget = arm.budget if arm.kind == "step_budget" else status.max_num_scheduled_tokens
        block = block_of(
            measured.run,
            planned,
            load_s=self.experiment.block_s,
            warm_up_s=self.experiment.warm_up_s,
            image_rule=ready.config.image_tokens,
            steps=measured.steps,
            steps_lost=measured.steps_lost,
            server={
                "model": status.model,
                "version": status.version,
                "max_num_batched_tokens": status.max_num_batched_tokens,
                "max_num_scheduled_tokens": step_budget,
                "long_prefill_token_threshold": status.long_prefill_token_threshold,
                "exact_texts": ready.words.exact,
                "exact_outputs": ready.exact_output,
            },
        )
        write_block(self.folder, block)
        self._blocks.append(block)
        self._blocks.sort(key=lambda item: item.info.number)
        began_s = now_s()
        self._sum_up(_QUICK_RESAMPLES)
        self._block_s.append(measured.wall_s + now_s() - began_s)

    def _refuse(self, arm: Arm, reason: str) -> None:
        self._arms[arm.name] = arm.model_copy(update={"reason": " ".join(reason.split())})
        self.experiment = self.experiment.model_copy(update={"arms": list(self._arms.values())})
        write_json(self.folder / "experiment.json", self.experiment)
        self._say("running", f"{arm.name} is refused: {reason}")

    def _sum_up(self, resamples: int) -> Summary:
        results = self.results
        write_joined(results)
        summary = summarise(results, resamples=resamples)
        write_json(self.folder / "summary.json", summary)
        self._on_block(results, summary)
        return summary

    def _say(self, state: ProgressState, message: str, planned: PlannedBlock | None = None) -> None:
        progress = Progress(
            state=state,
            message=message,
            at_s=now_s(),
            started_s=self._started_s,
            blocks_done=len(self._blocks),
            blocks_total=len(self._blocks) + len(self._to_come()),
            block=None if planned is None else planned.number,
            arm=None if planned is None else planned.arm,
            remaining_s=self._remaining_s(),
            pid=os.getpid(),
        )
        with contextlib.suppress(OSError):  # a full disk must not end a measurement that can still be read off
            write_json(self.folder / "progress.json", progress)
        self._on_progress(progress)

    def _to_come(self) -> Sequence[PlannedBlock]:
        return [planned for planned in self._left() if self._arms[planned.arm].reason is None]

    def _remaining_s(self) -> float:
        """What is left, at the pace so far."""
        starts = self._bench.start_s
        return expected_s(
            self._to_come(),
            self._arms,
            self._serving,
            load_s=self.experiment.block_s,
            drain_s=self.experiment.drain_s,
            block_s=sum(self._block_s) / len(self._block_s) if self._block_s else None,
            start_s=sum(starts) / len(starts) if starts else START_GUESS_S,
            running=self._bench.running,
        )


def expected_s(
    plan: Sequence[PlannedBlock],
    arms: Mapping[str, Arm],
    serving: ServingConfig,
    *,
    load_s: float,
    drain_s: float,
    block_s: float | None = None,
    start_s: float = START_GUESS_S,
    running: ServerConfig | None = None,
) -> float:
    """How long blocks take with the starts between them, seconds.

    `block_s` is what a block took with its drain, so far; None: a guess. `running` is the server that is up.
    """
    each_s = block_s if block_s is not None else load_s + min(drain_s, _DRAIN_GUESS_S) + _BETWEEN_S
    total = len(plan) * each_s
    before = running
    for planned in plan:
        server = server_of(arms[planned.arm], serving)
        if server != before and server.base_url is None:
            total += start_s
        before = server
    return total


def check_lengths(workload: Workload, seeds: Sequence[int], server: ServerConfig) -> str | None:
    """Whether every request fits the model; else which does not, in one line. Templates' own tokens are not known."""
    for seed in seeds:
        for request in draw(workload.model_copy(update={"seed": seed})):
            total = request.text_tokens + image_tokens(request, server.image_tokens) + request.output_tokens
            if total >= server.max_model_len:
                return (
                    f"a request of class {request.traffic_class} has {total} tokens (text, pictures and answer), "
                    f"allowed: below serving.server.max_model_len ({server.max_model_len}); shorten its prompt, output "
                    "or turns"
                )
    return None

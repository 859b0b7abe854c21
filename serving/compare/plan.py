"""What a comparison is: its arms, blocks, setting and progress, as they are kept in its folder as JSON.

`experiment.json` holds :class:`Experiment`, `blocks/<number>/block.json` a :class:`BlockInfo`, `progress.json` a
:class:`Progress`. All times are seconds on the clock of :func:`serving.records.now_s`.
"""

from __future__ import annotations

from typing import Any, Literal

from serving.config import ClassConfig, StrictModel
from serving.workload import Workload

FORMAT = 1

ArmKind = Literal["budget", "step_budget", "variant"]
ProgressState = Literal["starting", "running", "draining", "done", "interrupted", "failed"]


class Arm(StrictModel):
    """One of the things compared.

    Attributes:
        kind: `budget` restarts the server with another `max_num_batched_tokens`; `step_budget` moves the tokens of one
            step in the running server; `variant` restarts it with other settings.
        budget: The budget (kinds `budget` and `step_budget`), or the variant's where it names one.
        settings: What differs from the configuration's `serving.server` for this arm.
        reason: Why the arm was refused, in one line; None for an arm that runs.
    """

    name: str
    kind: ArmKind
    budget: int | None = None
    settings: dict[str, Any] = {}
    reason: str | None = None


class PlannedBlock(StrictModel):
    """One stretch of load on one arm. Blocks of one `round` have the same arrivals and lengths: they are paired."""

    number: int
    arm: str
    round: int
    seed: int


class Experiment(StrictModel):
    """Everything that the comparison's figures depend on; enough to do it again.

    Attributes:
        command: The command line as it was given.
        config: The resolved configuration without secrets.
        workload: One block's load; `duration_s` is the block's length, the seed is each block's own.
        classes: The objectives.
        warm_up_s: Requests due in the first so many seconds of a block are marked `warm_up` and not counted.
        drain_s: How long after a block its requests may finish; those that do not are cancelled and counted.
        max_in_flight: A cap on requests at once, or None; time spent behind it is reported.
        planned_s: How long the whole was expected to take at the start.
        steps: The server records its steps, so that gaps can be attributed.
        pictures: Where the pictures came from, as on the command line. replay: The file of replayed arrivals.
        notes: What a reader must know, such as a setting of the deployment that is off in the comparison.
    """

    format: int = FORMAT
    name: str
    created_s: float
    command: list[str]
    config: dict[str, Any]
    workload: Workload
    classes: dict[str, ClassConfig]
    arms: list[Arm]
    plan: list[PlannedBlock]
    seed: int
    block_s: float
    warm_up_s: float
    drain_s: float
    cache_friendly: bool = False
    max_in_flight: int | None = None
    planned_s: float
    attached: bool = False
    steps: bool = False
    pictures: str = ""
    replay: str | None = None
    notes: list[str] = []
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}


class Lag(StrictModel):
    """How late the client itself was, seconds (pooled over the block).

    `loop_*`: an event-loop timer's lateness; `sent_*`: from due to handed to the HTTP client, time behind a cap and
    time waiting for the turn before (a conversation's) excluded.
    """

    loop_p95_s: float | None = None
    loop_p99_s: float | None = None
    loop_max_s: float | None = None
    sent_p50_s: float | None = None
    sent_p95_s: float | None = None
    sent_p99_s: float | None = None
    sent_max_s: float | None = None


class BlockInfo(StrictModel):
    """One block that ended.

    Attributes:
        start_s: The load's second 0; a request due at `d` in the plan was due at `start_s + d`.
        end_s: When the last request had ended or was cancelled.
        load_s: Length of the load, warm-up included.
        planned: Requests drawn, by class. cancelled: those still open when the drain ended.
        invalid: Why the block's figures are not to be trusted (the client's lag distorts them); None when they are.
        behind_cap, behind_cap_s: Requests that waited behind `max_in_flight`, and for how long in all.
        ours_max, server_max: Most requests open at once by our count, and by the server's running + waiting.
        count_difference_p95: |server's running + waiting - ours| over the block's readings, 95th percentile.
        prefix_hit_rate, multimodal_hit_rate: Of the block, by the server's counters; None: it reports none.
        kv_cache_max: Highest KV-cache use that was read, 0..1.
        steps_lost: Steps that the server did but could not record.
    """

    number: int
    arm: str
    round: int
    seed: int
    start_s: float
    end_s: float
    load_s: float
    warm_up_s: float
    planned: dict[str, int]
    cancelled: int = 0
    lag: Lag = Lag()
    invalid: str | None = None
    behind_cap: int = 0
    behind_cap_s: float = 0.0
    ours_max: int | None = None
    server_max: int | None = None
    count_difference_p95: float | None = None
    prefix_hit_rate: float | None = None
    multimodal_hit_rate: float | None = None
    kv_cache_max: float | None = None
    preemptions: int | None = None
    steps_lost: int = 0
    server: dict[str, Any] = {}

    @property
    def measured_s(self) -> float:
        """Seconds of load that count."""
        return self.load_s - self.warm_up_s


class Progress(StrictModel):
    """How far a comparison is; `remaining_s` is None while nothing is known."""

    state: ProgressState
    message: str = ""
    at_s: float
    started_s: float
    blocks_done: int
    blocks_total: int
    block: int | None = None
    arm: str | None = None
    remaining_s: float | None = None
    pid: int | None = None

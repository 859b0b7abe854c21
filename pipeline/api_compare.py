"""The shapes of the service's HTTP API about token budgets and comparisons."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.workload import Workload

ChangeState = Literal[
    "none", "draining", "stopping", "stopped", "lent", "starting", "restarting", "done", "failed"
]  # fmt: skip
Budget = Annotated[int, Field(ge=1, le=1_000_000)]
MOST_ARMS = 12


class ChangeView(BaseModel):
    """A planned change of the model server: how far it is, or how the last one ended."""

    state: ChangeState
    detail: str
    at_s: float


class BudgetView(BaseModel):
    """The token budgets in force, and what can be changed from here.

    Attributes:
        max_num_batched_tokens: What the server was started with.
        step_budget: Tokens that a step may process now; None where the server does not say.
        configured: The same as the server was started.
        least, most: What `step_budget` may be.
        why_no_step_budget, why_no_restart: Why the one or other cannot be changed; empty when it can.
    """

    max_num_batched_tokens: int | None
    step_budget: int | None = None
    configured: int | None = None
    least: int | None = None
    most: int | None = None
    why_no_step_budget: str = ""
    why_no_restart: str = ""
    change: ChangeView


class SetBudget(BaseModel):
    """A budget to apply: `step_budget` at once, `max_num_batched_tokens` with a restart. Neither: as configured."""

    model_config = ConfigDict(extra="forbid")

    max_num_batched_tokens: Budget | None = None
    step_budget: Budget | None = None


class StartComparison(BaseModel):
    """A comparison to start: arms, load, how long.

    Attributes:
        kind: `running`: step budgets on the server that runs, which stays up. `step_budgets`: on one server of its own.
            `budgets`: a server of its own for each (`max_num_batched_tokens`).
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["running", "step_budgets", "budgets"]
    budgets: Annotated[list[Budget], Field(min_length=1, max_length=MOST_ARMS)]
    workload: Workload | None = None  # None: the load that comes with the product
    block_s: Annotated[float, Field(ge=5, le=3_600)] = 60
    rounds: Annotated[int, Field(ge=1, le=100)] = 3


class ComparisonView(BaseModel):
    """One comparison, as the list shows it."""

    name: str
    created_s: float
    state: str
    arms: list[str]
    kind: str
    blocks_done: int
    blocks_total: int
    remaining_s: float | None = None
    message: str = ""
    has_report: bool = False


class RunningComparison(BaseModel):
    """The comparison that this service runs, or how its last one ended; every field empty when there was none.

    Attributes:
        phase: What happens to the machine: `preparing` (cameras pause, the product's server stops where it has to),
            `running`, `restoring` (all that comes back), `ended` and `failed`.
    """

    phase: Literal["none", "preparing", "running", "restoring", "ended", "failed"] = "none"
    detail: str = ""
    name: str | None = None
    comparison: ComparisonView | None = None
    change: ChangeView | None = None


class ComparisonResult(BaseModel):
    """A comparison's summary, as `summary.json` holds it; None while no block has ended."""

    comparison: ComparisonView
    summary: dict[str, Any] | None

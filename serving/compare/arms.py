"""From the command line's axes to arms, servers and an order of blocks.

Budgets (`max_num_batched_tokens`) and variants need a server each; step budgets share one, whose
`max_num_batched_tokens` is the largest of them, and are moved while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from serving.compare.plan import Arm, PlannedBlock
from serving.config import ServerConfig, ServingConfig
from serving.load.trace import Trace, window
from serving.workload import Workload, draw

MAX_ROUNDS = 1000
# Off in budget arms: each would hide what the budget does. They can be compared as variants.
_HIDING: dict[str, Any] = {"long_prefill_token_threshold": 0, "max_num_scheduled_tokens": None}


class ArmError(ValueError):
    """The arms cannot be worked out; the message is one line."""


def budget_arms(budgets: Sequence[int]) -> list[Arm]:
    """One arm a `max_num_batched_tokens`."""
    return [
        Arm(name=f"budget {budget}", kind="budget", budget=budget,
            settings={**_HIDING, "max_num_batched_tokens": budget})
        for budget in budgets
    ]  # fmt: skip


def step_budget_arms(budgets: Sequence[int], *, attached: bool = False) -> list[Arm]:
    """One arm a step budget, all of one server; of a running one nothing else can be set."""
    settings = {} if attached or not budgets else {**_HIDING, "max_num_batched_tokens": max(budgets)}
    return [Arm(name=f"step {budget}", kind="step_budget", budget=budget, settings=settings) for budget in budgets]


def read_variants(path: Path) -> list[Arm]:
    """Named variants from a YAML file: `name: {setting of serving.server: value, ...}`.

    Raises:
        ArmError: It cannot be read, or is not of that form.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArmError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArmError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not content:
        raise ArmError(f"{path} holds no variants, allowed: `name: {{max_num_batched_tokens: 4096, ...}}`")
    arms = []
    for name, settings in content.items():
        if not isinstance(settings, dict | None):
            raise ArmError(f"{path}: {name} is {settings!r}, allowed: settings of serving.server")
        chosen = {str(key): value for key, value in (settings or {}).items()}
        budget = chosen.get("max_num_batched_tokens")
        arms.append(
            Arm(name=str(name), kind="variant", budget=budget if isinstance(budget, int) else None, settings=chosen)
        )
    return arms


def check_arms(arms: Sequence[Arm], serving: ServingConfig) -> list[Arm]:
    """The arms, those that no server can have with their reason.

    Raises:
        ArmError: There are none, or two of one name.
    """
    if not arms:
        raise ArmError("there is nothing to compare; give --budgets, --step-budgets or --variants")
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArmError(f"{', '.join(twice)} is there twice, allowed: every budget and variant once")
    checked = []
    for arm in arms:
        reason = None
        if arm.budget is not None and arm.budget < 1:
            reason = f"the budget is {arm.budget}, allowed: 1 or more"
        elif (
            arm.kind == "step_budget"
            and arm.budget is not None
            and serving.server.base_url is None
            and arm.budget < serving.server.max_num_seqs
        ):
            # A step has room for a token of every request that runs, or answers would take turns.
            reason = f"the step budget is {arm.budget}, allowed: at least max_num_seqs ({serving.server.max_num_seqs})"
        if reason is None:
            try:
                server_of(arm, serving)
            except ArmError as error:
                reason = str(error)
        checked.append(arm.model_copy(update={"reason": reason}))
    return checked


def server_of(arm: Arm, serving: ServingConfig) -> ServerConfig:
    """The server that an arm runs on. A variant's `extra_args` come after the deployment's.

    Raises:
        ArmError: There can be no such server; the message is one line.
    """
    settings = dict(arm.settings)
    if serving.server.base_url is not None:
        if settings:
            raise ArmError(
                f"a running server cannot be started anew with {', '.join(settings)}; leave out --server-url"
            )
        return serving.server
    if "extra_args" in settings:
        settings["extra_args"] = [*serving.server.extra_args, *settings["extra_args"]]
    tree = serving.model_dump()
    tree["server"] |= settings
    try:
        return ServingConfig.model_validate(tree).server
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ArmError(" ".join(f"{where}: {message}".split())) from None


def plan_blocks(
    arms: Sequence[Arm], serving: ServingConfig, *, rounds: int, rounds_per_start: int, seed: int
) -> list[PlannedBlock]:
    """The order of blocks: A B C, B C A, ... from an order that the seed chose, so that drift hits all arms alike.

    Arms that share a server stay together for `rounds_per_start` rounds before the next server is started; the next
    turn begins with the server that runs.
    """
    running = [arm for arm in arms if arm.reason is None]
    groups: dict[str, list[Arm]] = {}
    order = np.random.default_rng(seed).permutation(len(running))
    for index in order:
        arm = running[index]
        groups.setdefault(server_of(arm, serving).model_dump_json(), []).append(arm)
    sequence: list[tuple[Arm, int]] = []
    servers = list(groups.values())
    for first in range(0, rounds, rounds_per_start):
        for group in servers:
            for round_ in range(first, min(rounds, first + rounds_per_start)):
                turn = round_ % len(group)
                sequence += [(arm, round_) for arm in [*group[turn:], *group[:turn]]]
        servers.reverse()
    return [
        PlannedBlock(number=number, arm=arm.name, round=round_, seed=seed * MAX_ROUNDS + round_)
        for number, (arm, round_) in enumerate(sequence)
    ]


def starts(plan: Sequence[PlannedBlock], arms: Mapping[str, Arm], serving: ServingConfig) -> int:
    """How often a server must be started for the plan."""
    keys = [server_of(arms[block.arm], serving).model_dump_json() for block in plan]
    return sum(before != after for before, after in zip([None, *keys], keys, strict=False))


def block_workload(workload: Workload, *, round_: int, seed: int, trace: Trace | None = None) -> Workload:
    """The load of one round's blocks; a recorded trace gives every round its own stretch of it."""
    load = workload.model_copy(update={"seed": seed})
    return load if trace is None else window(load, trace, round_)


def rounds_for(workload: Workload, *, requests: int, warm_up_s: float, seed: int, trace: Trace | None = None) -> int:
    """How many rounds give every class at least so many requests that count.

    Raises:
        ArmError: No number of rounds does within reason.
    """
    counts = dict.fromkeys(workload.classes, 0)
    for round_ in range(MAX_ROUNDS):
        load = block_workload(workload, round_=round_, seed=seed * MAX_ROUNDS + round_, trace=trace)
        for request in draw(load):
            counts[request.traffic_class] += request.due_s >= warm_up_s
        if min(counts.values()) >= requests:
            return round_ + 1
    few = min(counts, key=lambda name: counts[name])
    raise ArmError(
        f"class {few} has {counts[few]} requests in {MAX_ROUNDS} blocks, and {requests} are asked for; raise its "
        f"rate or the length of a block ({math.ceil(workload.duration_s)} s)"
    )

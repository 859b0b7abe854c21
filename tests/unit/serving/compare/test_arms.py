from __future__ import annotations

from pathlib import Path

import pytest

from serving.compare.arms import (
    ArmError,
    budget_arms,
    check_arms,
    plan_blocks,
    read_variants,
    rounds_for,
    server_of,
    starts,
    step_budget_arms,
)
from serving.compare.plan import Arm, PlannedBlock
from serving.config import ServerConfig, ServingConfig
from serving.workload import Arrivals, ClassLoad, Workload, draw

SERVING = ServingConfig(
    server=ServerConfig(
        max_num_batched_tokens=96, long_prefill_token_threshold=32, max_num_seqs=16, extra_args=["--trust-me"]
    )
)
ATTACHED = ServingConfig(server=ServerConfig(base_url="http://127.0.0.1:9/v1"))


def variants(tmp_path: Path, text: str) -> list[Arm]:
    path = tmp_path / "variants.yaml"
    path.write_text(text)
    return read_variants(path)


def plan(arms: list[Arm], *, rounds: int, rounds_per_start: int = 1, seed: int = 0) -> list[PlannedBlock]:
    return plan_blocks(arms, SERVING, rounds=rounds, rounds_per_start=rounds_per_start, seed=seed)


def test_a_budget_is_what_differs_and_nothing_hides_it() -> None:
    server = server_of(budget_arms([512])[0], SERVING)
    expected = {**SERVING.server.model_dump(), "max_num_batched_tokens": 512, "long_prefill_token_threshold": 0}
    assert server.model_dump() == expected


def test_step_budgets_share_one_server_as_large_as_the_largest() -> None:
    arms = step_budget_arms([64, 2048, 256])
    servers = [server_of(arm, SERVING) for arm in arms]
    assert servers[0] == servers[1] == servers[2]
    assert servers[0].max_num_batched_tokens == 2048
    assert starts(plan(arms, rounds=5), {arm.name: arm for arm in arms}, SERVING) == 1


def test_a_variant_is_the_deployment_with_its_settings(tmp_path: Path) -> None:
    text = """
    as deployed: {}
    ngram: {extra_args: ["--speculative-config", "{}"], max_num_batched_tokens: 128}
    """
    first, second = check_arms(variants(tmp_path, text), SERVING)
    assert server_of(first, SERVING) == SERVING.server
    assert server_of(second, SERVING).extra_args == ["--trust-me", "--speculative-config", "{}"]
    assert (first.budget, second.budget) == (None, 128)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param("{enable_chunked_prefill: false}", "at least max_model_len", id="chunking off, small budget"),
        pytest.param("{max_num_batched_tokens: 8}", "at least max_num_seqs", id="budget below the sequences"),
        pytest.param("{budget: 8}", "budget", id="unknown setting"),
        pytest.param("{extra_args: [--max-num-seqs=4]}", "max_num_seqs", id="a flag with a key of its own"),
    ],
)
def test_a_server_that_cannot_be_is_a_row_with_its_reason(tmp_path: Path, settings: str, reason: str) -> None:
    (arm,) = check_arms(variants(tmp_path, f"odd: {settings}"), SERVING)
    assert arm.reason is not None
    assert reason in arm.reason
    assert "\n" not in arm.reason


def test_a_step_budget_below_what_runs_at_once_is_refused() -> None:
    small, large = check_arms(step_budget_arms([8, 64]), SERVING)
    assert "max_num_seqs (16)" in str(small.reason)
    assert large.reason is None


def test_a_running_server_takes_step_budgets_only() -> None:
    step, budget = check_arms([*step_budget_arms([64], attached=True), *budget_arms([64])], ATTACHED)
    assert step.reason is None
    assert "--server-url" in str(budget.reason)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[1, 2]", "holds no variants", id="a list"),
        pytest.param("", "holds no variants", id="empty"),
        pytest.param("fast: 3", "fast is 3", id="no settings"),
        pytest.param("a: {b", "is no YAML", id="not YAML"),
    ],
)
def test_what_is_no_file_of_variants(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ArmError, match=message):
        variants(tmp_path, text)


def test_arms_have_names_of_their_own() -> None:
    with pytest.raises(ArmError, match="step 64 is there twice"):
        check_arms(step_budget_arms([64, 64]), SERVING)
    with pytest.raises(ArmError, match="nothing to compare"):
        check_arms([], SERVING)


def test_blocks_are_interleaved_and_every_arm_takes_every_place() -> None:
    arms = step_budget_arms([64, 128, 256])
    blocks = plan(arms, rounds=3)
    names = [block.arm for block in blocks]
    rounds = [names[start : start + 3] for start in (0, 3, 6)]
    assert all(sorted(names) == ["step 128", "step 256", "step 64"] for names in rounds)
    assert [sorted(column) for column in zip(*rounds, strict=True)] == [sorted(rounds[0])] * 3
    assert [block.round for block in blocks] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [block.number for block in blocks] == list(range(9))
    assert len({block.seed for block in blocks}) == 3  # one load a round, the same for every arm


def test_the_seed_chooses_the_order() -> None:
    arms = step_budget_arms([16, 32, 64, 128, 256, 512])
    orders = {tuple(block.arm for block in plan(arms, rounds=1, seed=seed)) for seed in range(5)}
    assert len(orders) > 1
    assert plan(arms, rounds=4, seed=3) == plan(arms, rounds=4, seed=3)


def test_a_server_is_kept_from_one_turn_to_the_next() -> None:
    arms = check_arms([*step_budget_arms([64, 128]), *budget_arms([512])], SERVING)
    by_name = {arm.name: arm for arm in arms}
    kinds = [by_name[block.arm].kind for block in plan(arms, rounds=4)]
    assert kinds in (
        ["step_budget"] * 2 + ["budget"] * 2 + ["step_budget"] * 4 + ["budget"] * 2 + ["step_budget"] * 2,
        ["budget"] + ["step_budget"] * 4 + ["budget"] * 2 + ["step_budget"] * 4 + ["budget"],
    )
    assert starts(plan(arms, rounds=4), by_name, SERVING) == 5
    assert starts(plan(arms, rounds=4, rounds_per_start=4), by_name, SERVING) == 2


def test_refused_arms_are_not_planned() -> None:
    arms = check_arms(step_budget_arms([8, 64]), SERVING)
    assert {block.arm for block in plan(arms, rounds=2)} == {"step 64"}


def test_rounds_are_as_many_as_the_rarest_class_needs() -> None:
    def of(rate: float) -> ClassLoad:
        return ClassLoad(arrivals=Arrivals(rate_per_s=rate))

    workload = Workload(duration_s=60, classes={"camera": of(0.2), "chat": of(1.0)})
    rounds = rounds_for(workload, requests=50, warm_up_s=10, seed=3)

    def counted(upto: int) -> int:
        loads = [workload.model_copy(update={"seed": 3 * 1000 + number}) for number in range(upto)]
        drawn = [request for load in loads for request in draw(load)]
        return sum(request.traffic_class == "camera" and request.due_s >= 10 for request in drawn)

    assert counted(rounds) >= 50 > counted(rounds - 1)


def test_a_class_that_never_gets_there_is_named() -> None:
    workload = Workload(duration_s=1, classes={"camera": ClassLoad(arrivals=Arrivals(rate_per_s=0.001))})
    with pytest.raises(ArmError, match="class camera has"):
        rounds_for(workload, requests=100, warm_up_s=0, seed=0)

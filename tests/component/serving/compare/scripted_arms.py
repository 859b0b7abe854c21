"""A scripted server that plays one answer a class, and the means to run comparisons against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serving.compare.bench import Means
from serving.compare.hosts import RunningServer
from serving.compare.plan import Arm, Experiment, PlannedBlock
from serving.config import ClassConfig, ServerConfig, ServingConfig
from serving.load.contents import Pixels
from serving.workload import Arrivals, ClassLoad, Lengths, Pictures, Workload
from tests.scripted_server import DONE, ROLE, Action, Received, Script, Send, Wait, chunk, models, problem, usage

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 0
"""
CLASSES = {
    "camera": ClassConfig(ttft_p95_ms=200, itl_p99_ms=100, max_tokens=64),
    "chat": ClassConfig(ttft_p95_ms=100, itl_p99_ms=60, max_tokens=64),
}


@dataclass(frozen=True)
class Answer:
    """First token after `ttft_s`; then chunks of `tokens` after `gaps_s`."""

    ttft_s: float
    gaps_s: Sequence[float]
    tokens: Sequence[int]

    def script(self, prompt: int = 40) -> Script:
        actions: list[Action] = [Send(ROLE), Wait(self.ttft_s), Send(chunk("a", running=1))]
        running = 1
        for gap_s, tokens in zip(self.gaps_s, self.tokens, strict=True):
            running += tokens
            actions += [Wait(gap_s), Send(chunk("b" * tokens, running=running))]
        return Script(
            [*actions, Send(chunk(finish="length", running=running)), Send(usage(prompt, running)), Send(DONE)]
        )


def class_of(request: Received) -> str:
    """By the message: camera requests carry a picture."""
    content = request.body["messages"][-1]["content"]
    return "chat" if isinstance(content, str) else "camera"


def playing(answers: Mapping[str, Answer] | Callable[[Received], Script]) -> Callable[[Received], Script]:
    """Everything that a run asks a server."""

    def pick(request: Received) -> Script:
        if request.path.endswith("/chat/completions"):
            return answers(request) if callable(answers) else answers[class_of(request)].script()
        if request.path == "/v1/models":
            return models("scripted")
        if request.path == "/metrics":
            return Script([Send(METRICS.encode())], headers={"content-type": "text/plain"})
        return problem(404, {"error": {"message": "no such page"}})

    return pick


class Grey:
    """A picture source that needs no decoding."""

    def picture(self, number: int, width_px: int, height_px: int) -> Pixels:
        return np.full((height_px, width_px, 3), number % 256, dtype=np.uint8)


def load(duration_s: float = 2.0, **changes: ClassLoad) -> Workload:
    """Camera and chat at constant rates."""
    return Workload(
        duration_s=duration_s,
        classes={
            "camera": ClassLoad(
                arrivals=Arrivals(process="constant", rate_per_s=3), prompt=Lengths(mean=6), output=Lengths(mean=8),
                pictures=Pictures(width_px=32, height_px=32),
            ),
            "chat": ClassLoad(
                arrivals=Arrivals(process="constant", rate_per_s=5), prompt=Lengths(mean=12), output=Lengths(mean=8)
            ),
            **changes,
        },
    )  # fmt: skip


def serving(endpoint: str, **timeouts: float) -> ServingConfig:
    return ServingConfig.model_validate(
        {
            "server": ServerConfig(base_url=endpoint).model_dump(),
            "classes": {**{name: item.model_dump() for name, item in CLASSES.items()}, "document": CLASSES["chat"]},
            "timeouts": timeouts,
        }
    )


def means(endpoint: str) -> Means:
    settings = serving(endpoint)
    return Means(serving=settings, host=RunningServer(settings.server, api_key=None), pictures=Grey())


def experiment(
    workload: Workload, *, rounds: int = 1, arms: Sequence[str] = ("as it runs",), drain_s: float = 2.0, **more: object
) -> Experiment:
    names = list(arms)
    plan = [
        PlannedBlock(number=number, arm=name, round=number // len(names), seed=number // len(names))
        for number, name in enumerate(names * rounds)
    ]
    return Experiment.model_validate(
        {
            "name": "scripted", "created_s": 1.0, "command": ["framechat", "compare"], "config": {},
            "workload": workload, "classes": CLASSES, "arms": [Arm(name=name, kind="variant") for name in names],
            "plan": plan, "seed": 0, "block_s": workload.duration_s, "warm_up_s": 0.5, "drain_s": drain_s,
            "planned_s": 1.0, "attached": True, **more,
        }
    )  # fmt: skip

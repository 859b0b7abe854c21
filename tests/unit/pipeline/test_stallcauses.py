"""Causes of stalls in the running product, from a step file as the plugin writes it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.stallcauses import StallCauses
from serving.latency import Ledger
from serving.records import Gap, Outcome, RequestRecord, monotonic_to_s
from serving.scheduler.plugin.framechat_scheduler.recorder import Step
from serving.scheduler.plugin.framechat_scheduler.stepfile import StepWriter
from serving.scheduler.wiring import STEPS_NAME

CHAT, CAMERA = "chatcmpl-talk-00000000", "chatcmpl-picture-00000000"


@pytest.fixture
def ledger() -> Ledger:
    config = Config()
    return Ledger(config.serving.classes, 300.0)


def write(folder: Path, start_s: float) -> tuple[float, float]:
    """A chat decodes 40 times in 20 ms each, then once beside 400 tokens of a picture's prompt in 1.5 s; the two last
    ends, on the clock of the records."""
    writer = StepWriter(folder / STEPS_NAME)
    now, ends = start_s, []
    for number in range(42):
        long = number == 41
        took = 1.5 if long else 0.02
        parts = [(CHAT, 1 if number else 10, number == 0, 1)] + ([(CAMERA, 400, True, 0)] if long else [])
        features = (1 if number else 0, 400 if long else 0 if number else 10, 0, 0, 0, 0, 0)
        writer.put(Step(now, now + took, took, 512, features, 2, 0, 0, 0.1, parts, [], []))  # type: ignore[arg-type]
        now += took
        ends.append(monotonic_to_s(now))
    writer.close()
    return ends[-2], ends[-1]


def chat(first_s: float, last_s: float, request_id: str = "talk") -> RequestRecord:
    """The record of the chat's last two tokens; of the others the gaps were short."""
    return RequestRecord(
        request_id=request_id, traffic_class="chat", model="m", due_s=first_s - 2, finished_s=last_s,
        outcome=Outcome.DONE, sent_s=first_s - 2, first_token_s=first_s, last_token_s=last_s,
        gaps=(Gap(last_s, last_s - first_s, 1),), completion_tokens=42, tokens_counted=False, finish_reason="stop",
    )  # fmt: skip


def test_the_cause_of_a_stall_is_named(tmp_path: Path, ledger: Ledger) -> None:
    causes = StallCauses(Config(), ledger, tmp_path)
    causes.update(0.0)  # before the server writes anything
    first_s, last_s = write(tmp_path, time.monotonic())
    ledger.begin("picture", "camera", last_s - 2)
    causes.observe(chat(first_s, last_s))
    causes.update(last_s + 0.1)
    assert causes.newest == (), "its last steps may not be written yet"
    causes.update(last_s + 1)
    (stall,) = causes.newest
    assert (stall.traffic_class, stall.request_id, stall.duration_ms) == ("chat", "talk", pytest.approx(1500, abs=0.1))
    assert stall.cause.startswith("prefill of camera request picture (400 tokens)")
    assert stall.cause in stall.parts
    assert len(stall.parts) >= 2
    causes.update(last_s + 2)
    assert causes.newest == (stall,)


def test_a_gap_of_decoding_alone_is_called_that(tmp_path: Path, ledger: Ledger) -> None:
    strict = Config.model_validate({"serving": {"classes": {"chat": {"itl_p99_ms": 10}}}})
    causes = StallCauses(strict, ledger, tmp_path)
    causes.update(0.0)
    _, last_s = write(tmp_path, time.monotonic())
    decoded_s = last_s - 1.5
    causes.observe(chat(decoded_s - 0.02, decoded_s))
    causes.update(last_s + 1)
    (stall,) = causes.newest
    assert stall.cause.startswith("decoding: ")
    assert stall.cause in stall.parts


def test_short_gaps_and_unrecorded_requests(tmp_path: Path, ledger: Ledger) -> None:
    causes = StallCauses(Config(), ledger, tmp_path)
    causes.update(0.0)
    first_s, last_s = write(tmp_path, time.monotonic())
    causes.observe(chat(last_s - 0.05, last_s))
    causes.observe(chat(first_s, last_s, request_id="another"))
    causes.update(last_s + 1)
    (stall,) = causes.newest
    assert stall.request_id == "another"
    assert stall.cause == "the steps of this request were not recorded"
    assert stall.parts == []


async def test_a_server_that_is_not_ours_has_no_causes(tmp_path: Path, ledger: Ledger) -> None:
    config = Config.model_validate({"serving": {"server": {"base_url": "http://127.0.0.1:1/v1"}}})
    for causes in (StallCauses(config, ledger, tmp_path), StallCauses(Config(), ledger, None)):
        causes.observe(chat(1.0, 9.0))
        await causes.run()  # nothing to do: it returns
        assert causes.newest == ()


async def test_a_step_file_of_another_kind_ends_it(
    tmp_path: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / STEPS_NAME).mkdir()
    (tmp_path / STEPS_NAME / "steps-000001.jsonl").write_text('{"format": 99, "names": {}}\n')
    await StallCauses(Config(), ledger, tmp_path).run()
    assert "without their causes" in caplog.text

"""The plugin's record-making, on stand-ins that have only the fields of vLLM's objects it reads."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.records import now_s
from serving.scheduler.control import (
    BudgetRefusedError,
    SchedulerControl,
    SchedulerUnavailableError,
)
from serving.scheduler.plugin.framechat_scheduler import CONTROL_SOCKET, STEPS_FOLDER, make_scheduler, recording
from serving.scheduler.plugin.framechat_scheduler.channel import ControlChannel
from serving.scheduler.plugin.framechat_scheduler.recorder import Step, StepRecorder
from serving.scheduler.plugin.framechat_scheduler.stepfile import StepWriter, client_request_id
from serving.scheduler.steps import StepFileError, StepReader
from serving.scheduler.wiring import SOCKET_NAME, STEPS_NAME

A, B, C = (f"chatcmpl-{name}-0123abcd" for name in ("aaa", "b-b", "ccc"))


def request(prompt: int, known: int, computed_after: int, images: tuple[int, ...] = ()) -> Any:
    features = [
        SimpleNamespace(mm_position=SimpleNamespace(get_num_embeds=lambda tokens=tokens: tokens)) for tokens in images
    ]
    return SimpleNamespace(
        num_prompt_tokens=prompt, num_tokens=known, num_computed_tokens=computed_after, mm_features=features
    )


def output(tokens: dict[str, int], *, encoder: Any = None, finished: Any = (), preempted: Any = ()) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_encoder_inputs=encoder or {},
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
    )


def results(generated: dict[str, list[int]]) -> Any:
    outputs = [SimpleNamespace(request_id=name, new_token_ids=tokens) for name, tokens in generated.items()]
    return {0: SimpleNamespace(outputs=outputs)}


class Recorded:
    """A recorder and what it put."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.recorder = StepRecorder(self.steps.append)

    def step(
        self, out: Any, requests: dict[str, Any], generated: dict[str, list[int]], start: float, end: float
    ) -> Step:
        self.recorder.scheduled(out, requests, start, 256, (2, 1), 0.5)
        self.recorder.completed(out, results(generated), end)
        return self.steps[-1]


def test_a_step_with_everything() -> None:
    """A chat decodes at context 50; a picture's prompt goes from 100 to 164 of 200, with its picture encoded."""
    step = Recorded().step(
        output({A: 1, B: 64}, encoder={B: [0, 2]}, preempted=[C]),
        {A: request(20, 50, 50), B: request(200, 200, 164, images=(64, 9, 32))},
        {A: [7]},
        10.0,
        10.25,
    )
    pairs = 64 * 100 + 64 * 65 // 2
    assert step == Step(
        start_s=10.0,
        end_s=10.25,
        duration_s=0.25,
        budget=256,
        features=(1, 64, 50, pairs, 164, 96, 2),
        running=2,
        waiting=1,
        preempted=1,
        kv_cache_usage=0.5,
        requests=[(A, 1, False, 1), (B, 64, True, 0)],
        encoded=[(B, 96, 2)],
        finished=[],
    )


@pytest.mark.parametrize(
    ("state", "tokens", "prefill"),
    [
        pytest.param((100, 100, 100), 100, True, id="a whole prompt"),
        pytest.param((257, 257, 257), 1, True, id="one token left of a prompt"),
        pytest.param((100, 101, 101), 1, False, id="first decode"),
        pytest.param((100, 100, 101), 1, False, id="first decode before the first token is known (asynchronous)"),
        pytest.param((100, 150, 150), 150, True, id="everything again after a preemption"),
        pytest.param((100, 150, 130), 20, True, id="a part of the answer again after a preemption"),
        pytest.param((100, 150, 153), 4, False, id="three drafted tokens"),
    ],
)
def test_prefill_and_decode_are_told_apart(state: tuple[int, int, int], tokens: int, prefill: bool) -> None:
    step = Recorded().step(output({A: tokens}), {A: request(*state)}, {}, 1.0, 2.0)
    assert step.requests == [(A, tokens, prefill, 0)]
    assert step.features[:2] == ((0, tokens) if prefill else (tokens, 0))


def test_overlapping_steps_are_timed_between_completions() -> None:
    recorded = Recorded()
    first, second = output({A: 1}), output({A: 1})
    requests = {A: request(10, 20, 20)}
    recorded.recorder.scheduled(first, requests, 1.0, 256, (1, 0), 0.1)
    recorded.recorder.scheduled(second, requests, 1.5, 128, (1, 0), 0.1)
    recorded.recorder.completed(first, results({A: [1]}), 2.0)
    recorded.recorder.completed(second, results({A: [2]}), 3.0)
    assert [(step.start_s, step.duration_s, step.budget) for step in recorded.steps] == [
        (1.0, 1.0, 256),
        (1.5, 1.0, 128),
    ]


def test_an_empty_step_is_none_and_its_finished_requests_are_kept() -> None:
    recorded = Recorded()
    recorded.recorder.scheduled(output({}, finished=[B]), {}, 1.0, 256, (0, 0), 0.0)
    recorded.recorder.completed(output({}), results({}), 1.1)
    assert recorded.steps == []
    assert recorded.step(output({A: 1}), {A: request(10, 20, 20)}, {}, 2.0, 3.0).finished == [B]


@pytest.mark.parametrize(
    ("internal", "ours"),
    [
        pytest.param("chatcmpl-aaa-0123abcd", "aaa", id="chat"),
        pytest.param("chatcmpl-due-12-of-9-0123abcd", "due-12-of-9", id="our id has dashes"),
        pytest.param("1_chatcmpl-aaa-0123abcd", "aaa", id="second of n answers"),
        pytest.param("chatcmpl-aaa", "aaa", id="without the random part"),
        pytest.param("warm-up", "warm-up", id="somebody else's"),
    ],
)
def test_our_request_id(internal: str, ours: str) -> None:
    assert client_request_id(internal) == ours


# --- files -----------------------------------------------------------------------------------------------------------


def a_step(number: int, *names: str, finished: tuple[str, ...] = ()) -> Step:
    start = time.monotonic()
    return Step(
        start, start + 0.03, 0.03, 256, (len(names), 0, 9, 0, 0, 0, 0), 1, 0, 0, 0.25,
        [(name, 1, False, number) for name in names], [], list(finished),
    )  # fmt: skip


def test_what_is_written_is_read_once(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / STEPS_NAME)
    reader = StepReader(tmp_path)
    assert reader.read() == []
    before = now_s()
    step = a_step(3, A, B)._replace(
        features=(2, 64, 9, 70, 164, 96, 2), requests=[(A, 1, False, 1), (B, 64, True, 0)], encoded=[(B, 96, 2)]
    )
    writer.put(step)
    writer.close()
    (row,) = reader.read(block=4, arm="b")
    assert reader.read() == []
    assert (row.block, row.arm, row.step) == (4, "b", 0)
    assert before <= row.start_s <= row.end_s - 0.03 + 1e-5
    assert row.end_s <= now_s() + 0.03
    assert (row.request_ids, row.request_tokens, row.request_prefill) == (("aaa", "b-b"), (1, 64), (False, True))
    assert row.request_outputs == (1, 0)
    assert (row.encoder_request_ids, row.encoder_request_tokens) == (("b-b",), (96,))
    assert (row.decode_tokens, row.prefill_pairs, row.encoder_items) == (2, 70, 2)
    assert (row.duration_s, row.budget, row.running, row.kv_cache_usage) == (0.03, 256, 1, 0.25)
    file = next((tmp_path / STEPS_NAME).iterdir())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_reader_may_begin_now_and_follows_the_next_files(tmp_path: Path) -> None:
    folder = tmp_path / STEPS_NAME
    first = StepWriter(folder)
    first.put(a_step(1, A))
    first.close()
    reader = StepReader(tmp_path, from_now=True)
    second = StepWriter(folder, file_bytes=1)  # a file for every batch
    for number, name in enumerate((A, B, C)):
        second.put(a_step(number, name))
        deadline = time.monotonic() + 5
        while second.written <= number:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    second.close()
    assert [row.request_ids for row in reader.read()] == [("aaa",), ("b-b",), ("ccc",)]
    assert len(list(folder.iterdir())) == 4, "never more than are kept"
    assert reader.missed == 0


def test_a_reader_that_begins_now_knows_the_requests_from_before(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / STEPS_NAME)
    writer.put(a_step(1, A, B))
    deadline = time.monotonic() + 5
    while not writer.written:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reader = StepReader(tmp_path, from_now=True)
    writer.put(a_step(2, B, C))
    writer.close()
    assert [row.request_ids for row in reader.read()] == [("b-b", "ccc")]


def test_files_are_thinned_out_and_that_is_said(tmp_path: Path) -> None:
    reader = StepReader(tmp_path, from_now=True)
    for name in (A, B, C):
        writer = StepWriter(tmp_path / STEPS_NAME, files_kept=2)
        writer.put(a_step(1, name))
        writer.close()
        if name == A:
            assert len(reader.read()) == 1
    assert [row.request_ids for row in reader.read()] == [("b-b",), ("ccc",)]
    assert reader.missed == 1


def test_a_finished_request_is_forgotten(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / STEPS_NAME)
    writer.put(a_step(1, A, B))
    writer.put(a_step(2, B, finished=(A,)))
    writer.close()
    assert list(writer._names) == [B]
    assert [row.request_ids for row in StepReader(tmp_path).read()] == [("aaa", "b-b"), ("b-b",)]


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / STEPS_NAME, queue_steps=10)
    for number in range(30):  # the writer sleeps 50 ms before it takes anything
        writer.put(a_step(number, A))
    writer.put(a_step(30, A))
    writer.close()
    reader = StepReader(tmp_path)
    assert len(reader.read()) == writer.written
    assert reader.dropped == writer.dropped > 0
    assert writer.written + writer.dropped == 31


def test_a_disk_that_is_full_costs_steps_and_nothing_else(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / STEPS_NAME)
    assert writer._file is not None
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the writer closes it
    writer._file.close()
    writer._file = full
    writer.put(a_step(1, A))
    deadline = time.monotonic() + 5
    while not writer.dropped:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    writer.put(a_step(2, A))
    writer.close()
    assert (writer.dropped, writer.written) == (1, 1)
    assert [row.request_ids for row in StepReader(tmp_path).read()] == [("aaa",)]


def test_half_a_line_waits_for_the_rest(tmp_path: Path) -> None:
    writer = StepWriter(tmp_path / STEPS_NAME)
    writer.put(a_step(1, A))
    writer.close()
    file = next((tmp_path / STEPS_NAME).iterdir())
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    reader = StepReader(tmp_path)
    assert reader.read() == []
    file.write_bytes(whole)
    assert len(reader.read()) == 1


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"format": 99, "names": {}}\n', id="another format"),
        pytest.param("nonsense\n", id="no JSON"),
        pytest.param('{"names": {}}\n', id="no header"),
        pytest.param('{"format": 1, "names": {}}\n[1, 2, 3]\n', id="another list"),
    ],
)
def test_a_file_that_is_none_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / STEPS_NAME).mkdir()
    (tmp_path / STEPS_NAME / "steps-000001.jsonl").write_text(text)
    with pytest.raises(StepFileError, match="steps"):
        StepReader(tmp_path).read()


# --- control channel -------------------------------------------------------------------------------------------------


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[ControlChannel]:
    figures = {"asynchronous": True, "steps": 5, "dropped": 0}
    made = ControlChannel(tmp_path / SOCKET_NAME, configured=256, least=16, most=512, figures=lambda: figures)
    yield made
    made.close()


def test_the_step_budget_is_set_and_back(channel: ControlChannel, tmp_path: Path) -> None:
    control = SchedulerControl(tmp_path)
    state = control.state()
    assert (state.step_budget, state.configured, state.least, state.most) == (256, 256, 16, 512)
    assert (state.asynchronous, state.steps) == (True, 5)
    assert control.set_step_budget(64).step_budget == channel.budget == 64
    assert control.set_step_budget(None).step_budget == channel.budget == 256
    assert stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode) == 0o600


@pytest.mark.parametrize("tokens", [0, -1, 15, 513])
def test_a_budget_out_of_bounds_is_refused(channel: ControlChannel, tmp_path: Path, tokens: int) -> None:
    with pytest.raises(BudgetRefusedError, match=f"{tokens}, allowed: 16 to 512"):
        SchedulerControl(tmp_path).set_step_budget(tokens)
    assert channel.budget == 256


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b'{"op":"stop"}\n', b'{"op":"set_step_budget","tokens":true}\n'])
def test_nonsense_is_answered_and_changes_nothing(channel: ControlChannel, line: bytes) -> None:
    assert "error" in channel.answer(line)
    assert channel.budget == 256


def test_a_client_that_goes_away_does_not_end_the_channel(channel: ControlChannel, tmp_path: Path) -> None:
    for data in (b"", b'{"op":', b"x" * 10_000):
        with socket.socket(socket.AF_UNIX) as rude:
            rude.connect(str(tmp_path / SOCKET_NAME))
            rude.sendall(data)
    assert SchedulerControl(tmp_path).state().step_budget == 256


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnavailableError, match="scheduler_plugin"):
        SchedulerControl(tmp_path).state()


def test_a_folder_whose_path_is_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 20) / ("deeper" * 20)
    folder.mkdir(parents=True)
    made = ControlChannel(folder / SOCKET_NAME, configured=9, least=1, most=9, figures=lambda: {
        "asynchronous": False, "steps": 0, "dropped": 0})  # fmt: skip
    try:
        assert SchedulerControl(folder).set_step_budget(3).step_budget == 3
    finally:
        made.close()


# --- the scheduler ---------------------------------------------------------------------------------------------------


class Base:
    """The parts of vLLM's scheduler that the plugin touches; two requests that decode."""

    def __init__(self, *, vllm_config: Any) -> None:
        self.scheduler_config = vllm_config.scheduler_config
        self.max_num_scheduled_tokens = 256
        self.block_size = 16
        self.need_mamba_block_aligned_split = False
        self.requests: dict[str, Any] = {A: request(10, 20, 20)}
        self.budgets: list[int] = []
        self.down = False

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.budgets.append(self.max_num_scheduled_tokens)
        return output({A: 1})

    def update_from_output(self, scheduler_output: Any, answer: Any) -> Any:
        return results({A: [1]})

    def get_request_counts(self) -> tuple[int, int]:
        return 1, 0

    def get_kv_cache_usage(self) -> float:
        return 0.5

    def shutdown(self) -> None:
        self.down = True


def vllm_config(**scheduling: Any) -> Any:
    values = {
        "async_scheduling": False, "enable_chunked_prefill": True, "disable_chunked_mm_input": False,
        "max_num_batched_tokens": 512,
    } | scheduling  # fmt: skip
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**values),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        diffusion_config=None,
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STEPS_FOLDER, str(tmp_path / STEPS_NAME))
    monkeypatch.setenv(CONTROL_SOCKET, str(tmp_path / SOCKET_NAME))
    return tmp_path


def test_the_scheduler_records_and_obeys(folder: Path) -> None:
    scheduler = recording(Base)(vllm_config=vllm_config())
    for _ in range(2):
        scheduler.update_from_output(scheduler.schedule(), None)
    SchedulerControl(folder).set_step_budget(32)
    scheduler.update_from_output(scheduler.schedule(True), None)
    scheduler.shutdown()
    rows = StepReader(folder).read()
    assert scheduler.budgets == [row.budget for row in rows] == [256, 256, 32]
    assert [row.request_ids for row in rows] == [("aaa",)] * 3
    assert scheduler.down
    assert not (folder / SOCKET_NAME).exists()
    names = {thread.name for thread in threading.enumerate()}
    assert "framechat-steps" not in names


@pytest.mark.parametrize(
    "scheduling",
    [pytest.param({"enable_chunked_prefill": False}, id="unchunked"),
     pytest.param({"disable_chunked_mm_input": True}, id="whole pictures")],
)  # fmt: skip
def test_prompts_that_could_never_be_scheduled_are_not_made(folder: Path, scheduling: dict[str, Any]) -> None:
    scheduler = recording(Base)(vllm_config=vllm_config(**scheduling))
    with pytest.raises(BudgetRefusedError, match="256 to 512"):
        SchedulerControl(folder).set_step_budget(255)
    scheduler.shutdown()


def test_a_fault_of_ours_does_not_stop_the_engine(folder: Path) -> None:
    scheduler = recording(Base)(vllm_config=vllm_config())
    scheduler.requests = {}
    scheduler.schedule()
    scheduler.update_from_output(scheduler.schedule(), None)
    assert scheduler.budgets == [256, 256]
    scheduler.shutdown()
    assert StepReader(folder).read() == []


@pytest.mark.parametrize("case", ["another interface", "several engines", "no environment", "folder cannot be made"])
def test_where_it_does_not_fit_vllms_own_runs(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, base = vllm_config(), Base
    if case == "another interface":
        base = type("Older", (), {"__init__": lambda self, *, vllm_config: None})  # type: ignore[assignment]
    elif case == "several engines":
        config.parallel_config.data_parallel_size = 2
    elif case == "no environment":
        monkeypatch.delenv(CONTROL_SOCKET)
    else:
        (folder / STEPS_NAME).write_text("in the way")
    monkeypatch.setattr("serving.scheduler.plugin.framechat_scheduler.own_choice", lambda _config: base)
    assert type(make_scheduler(vllm_config=config)) is base
    assert "stays off" in caplog.text


def test_the_plugin_imports_without_the_app(tmp_path: Path) -> None:
    """Only the standard library, and only from its own folder."""
    import subprocess
    import sys

    from serving.scheduler.wiring import Wiring

    wiring = Wiring(tmp_path)
    module, _, name = wiring.arguments[1].partition(".")
    code = (
        f"import sys, {module}; print(callable({module}.{name}), [m for m in sys.modules if m in ('numpy', 'serving')])"
    )
    env = {"PATH": os.environ["PATH"], **wiring.environment({})}
    done = subprocess.run([sys.executable, "-S", "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "[]"]
    assert json.loads(json.dumps(wiring.environment({"PYTHONPATH": "/x"})))["PYTHONPATH"].endswith(":/x")

"""The scheduler plugin in the real vLLM: whose tokens each step has, the budget in force, and who caused a gap."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path

import pytest

from pipeline.config import load_config
from pipeline.serverwatch import STATUS_FILE_VARIABLE
from serving.client import ModelClient, ModelRequest
from serving.compare.attribution import Attribution, Part, attribute_gaps, in_words
from serving.compare.tables import RequestRow, StepRow, request_row
from serving.records import Outcome, RequestRecord, TokenEvent, now_s
from serving.scheduler.control import BudgetRefusedError, SchedulerControl
from serving.scheduler.steps import StepReader
from serving.workload import PlannedRequest
from tests.component.pipeline.conftest import events, run_service, wait_for
from tests.integration.served import SAMPLE_CONFIG, ServedModel
from tests.integration.test_chunking import chat, computed, description, until_idle

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture
async def steps(model_server: ServedModel) -> StepReader:
    """Steps from now on, after the last of what another test asked for."""
    await until_idle(model_server.endpoint)
    return StepReader(model_server.log_path.parent, from_now=True)


@pytest.fixture
def control(model_server: ServedModel) -> SchedulerControl:
    return SchedulerControl(model_server.log_path.parent)


async def read_until(reader: StepReader, records: list[RequestRecord]) -> list[StepRow]:
    """The steps, once they hold every token of these requests."""
    wanted = {record.request_id: record.completion_tokens for record in records}
    found: list[StepRow] = []
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found += reader.read()
        given: dict[str, int] = defaultdict(int)
        for step in found:
            for name, out in zip(step.request_ids, step.request_outputs, strict=True):
                given[name] += out
        if all(given[name] == tokens for name, tokens in wanted.items()):
            return found
        await asyncio.sleep(0.05)
    pytest.fail(f"the step records give {dict(given)}, the answers {wanted}")


def as_row(record: RequestRecord) -> RequestRow:
    planned = PlannedRequest(0, record.traffic_class, 0.0, record.prompt_tokens or 0, record.completion_tokens or 0)
    return request_row(record, planned, block=0, arm="", image_tokens=0, warm_up=False, behind_cap_s=0.0)


def engine_parts(gap: Attribution) -> list[Part]:
    """What the engine did in a gap, the longest first. A busy machine may hold up any token on its way to us for longer
    than a prefill takes, and the attribution then says so rightly."""
    return [part for part in gap.parts if part.cause not in ("front_end", "client", "unexplained")]


def engine_s(gap: Attribution) -> float:
    return sum(part.duration_s for part in engine_parts(gap))


async def test_step_records_have_our_ids_and_every_token(
    model_server: ServedModel, client: ModelClient, steps: StepReader, control: SchedulerControl
) -> None:
    before = control.state()
    requests = [
        chat("Tell me about bridges.", max_tokens=12),
        description(model_server, seed=31),
        chat("Tell me about bridges.", max_tokens=5),
    ]
    records = [await request.result() for request in [client.start(request) for request in requests]]
    rows = await read_until(steps, records)
    prefilled: dict[str, int] = defaultdict(int)
    for row in rows:
        assert row.prefill_tokens + row.decode_tokens == sum(row.request_tokens) <= row.budget
        assert row.start_s < row.end_s
        assert 0 < row.duration_s <= row.end_s - row.start_s + 1e-5
        for name, tokens, prefill in zip(row.request_ids, row.request_tokens, row.request_prefill, strict=True):
            prefilled[name] += tokens if prefill else 0
    assert set(prefilled) == {record.request_id for record in records}
    assert dict(prefilled) == {record.request_id: computed(record) for record in records}
    encoded = [name for row in rows for name in row.encoder_request_ids]
    assert encoded == [requests[1].request_id]
    assert sum(row.encoder_tokens for row in rows) == model_server.config.image_tokens_per_description()
    for record in records:
        mine = [row for row in rows if record.request_id in row.request_ids]
        assert record.due_s < mine[0].start_s
        assert record.first_token_s is not None
        assert mine[-1].end_s < record.finished_s
    state = control.state()
    assert state.steps - before.steps >= len(rows)
    assert (state.dropped, steps.missed) == (0, 0)
    assert not state.asynchronous, "vLLM's choice on a CPU"


async def test_the_step_budget_moves_without_a_restart(
    model_server: ServedModel, client: ModelClient, steps: StepReader, control: SchedulerControl
) -> None:
    largest = model_server.config.serving.server.max_num_batched_tokens
    assert control.state().step_budget == control.state().most == largest
    try:
        assert control.set_step_budget(20).step_budget == 20
        small = await client.start(description(model_server, seed=32)).result()
        rows = await read_until(steps, [small])
        assert {row.budget for row in rows} == {20}
        assert max(row.prefill_tokens + row.decode_tokens for row in rows) == 20
        with pytest.raises(BudgetRefusedError, match=f"allowed: 1 to {largest}"):
            control.set_step_budget(largest + 1)
    finally:
        control.set_step_budget(None)
    back = await client.start(description(model_server, seed=33)).result()
    rows = await read_until(steps, [back])
    assert {row.budget for row in rows} == {largest}
    assert max(row.prefill_tokens for row in rows) > 20


async def test_a_long_prompt_is_named_as_the_cause_of_the_longest_gap(
    model_server: ServedModel, client: ModelClient, steps: StepReader
) -> None:
    streaming = asyncio.Event()
    loop = asyncio.get_running_loop()
    came = 0

    def token_came(_event: TokenEvent) -> None:
        nonlocal came
        came += 1
        if came == 24:  # enough steps that only decode
            loop.call_soon_threadsafe(streaming.set)

    talk = client.start(chat("Tell me a long story about a mill.", max_tokens=72), on_token=token_came)
    await streaming.wait()
    report = " ".join(f"Page {number} of the report of {now_s():.6f}." for number in range(40))
    injected = ModelRequest(
        traffic_class="document",
        messages=[{"role": "user", "content": report}],
        max_tokens=2,
        due_s=now_s(),
        extra_body={"ignore_eos": True},
    )
    document = await client.start(injected).result()
    chatted = await talk.result()
    assert (document.outcome, chatted.outcome) == (Outcome.DONE, Outcome.DONE)
    rows = await read_until(steps, [document, chatted])
    gaps = attribute_gaps([as_row(chatted), as_row(document)], rows)
    longest = max((gap for gap in gaps if gap.request_id == chatted.request_id), key=engine_s)
    assert longest.missing is None
    assert sum(part.duration_s for part in longest.parts) == pytest.approx(longest.duration_s, rel=0.05)
    main = engine_parts(longest)[0]
    assert (main.cause, main.request_id, main.traffic_class) == ("prefill", document.request_id, "document"), [
        in_words(part) for part in longest.parts
    ]


def test_the_running_product_names_the_cause_of_a_stall(
    model_server: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second chat comes with a long text; the first one's answer is stopped as soon as its prefill is over."""
    monkeypatch.setenv(STATUS_FILE_VARIABLE, str(model_server.log_path.parent / "model-server.json"))
    limits = "ttft_p95_ms: 60000, itl_p99_ms"
    # Every gap is a stall, for how long a prefill's are depends on the machine.
    chats = f"chat: {{{limits}: 1, max_tokens: 400, extra_body: {{ignore_eos: true}}}}"
    config = load_config(
        SAMPLE_CONFIG,
        overrides=[
            f"serving.server.port={model_server.config.serving.server.port}",
            f"store.folder={tmp_path}",
            f"run_folder={tmp_path}",
            "cameras=[]",
            f"serving.classes={{camera: {{{limits}: 500, max_tokens: 16}}, {chats}, document: {{{limits}: 500, "
            "max_tokens: 16}}",
        ],
    )
    with run_service(config) as service:

        def ask(text: str) -> str:
            """The answer's id, once it has a token."""
            question = {"session_id": service.post("/chat/sessions").json()["session_id"], "text": text}
            heard = ""
            with service.stream("POST", "/chat", json=question, timeout=120) as answer:
                for part in answer.iter_text():
                    heard += part
                    if "event: token" in heard:
                        return str(events(heard)[0][2]["answer_id"])
            pytest.fail(f"no token came: {heard}")

        first = ask("Tell a story.")
        ask(" ".join(f"Page {number} of {tmp_path.name}." for number in range(120)))
        service.post(f"/chat/answers/{first}/cancel")
        stalls = wait_for(lambda: service.get("/latency").json()["stalls"])
    assert all(stall["traffic_class"] == "chat" for stall in stalls)
    elsewhere = ("the server's front end", "the client's own lag", "unexplained")
    by_engine = [stall for stall in stalls if not stall["cause"].startswith(elsewhere)]
    longest = max(by_engine, key=lambda stall: stall["duration_ms"])
    assert longest["cause"].startswith("prefill of chat request"), stalls
    assert longest["cause"] in longest["parts"]

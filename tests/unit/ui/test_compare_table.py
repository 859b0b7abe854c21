from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from serving.compare.summary import summarise
from serving.compare.tables import BlockData, Results
from tests.comparison_data import comparison
from ui.compare_table import show_summary


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return comparison(
        tmp_path_factory.mktemp("shown"), budgets=(64, 256, 4096), rounds=3, block_s=30, refused=("step 4096",)
    )


def shown(results: Results) -> str:
    console = Console(file=io.StringIO(), width=140)
    show_summary(console, summarise(results, resamples=100), Path("comparisons/toy"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_arm_and_class_is_shown_and_what_was_refused(results: Results) -> None:
    text = shown(results)
    for words in (
        "camera: TTFT p95 within 6000 ms",
        "chat: TTFT p95 within 4000 ms",
        "step 4096 is refused",
        "step 256 / step 64",
    ):
        assert words in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("step 256 ")]
    assert len(rows) == 2, text
    summary = summarise(results, resamples=100)
    chat = summary.arms[1].classes["chat"]
    assert f"{chat.done}/{chat.requests}" in rows[1]
    assert f"{chat.itl.max_ms:,.0f}" in rows[1]


def test_blocks_that_do_not_count_are_named(results: Results) -> None:
    blocks = [
        BlockData(item.info.model_copy(update={"invalid": "the event loop was late"}), item.requests, item.steps)
        if item.info.arm == "step 64"
        else item
        for item in results.blocks
    ]
    text = shown(Results(results.folder, results.experiment, blocks))
    assert "step 64: block 0 is left out: the event loop was late" in text
    assert "step 64: no block that counts" in text

from __future__ import annotations

import io

from rich.console import Console

from serving.records import now_s
from ui.parts import PartState
from ui.startscreen import StartScreen


def state(name: str, kind: str, detail: str) -> PartState:
    return PartState(name, kind, detail, now_s())  # type: ignore[arg-type]


def test_plain_lines_where_output_is_no_terminal() -> None:
    output = io.StringIO()
    with StartScreen(Console(file=output, width=40)) as screen:
        screen.update(state("model server", "starting", "loading weights: 50%"))
        screen.update(state("model server", "starting", "loading weights: 50%"))
        screen.update(state("model server", "ready", "vLLM 0.32.0 with " + "a-long-name-" * 5))
        screen.line("[bold]as it is[/bold]")
    lines = output.getvalue().splitlines()
    assert len(lines) == 3, "one line a change, never wrapped"
    assert lines[0].endswith("s] model server: starting: loading weights: 50%")
    assert lines[2] == "[bold]as it is[/bold]"


def test_a_live_table_in_a_terminal() -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=True, color_system=None)
    with StartScreen(console) as screen:
        screen.update(state("model server", "starting", "loading weights: 50%"))
        screen.update(state("page", "ready", "ready"))
        screen.line("Open http://127.0.0.1:8501")
        screen.settle()
        screen.update(state("model server", "ready", "vLLM 0.32.0 with sample"))
    text = output.getvalue()
    assert "loading weights: 50%" in text
    assert "✓" in text
    assert "Open http://127.0.0.1:8501" in text
    assert "model server: ready: vLLM 0.32.0 with sample" in text.splitlines()[-1]

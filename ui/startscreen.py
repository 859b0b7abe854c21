"""How a start looks in the terminal: a live table with elapsed times, or plain lines where output is not a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from serving.records import now_s
from ui.parts import PartState

_MARKS = {"ready": "[green]✓[/green]", "down": "[red]✗[/red]"}


class StartScreen:
    """Shows the parts' states until all are ready; from then on only what changes, line by line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._states: dict[str, PartState] = {}
        self._started_s = now_s()
        self._said: dict[str, tuple[str, str]] = {}
        self._spinners: dict[str, Spinner] = {}
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def settle(self) -> None:
        """End the live table; later changes come as lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, state: PartState) -> None:
        """Take over a part's new state."""
        self._states[state.name] = state
        if self._live is not None:
            return
        if self._said.get(state.name) != (state.state, state.detail):
            self._said[state.name] = (state.state, state.detail)
            elapsed = now_s() - self._started_s
            self.line(f"[{elapsed:6.1f} s] {state.name}: {_words(state)}")

    def line(self, text: str) -> None:
        """Print one line, above the table while there is one. Never wrapped, nor styled."""
        self._console.print(Text(text), soft_wrap=True)

    def error(self, text: str) -> None:
        """Print one error line."""
        self._console.print(Text(text, style="bold red"), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for state in list(self._states.values()):
            mark = _MARKS.get(state.state) or self._spinners.setdefault(state.name, Spinner("dots"))
            elapsed = "" if state.state == "ready" else f"{now_s() - state.since_s:5.0f} s"
            table.add_row(mark, escape(state.name), elapsed, Text(_words(state), overflow="ellipsis", no_wrap=True))
        return table


def _words(state: PartState) -> str:
    return state.detail if state.detail.startswith(state.state) else f"{state.state}: {state.detail}"

"""The chat in the terminal: answers as they stream, each followed by its latency.

Ctrl-C stops an answer; a second one, or one at the prompt, leaves. Lines piped in are asked one after the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from pipeline.config import Config
from serving.records import Outcome, now_s
from ui.chat_routes import ChatRouteError, Figures, Piece, Reply, Route, open_route
from ui.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE, EXIT_USAGE

_PROMPT = "> "
# What a terminal could take for a command: a model's words must not move its cursor or change its title.
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def run_chat(config: Config, message: str | None = None) -> int:
    """Chat until the input ends; with `message`, ask that and leave.

    Returns:
        The exit code: 0; 1 an answer failed; 2 the message is at fault; 3 the model server could not be reached; 130
        interrupted. Of several answers the last failure's.
    """
    for stream in (sys.stdin, sys.stdout):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        route = open_route(config)
    except ChatRouteError as error:
        return _complain(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    try:
        return _converse(route, config.chat.max_message_chars, message)
    except KeyboardInterrupt:
        typer.echo()
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read us has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    finally:
        route.close()


def _converse(route: Route, max_chars: int, message: str | None) -> int:
    typing = message is None and sys.stdin.isatty()
    if typing:
        typer.secho(f"{route.where}. Ctrl-C stops an answer; twice, or here, leaves.", dim=True)
    code = 0
    for text in _typed() if typing else _given(message):
        due_s = now_s()  # Enter was pressed
        try:
            if len(text) > max_chars:
                problem = f"the message has {len(text):,} characters, allowed: {max_chars:,} (chat.max_message_chars)"
                raise ChatRouteError(problem, wrong_input=True)
            figures = _speak(route.ask(text, due_s), leave_when_stopped=not typing)
        except ChatRouteError as error:
            code = _complain(error)
            continue
        typer.secho(_line(figures), dim=True)
        if figures.outcome is Outcome.FAILED:
            code = _complain(ChatRouteError(figures.note or "the answer failed", unreachable=figures.unreachable))
    return 0 if typing else code


def _typed() -> Iterator[str]:
    """Lines typed at the prompt, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - gives input() its editing keys
    while True:
        try:
            text = input(_PROMPT).strip()
        except EOFError:
            typer.echo()
            return
        if text:
            yield text


def _given(message: str | None) -> Iterator[str]:
    """The one message, or the lines of standard input."""
    lines = sys.stdin if message is None else [message]
    yield from (text for line in lines if (text := line.strip()))


def _speak(reply: Reply, *, leave_when_stopped: bool) -> Figures:
    """Write an answer as it comes; return its figures.

    Raises:
        KeyboardInterrupt: Ctrl-C a second time, or once when `leave_when_stopped`.
    """
    stopping = False
    last = ""
    while True:
        try:
            item = reply.items.get()
            if isinstance(item, Figures):
                break
            last = _write(item) or last
        except KeyboardInterrupt:
            if stopping:
                raise
            stopping = True
            _stop(reply)
    if last and not last.endswith("\n"):
        typer.echo()
    if stopping and leave_when_stopped:
        raise KeyboardInterrupt
    return item


def _stop(reply: Reply) -> None:
    try:
        reply.stop()
    except ChatRouteError as error:
        _complain(error)


def _write(piece: Piece) -> str:
    """Write one piece, without control characters; reasoning only where someone looks on. Returns what was written."""
    text = piece.text.translate(_CONTROL)
    if piece.reasoning:
        if not sys.stdout.isatty():
            return ""
        typer.secho(text, nl=False, dim=True)
    else:
        typer.echo(text, nl=False)
    sys.stdout.flush()
    return text


def _line(figures: Figures) -> str:
    """An answer's latency on one line, milliseconds."""
    itl = ", ".join(
        f"{name} {_number(value)}"
        for name, value in (("p50", figures.itl_p50_ms), ("p95", figures.itl_p95_ms), ("p99", figures.itl_p99_ms))
    )
    tokens = "–" if figures.tokens is None else str(figures.tokens)
    line = f"TTFT {_number(figures.ttft_ms)} ms · ITL {itl} ms · {tokens} tokens"
    shown_elsewhere = figures.outcome is Outcome.FAILED or not figures.note
    return line if shown_elsewhere else f"{line} · {figures.note}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _complain(error: ChatRouteError) -> int:
    """Write the one-line error; return the exit code that fits it."""
    typer.secho(f"framechat: {error}", fg=typer.colors.RED, err=True)
    if error.unreachable:
        return EXIT_UNREACHABLE
    return EXIT_USAGE if error.wrong_input else EXIT_FAILED

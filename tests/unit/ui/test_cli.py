"""The command line itself: help that says what to do, shell completion, and errors of one line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner, Result

from ui.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_UNREACHABLE, EXIT_USAGE, app


def said(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_help_names_the_first_command_every_command_and_the_exit_codes() -> None:
    text = said("--help").output
    assert "Start with framechat up" in text.replace("`", "")
    for code in (0, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED):
        assert f"{code} " in text[text.index("Exit codes") :]
    for command in app.registered_commands:
        assert (command.name or command.callback.__name__) in text if command.callback else False


@pytest.mark.parametrize(
    "command", [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
)
def test_each_command_says_what_it_and_its_options_do(command: str) -> None:
    result = said(command, "--help")
    assert result.exit_code == 0
    bare = [line for line in result.output.splitlines() if line.strip(" │").startswith("--") and len(line.split()) < 4]
    assert bare == [], "an option without a word of help"


def test_completion_knows_the_commands() -> None:
    asked = {"_FRAMECHAT_COMPLETE": "complete_bash", "COMP_WORDS": "framechat wa", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, env=asked, prog_name="framechat").output.split() == ["watch"]
    assert "--install-completion" in said("--help").output


def test_a_wrong_setting_is_one_line_and_exit_code_2() -> None:
    result = said("up", "--set", "detect.rate_hz=often")
    assert result.exit_code == EXIT_USAGE
    (line,) = result.output.splitlines()
    assert "detect.rate_hz" in line
    assert "often" in line

"""Examples below the help of commands: every command has some, and the parser takes them."""

from __future__ import annotations

import shlex

import pytest

from vlm_serve.cli import build_parser, main
from vlm_serve.commands.completion import read_commands
from vlm_serve.commands.help_examples import EXAMPLES


def test_every_command_has_examples() -> None:
    commands = {each.path for each in read_commands(build_parser()) if not each.commands}
    assert commands == set(EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_are_accepted(path: tuple[str, ...]) -> None:
    for command, effect in EXAMPLES[path]:
        start = command.index("vlm-serve ")
        words = shlex.split(command[start:].split("|")[0].split(')"')[0])[1:]
        assert tuple(words[: len(path)]) == path and effect
        build_parser().parse_args(words)


def test_the_help_ends_with_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    said = capsys.readouterr().out.split("examples:\n")[1]
    for command, effect in EXAMPLES["chat",]:
        assert f"  {command}\n      {effect}\n" in said

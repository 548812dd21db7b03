"""Examples below the help of commands: every command has some, and the parser takes them."""

from __future__ import annotations

import argparse
import shlex

import pytest

from vlm_serve.cli import build_parser, main
from vlm_serve.commands.help_examples import EXAMPLES


def commands_of(parser: argparse.ArgumentParser) -> list[tuple[str, ...]]:
    """The words of every command that has none below it."""
    below = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not below:
        return [()]
    named = below[0].choices.items()
    return [(name, *path) for name, command in named for path in commands_of(command)]


def test_every_command_has_examples() -> None:
    assert set(commands_of(build_parser())) == set(EXAMPLES)


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

"""`vlm-serve completion`: scripts that complete commands and flags in bash, zsh and fish.

A script asks the program itself at each completion, so it knows what the parser accepts. A file
name is offered wherever a value or an argument may be one.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_CHOICES = re.compile(r"\{(.+)\}")


def add_completion(commands: Any) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion", help="print a script that completes commands and flags"
    )
    parser.add_argument("shell", choices=SHELLS, help="where the script runs")
    return parser


def script(shell: str) -> str:
    """Return the script for one of `SHELLS`."""
    from argcomplete.shell_integration import shellcode

    return shellcode(["vlm-serve"], shell=shell)


def complete_if_asked(parser: argparse.ArgumentParser) -> None:
    """End the process with what completes the command line, if a script asks for it."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        completer: Any = _values_or_files
        argcomplete.autocomplete(parser, always_complete_options=False, default_completer=completer)


def _values_or_files(*, prefix: str, action: argparse.Action, **_: Any) -> Iterable[str]:
    """Return what may stand for an action. Values of options stand in the metavar alone."""
    from argcomplete.completers import FilesCompleter

    shown = _CHOICES.fullmatch(action.metavar) if isinstance(action.metavar, str) else None
    return shown.group(1).split(",") if shown else FilesCompleter()(prefix)

"""`vlm-serve completion`: scripts that complete commands and flags in bash, zsh and fish.

They are made from the parser, so they know what it accepts. A file name is offered wherever a value
or an argument may be one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_CHOICES = re.compile(r"\{(.+)\}")

_BASH = """\
# Completion of vlm-serve in bash: eval "$(vlm-serve completion bash)"
_vlm_serve() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
    local path="" words="" each
    for each in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$path $each" in
            @PATHS@) path="$path $each" ;;
        esac
    done
    case "$path:$before" in
@VALUES@
        *) case "$path" in
@WORDS@
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _vlm_serve vlm-serve
"""

_ZSH = """\
#compdef vlm-serve
# Completion of vlm-serve in zsh: eval "$(vlm-serve completion zsh)", behind compinit
_vlm_serve() {
    local before="${words[CURRENT-1]}" at="" each
    local -a commands flags values
    for each in "${(@)words[2,CURRENT-1]}"; do
        case "$at $each" in
            @PATHS@) at="$at $each" ;;
        esac
    done
    case "$at:$before" in
@VALUES@
    esac
    if (( $#values )); then
        compadd -a values
        return
    fi
    case "$at" in
@WORDS@
    esac
    if [[ "${words[CURRENT]}" == -* ]]; then
        _describe -o option flags
    elif (( $#commands )); then
        _describe command commands
    else
        _files
    fi
}
compdef _vlm_serve vlm-serve
"""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command.

    Attributes:
        names: all of its spellings.
        help: its effect.
        values: the only values allowed; empty allows all.
        takes_value: a value follows.
    """

    names: tuple[str, ...]
    help: str
    values: tuple[str, ...]
    takes_value: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or the program itself.

    Attributes:
        path: its words, without the program's name.
        commands: name and help of each command below it.
        arguments: values of its arguments without a flag, if they are known.
        flags: its flags.
    """

    path: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]
    arguments: tuple[str, ...]
    flags: tuple[Flag, ...]


def add_completion(commands: Any) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion", help="print a script that completes commands and flags", allow_abbrev=False
    )
    parser.add_argument("shell", choices=SHELLS, help="where the script runs")
    return parser


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of `SHELLS`."""
    found = list(read_commands(parser))
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(found))
    template = _BASH if shell == "bash" else _ZSH
    paths = (f'"{_key(each.path)}"' for each in found if each.path)
    filled = template.replace("@PATHS@", " | ".join(paths))
    values = [
        f'        "{_key(each.path)}:{name}") {_assigned(shell, flag)} ;;'
        for each in found
        for flag in each.flags
        if flag.takes_value
        for name in flag.names
    ]
    words = (_bash_words if shell == "bash" else _zsh_words)(found)
    return filled.replace("@VALUES@", "\n".join(values)).replace("@WORDS@", "\n".join(words))


def read_commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """Yield a parser's command, then those below it."""
    flags: list[Flag] = []
    arguments: list[str] = []
    below: list[tuple[str, str]] = []
    subparsers: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            subparsers |= action.choices
            below += [(each.dest, each.help or "") for each in action._choices_actions]
        elif action.option_strings:
            takes = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
            names, said = tuple(action.option_strings), (action.help or "").replace("%%", "%")
            flags.append(Flag(names, said, _values(action), takes))
        else:
            arguments += _values(action)
    yield Command(path, tuple(below), tuple(arguments), tuple(flags))
    for name, each in subparsers.items():
        yield from read_commands(each, (*path, name))


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Return an action's known values. Those of options stand in the metavar alone."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    shown = _CHOICES.fullmatch(action.metavar) if isinstance(action.metavar, str) else None
    return tuple(shown.group(1).split(",")) if shown else ()


def _key(path: tuple[str, ...]) -> str:
    """Return a path as the scripts gather it: each word behind a space."""
    return "".join(f" {word}" for word in path)


def _assigned(shell: str, flag: Flag) -> str:
    """Return the statement that offers a flag's values; none, and the shell offers files."""
    if shell == "bash":
        return f'words="{" ".join(flag.values)}"'
    return f"values=({' '.join(flag.values)})" if flag.values else "_files; return"


def _bash_words(found: list[Command]) -> Iterator[str]:
    for each in found:
        flags = [name for flag in each.flags for name in flag.names]
        names = [name for name, _ in each.commands] + list(each.arguments)
        plain, dashed = " ".join(names), " ".join(flags)
        yield (
            f'            "{_key(each.path)}") case "$word" in '
            f'-*) words="{dashed}" ;; *) words="{plain}" ;; esac ;;'
        )


def _zsh_words(found: list[Command]) -> Iterator[str]:
    for each in found:
        flags = " ".join(_described(name, flag.help) for flag in each.flags for name in flag.names)
        names = [_described(name, said) for name, said in each.commands]
        names += [_described(name, "") for name in each.arguments]
        yield f'        "{_key(each.path)}") commands=({" ".join(names)}); flags=({flags}) ;;'


def _described(name: str, said: str) -> str:
    """Return a name and its description as one word of zsh."""
    word = name.replace(":", r"\:") + (f":{said}" if said else "")
    return _quoted(word)


def _quoted(text: str) -> str:
    """Return a text in single quotes, for zsh."""
    return "'" + " ".join(text.split()).replace("'", "'\\''") + "'"


def _fish(found: list[Command]) -> Iterator[str]:
    yield "# Completion of vlm-serve in fish: vlm-serve completion fish | source"
    for each in found:
        above = [f"__fish_seen_subcommand_from {word}" for word in each.path]
        below = " ".join(name for name, _ in each.commands)
        if not each.path:
            above = ["__fish_use_subcommand"]
        elif below:
            above.append(f"not __fish_seen_subcommand_from {below}")
        start = f'complete -c vlm-serve -n "{"; and ".join(above)}"'
        for name, said in each.commands:
            yield f"{start} -f -a {name} -d {_fish_quoted(said)}"
        if each.arguments:
            yield f'{start} -f -a "{" ".join(each.arguments)}"'
        for flag in each.flags:
            spelled = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in flag.names
            )
            value = f'-x -a "{" ".join(flag.values)}" ' if flag.values else "-r "
            value = value if flag.takes_value else ""
            yield f"{start} {spelled} {value}-d {_fish_quoted(flag.help)}"


def _fish_quoted(text: str) -> str:
    """Return a text in single quotes, for fish, which knows a backslash in them."""
    return "'" + " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'") + "'"

"""Command-line flags made from options, with errors of one line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vlm_serve.errors import ConfigError
from vlm_serve.options.declared import Option, did_you_mean

_PAIR = re.compile(r"[\w.:/+][\w.:/+-]*=|\{", re.ASCII)
"""How a pair begins: name=value, or an object."""


class Parser(argparse.ArgumentParser):
    """Argument parser with errors of one line and a suggestion of the closest flag.

    A command may have a default `take_late`: a function of the options and the unknown arguments,
    which takes the ones it knows and returns the others.

    Attributes:
        pair_flags: flags that several pairs name=value may follow.
    """

    def __init__(self, *, allow_abbrev: bool = False, **settings: Any) -> None:
        super().__init__(allow_abbrev=allow_abbrev, add_help=False, **settings)
        self.pair_flags: set[str] = set()
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="GROUP",
            help="show all options, or those of one group",
        )

    def format_usage(self) -> str:
        return f"usage: {self._short_usage()}\n"

    def format_help(self) -> str:
        usage, self.usage = self.usage, self._short_usage()
        try:
            return super().format_help()
        finally:
            self.usage = usage

    def _short_usage(self) -> str:
        """Return the usage in one line: a server has a hundred flags."""
        places = [
            self._get_formatter()._format_args(action, action.dest.upper())
            for action in self._actions
            if not action.option_strings
        ]
        return " ".join([self.prog, *places, "[OPTIONS]"]).replace("%", "%%")

    def group_help(self, name: str) -> str:
        """Return the help of one group of options. Ends the process for an unknown one."""
        groups = {str(group.title): group for group in self._action_groups if group._group_actions}
        if name not in groups:
            wrong = f"there is no group {name!r}{did_you_mean(name, groups)}"
            self.error(f"{wrong}; the groups are {', '.join(groups)}")
        formatter = self._get_formatter()
        formatter.start_section(name)
        formatter.add_arguments(groups[name]._group_actions)
        formatter.end_section()
        return formatter.format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = [*action.choices, "--version", "--help"]
            close = did_you_mean(str(value), known)
            self.error(f"there is no command {value!r}{close or ': ' + ', '.join(action.choices)}")
        super()._check_value(action, value)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(self._spread(words), namespace)

    def _spread(self, words: Sequence[str]) -> list[str]:
        """Repeat a flag before each further pair that follows it. With a flag for any number of
        words, argparse would take the model behind the pairs for one more."""
        spread, flag, taken = list[str](), "", False
        for word in words:
            name = word.partition("=")[0]
            if name in self.pair_flags:
                flag, taken = name, word != name
            elif flag and not taken:
                taken = True
            elif flag and _PAIR.match(word):
                spread.append(flag)
            else:
                flag = ""
            spread.append(word)
        return spread

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if hasattr(options, "take_late"):
            unknown = options.take_late(options, unknown)
        if unknown:
            self.error("; ".join(_problems(unknown, self._flags_of(options))))
        return options

    def _flags_of(self, options: argparse.Namespace) -> set[str]:
        """Return the flags of the chosen command."""
        flags: set[str] = set()
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    if parser.get_default("run") is options.run:
                        flags |= parser._option_string_actions.keys()
                    flags |= parser._flags_of(options)
        return flags

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help shows all)\n")


class _Help(argparse.Action):
    """Prints the help of a command, or of one group of its options, and ends the process."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help() if values is None else parser.group_help(values), end="")
        parser.exit()


def _problems(unknown: Sequence[str], flags: set[str]) -> list[str]:
    """Name the arguments without a place; a word behind an unknown flag is its value."""
    named = [name for name in unknown if name.startswith("-")]
    problems = [f"there is no {name}{_instead(name, flags)}" for name in named]
    before = ["", *unknown]
    words = [
        repr(word)
        for earlier, word in zip(before, unknown, strict=False)
        if not word.startswith("-") and not earlier.startswith("-")
    ]
    if words:
        hint = "; put a text of several words into quotes" if len(words) > 1 else ""
        problems.append(f"there is no place for {', '.join(words)}{hint}")
    return problems


_FOREIGN = {
    "--gpu-memory-utilization": "--cache-memory SIZE",
    "--kv-cache-memory-bytes": "--cache-memory SIZE",
    "--swap-space": "--host-cache-memory SIZE",
    "--data-parallel-size": "`vlm-serve deploy --replicas N`",
    "--enforce-eager": "--no-cuda-graphs",
    "--runner": "--task",
    "--ctx-size": "--max-model-len",
    "--n-gpu-layers": "--device",
    "--enable-lora": "--lora-modules NAME=PATH, alone",
    "--mem-fraction-static": "--cache-memory SIZE",
    "--model-path": "--model",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--tp-size": "--tensor-parallel-size",
    "--dp-size": "`vlm-serve deploy --replicas N`",
    "--lora-paths": "--lora-modules NAME=PATH",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-cuda-graph": "--no-cuda-graphs",
    "--quant-policy": "--kv-cache-dtype",
    "--cache-max-entry-count": "--cache-memory SIZE",
    "--linear-prefix-cache-interval-blocks": "--prefix-cache-state-interval",
    "--session-len": "--max-model-len",
    "--max-batch-size": "--max-num-seqs",
    "--cache-block-seq-len": "--block-size",
    "--adapters": "--lora-modules NAME=PATH",
    "--model-name": "--served-model-name",
    "--server-name": "--host",
    "--server-port": "--port",
}
"""Flags of vLLM, llama.cpp, SGLang and LMDeploy that have another name here."""


def _instead(name: str, flags: set[str]) -> str:
    """Return the flag to write in place of an unknown one, as the end of a sentence."""
    foreign = _FOREIGN.get(name.partition("=")[0])
    if foreign is not None:
        return f"; here it is {foreign} (docs/coming-from.md)"
    return did_you_mean(name, flags)


def positive(text: str) -> int:
    """Parse a flag's whole number above 0. Raises ArgumentTypeError for any other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return int(text)


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Add one flag per option, in groups. Flags not given leave no attribute behind."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for item in options:
        if item.group not in groups:
            groups[item.group] = parser.add_argument_group(item.group)
        text = f"{item.help} (default: {item.shown_default})".replace("%", "%%")
        settings: dict[str, Any] = {
            "dest": item.name,
            "default": argparse.SUPPRESS,
            "help": text,
        }
        if item.kind == "bool":
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["type"] = _reader(item)
            settings["metavar"] = item.metavar or _metavar(item)
        if item.kind == "list":
            settings["action"] = "extend"  # A repeated flag appends.
        groups[item.group].add_argument(*item.flags, **settings)
        if item.pairs and isinstance(parser, Parser):
            parser.pair_flags.update(item.flags)


def _metavar(item: Option) -> str:
    if item.choices:
        return "{" + ",".join(str(choice) for choice in item.choices) + "}"
    names = {"int": "N", "float": "X", "text": "TEXT", "list": "A,B", "size": "SIZE"}
    return names.get(item.kind, "JSON")


def _reader(item: Option) -> Any:
    def read(text: str) -> Any:
        try:
            return item.normalise(item.parse(text))
        except ConfigError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    return read

"""Options, declared once as fields of a config dataclass.

The flag, the config-file key, the environment variable, the check of the value and the row of the
documentation all come from this declaration, so they cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from vlm_serve.errors import ConfigError

_T = TypeVar("_T")
ENV_PREFIX = "VLM_SERVE_"
OTHER_VARIABLES = ("VLM_SERVE_MODEL", "VLM_SERVE_NATIVE_ARCH", "VLM_SERVE_NATIVE_SANITIZE")
"""Variables that set no option of a config."""
_SERVICE = re.compile(r"VLM_SERVE_(.+_)?(SERVICE_(HOST|PORT)(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://\S+")

Kind = Literal["int", "float", "bool", "size", "text", "list", "object"]
_KINDS: dict[str, Kind] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "int | str": "size",
    "str": "text",
    "tuple[str, ...]": "list",
    "Mapping[str, Any]": "object",
}
"""Kinds of options by the annotation of the field, without its `| None`."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", re.ASCII)
_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_LISTED_ONLY = ("base_model_name",)
"""Keys of pairs that decide only what vLLM lists."""
_WANTED = {"int": "a number", "float": "a number", "bool": "true or false", "list": "a list"}
"""What a text must be, by kind."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a config dataclass.

    Attributes:
        name: the field's name; `--name-with-dashes` on the command line.
        help: its effect in one sentence, without the default.
        group: heading in `--help` and in the documentation's table.
        kind: type of the field, and how its text form is parsed.
        default: value if the option is not set; None means "chosen for you" and is always valid.
        choices: the only values allowed; empty allows all.
        low, high: inclusive bounds of a number.
        aliases: further flags, without leading dashes.
        metavar: name of the value in `--help`; empty: by kind.
        default_text: the default as the documentation shows it; empty: `default` itself.
        synonyms: names of choices in other servers, each with the choice that it means.
        pairs: keys of a name and a value: a list's items are name=value, or JSON objects with both.
    """

    name: str
    help: str
    group: str
    kind: Kind
    default: Any
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    default_text: str = ""
    synonyms: Mapping[str, str] = field(default_factory=dict)
    pairs: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple("--" + name.replace("_", "-") for name in (self.name, *self.aliases))

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def shown_default(self) -> str:
        """The default as `--help` and the documentation print it."""
        if self.default_text:
            return self.default_text
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.default is None or self.default == ():
            return "none"
        return format_size(self.default) if self.kind == "size" else str(self.default)

    def parse(self, text: str) -> Any:
        """Parse a flag or environment variable; a list may be JSON, as in vLLM, and so may a pair.
        Raises ConfigError that names the option."""
        try:
            if self.kind == "int":
                return int(text)
            if self.kind == "float":
                return float(text)
            if self.kind == "bool":
                return _SWITCHES[text.strip().lower()]
            if self.kind == "object":
                return json.loads(text)
            if self.kind == "list" and text.lstrip().startswith("["):
                return tuple(json.loads(text))
            if self.pairs and text.lstrip().startswith("{"):
                return (json.loads(text),)
        except (ValueError, KeyError, RecursionError):
            raise self._bad(text, _WANTED.get(self.kind, "a JSON object")) from None
        if self.kind == "list":
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return text

    def normalise(self, value: Any) -> Any:
        """Return the value in the field's own type: sizes become bytes, lists become tuples.

        Raises ConfigError that names the option, the value and the allowed values.
        """
        if value is None and self.default is None:
            return None
        value = self._typed(plain_number(value))
        if self.synonyms:
            value = self.synonyms.get(value, value)
        if self.choices and value not in self.choices:
            raise self._bad(value, "one of " + ", ".join(str(choice) for choice in self.choices))
        if self.low is not None and not value >= self.low:  # Also catches NaN.
            raise self._bad(value, f"at least {self.low:g}")
        if self.high is not None and not value <= self.high:
            raise self._bad(value, f"at most {self.high:g}")
        return value

    def _typed(self, value: Any) -> Any:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if self.kind == "size":
            if isinstance(value, str):
                return parse_size(value, self.name)
            if not is_int:
                raise self._bad(value, "a number of bytes or a size such as 1GiB")
        elif self.kind == "int" and not is_int:
            raise self._bad(value, "a whole number")
        elif self.kind == "float":
            if not is_int and not isinstance(value, float):
                raise self._bad(value, "a number")
            return float(value)
        elif self.kind == "bool" and not isinstance(value, bool):
            raise self._bad(value, "true or false")
        elif self.kind == "text" and not isinstance(value, str):
            raise self._bad(value, "text")
        elif self.kind == "object" and not isinstance(value, Mapping):
            raise self._bad(value, "a JSON object")
        elif self.kind == "list":
            items = (value,) if isinstance(value, str) else value
            if self.pairs and isinstance(items, list | tuple):
                items = [self._pair(item) if isinstance(item, Mapping) else item for item in items]
            if not isinstance(items, list | tuple) or any(not isinstance(i, str) for i in items):
                raise self._bad(value, "a list of texts")
            return tuple(items)
        return value

    def _pair(self, item: Mapping[Any, Any]) -> str:
        """Return a pair given as an object in the form name=value."""
        given = [item.get(key) for key in self.pairs]
        if item.keys() - {*self.pairs, *_LISTED_ONLY} or not all(
            isinstance(text, str) for text in given
        ):
            raise self._bad(dict(item), "objects with " + " and ".join(self.pairs))
        return "=".join(map(str, given))

    def _bad(self, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.name} must be {wanted}, got {value!r}", param=self.name)


def plain_number(value: Any) -> Any:
    """Return a number of numpy's or torch's as Python's; anything else stays as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


_EXPLAINED: dict[str, Collection[str]] = {}
"""Keywords of the classes with `explains_keywords`, by their names."""


def explains_keywords(made: type[_T]) -> type[_T]:
    """Have a class's TypeError for an unknown keyword name the closest one, or the class that has
    it."""
    create: Any = made.__init__
    known = [*signature(create).parameters][1:]
    _EXPLAINED[made.__name__] = known

    @wraps(create)
    def explained(self: _T, *values: Any, **keywords: Any) -> None:
        for name in keywords.keys() - known:
            owners = [owner for owner, names in _EXPLAINED.items() if name in names]
            where = f": it belongs to {owners[0]}({name}=...)" if owners else ""
            raise TypeError(f"{made.__name__} has no {name}{where or did_you_mean(name, known)}")
        create(self, *values, **keywords)

    cast(Any, made).__init__ = explained
    return made


def section(name: str) -> Callable[..., Any]:
    """Return a function to declare the options of one section of a config dataclass.

    It takes an option's default, its help and, by name, `choices`, `low`, `high`, `aliases`,
    `metavar`, `default_text`, `synonyms` and `pairs` of `Option`, and returns a dataclass field.
    """

    def option(default: Any, help: str, **details: Any) -> Any:
        return field(default=default, metadata={"group": name, "help": help, **details})

    return option


def options_of(config: type | object) -> tuple[Option, ...]:
    """Return the options of a config dataclass in the order of their declaration."""
    assert dataclasses.is_dataclass(config)
    return tuple(
        Option(
            name=field.name,
            kind=_KINDS[str(field.type).removesuffix(" | None")],
            default=field.default,
            **field.metadata,
        )
        for field in dataclasses.fields(config)
    )


def normalise_all(config: object) -> list[str]:
    """Normalise every field of a frozen config in place; return the problems, one line each."""
    problems = []
    for item in options_of(config):
        try:
            object.__setattr__(config, item.name, item.normalise(getattr(config, item.name)))
        except ConfigError as error:
            problems.append(error.message)
    return problems


def refuse(problems: list[str]) -> None:
    """Raise one ConfigError for all problems, if there are any.

    Args:
        problems: one line per invalid option, which begins with the option's name.
    """
    if problems:
        raise ConfigError("; ".join(problems), param=problems[0].split(" ", 1)[0])


def parse_size(text: str, name: str = "size") -> int:
    """Return the bytes in `"1GiB"`, `"512 MB"` or `"4096"`. Raises ConfigError."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name} must be a number of bytes or a size such as 512MiB or 1GiB, got {text!r}",
            param=name,
        )
    return int(float(match.group(1)) * unit) if "." in match.group(1) else int(match[1]) * unit


def format_size(count: int) -> str:
    """Format bytes in the largest binary unit that gives at least one: 1.5 GiB, 37.4 MiB."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def from_environment(options: Iterable[Option], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options set by `VLM_SERVE_*` variables. Raises ConfigError."""
    return {
        item.name: item.parse(environment[item.env])
        for item in options
        if item.env in environment and not is_service_link(item.env, environment[item.env])
    }


def is_service_link(name: str, value: str) -> bool:
    """Return True if Kubernetes set the variable, as it does in every pod for every service.

    A service called vlm-serve gives VLM_SERVE_SERVICE_HOST, and VLM_SERVE_PORT=tcp://10.0.0.1:80,
    seemingly an option of this program. A pod's `enableServiceLinks: false` turns this off.
    """
    if name.endswith("_PORT") and _SERVICE_URL.fullmatch(value):
        return True
    return _SERVICE.fullmatch(name) is not None


def check_environment(options: Iterable[Option], environment: Mapping[str, str]) -> None:
    """Raise ConfigError for a `VLM_SERVE_*` variable without an option: it is mistyped."""
    known = {*(item.env for item in options), *OTHER_VARIABLES}
    for name in environment:
        if not name.startswith(ENV_PREFIX) or name in known:
            continue
        if not is_service_link(name, environment[name]):
            raise ConfigError(f"there is no variable {name}{did_you_mean(name, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the closest known name as the end of an error message; empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def from_mapping(options: Iterable[Option], values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the options of a config file; keys may use dashes or underscores.

    Raises ConfigError with every unknown key.
    """
    names = {
        name.replace("-", "_"): item.name for item in options for name in (item.name, *item.aliases)
    }
    unknown = [str(key) for key in values if str(key).replace("-", "_") not in names]
    if unknown:
        named = [key + did_you_mean(key.replace("-", "_"), names) for key in unknown]
        raise ConfigError(f"unknown options in the config file: {', '.join(named)}")
    return {names[str(key).replace("-", "_")]: value for key, value in values.items()}


def markdown_table(options: Iterable[Option]) -> str:
    """Return the documentation's tables of options, one per group: flag, default, effect."""
    lines: list[str] = []
    group = ""
    for item in options:
        if item.group != group:
            group = item.group
            lines += ["", f"**{group}**", "", "| flag | default | effect |", "|---|---|---|"]
        flags = " ".join(f"`{flag}`" for flag in item.flags)
        lines.append(f"| {flags} | {item.shown_default} | {item.help.replace('|', '/')} |")
    return "\n".join(lines).strip() + "\n"


def read_mapping(path: str, place: str, param: str, expected: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file.

    Args:
        place: start of the error messages, with the path.
        param: the option that names the file.
        expected: the complaint about a file without a mapping.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid YAML"
        raise ConfigError(f"{place}: {reason}", param=param) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: {expected}", param=param)
    return content

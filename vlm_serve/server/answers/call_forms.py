"""Forms of tool calls as data: the marks of each form, and what a mark does in each state.

A new form needs a `CallForm` here. `CallReader` runs all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from vlm_serve.server.answers.pieces import TOOL_END, TOOL_START, ToolForm

Framing = Literal["line", "space"]
"""White space around a value that belongs to the form: one line break on each side, or all."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A text with a meaning in a form.

    Attributes:
        kind: the key of its steps.
        begin: its text, or the text before a name.
        inner: pattern of one character of the name; "": the mark has no name.
        end: the text after the name.
        longest: maximum length of the name.
    """

    kind: str
    begin: str
    inner: str = ""
    end: str = ""
    longest: int = 256


Steps = Mapping[str, Mapping[str, tuple[str, str]]]
"""State -> kind of mark -> the next state, and the reader's action.

A mark without a step is text. Before the first value there is no text, so it ends the reading.
"""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of tool calls.

    Attributes:
        syntax: how arguments are written: as tags around text, or as JSON.
        openings: texts that may begin a call.
        marks: the marks of all states that `marks_in` does not name.
        framing: see `Framing`; only for tags.
    """

    syntax: Literal["tags", "json"]
    openings: tuple[str, ...]
    marks: tuple[Mark, ...]
    steps: Steps
    marks_in: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)
    framing: Framing = "line"


_BLOCK = (Mark("block", TOOL_START), Mark("/block", TOOL_END))

# What may follow a value. `forgotten` steps pass over a closing tag that the model left out, so
# that another ending of the call is preferred.
_VALUE = {
    "value": ("value", "next_value"),
    "call": ("value", "next_call"),
    "/value": ("closed", "close"),
}
_QWEN_VALUE = _VALUE | {"block": ("value", "next_block"), "/call": ("ended", "close_forgotten")}
_MINICPM_VALUE = _VALUE | {"/call": ("done", "close_forgotten")}

QWEN3_XML = CallForm(
    syntax="tags",
    openings=(TOOL_START, "<function="),
    marks=(
        *_BLOCK,
        Mark("call", "<function=", r"[^<>\n]", ">"),
        Mark("/call", "</function>"),
        Mark("value", "<parameter=", r"[^<>\n]", ">"),
        Mark("/value", "</parameter>"),
    ),
    steps={
        "start": {"block": ("opened", "open"), "call": ("named", "begin_call")},
        "opened": {"call": ("named", "begin_call")},
        "named": {
            "value": ("value", "begin_value"),
            "/call": ("ended", "extend"),
            "/block": ("done", "end_without_values"),
        },
        "value": _QWEN_VALUE,
        "closed": _QWEN_VALUE | {"/call": ("ended", "extend"), "/block": ("done", "forgotten")},
        "ended": _QWEN_VALUE | {"block": ("ended", "next_block"), "/block": ("done", "extend")},
        "done": _QWEN_VALUE | {"block": ("done", "next_block")},
    },
)
"""Qwen3-Coder, Qwen3.5 and later, MiniCPM-V 4.6."""

MINICPM5 = CallForm(
    syntax="tags",
    openings=('<function name="', "<function name='"),
    marks=(
        Mark("call", '<function name="', r'[^<>"\n]', '">'),
        Mark("call", "<function name='", r"[^<>'\n]", "'>"),
        Mark("/call", "</function>"),
        Mark("value", '<param name="', r'[^<>"\n]', '">'),
        Mark("value", "<param name='", r"[^<>'\n]", "'>"),
        Mark("/value", "</param>"),
        Mark("raw", "<![CDATA["),
    ),
    steps={
        "start": {"call": ("named", "begin_call")},
        "named": {"value": ("value", "begin_value"), "/call": ("done", "extend")},
        "value": _MINICPM_VALUE | {"raw": ("raw", "begin_raw")},
        "raw": {"/raw": ("unraw", "no_action")},
        "unraw": {"/value": ("closed", "close"), "/call": ("done", "close_forgotten")},
        "closed": _MINICPM_VALUE | {"/call": ("done", "extend")},
        "done": _MINICPM_VALUE,
    },
    marks_in={"raw": (Mark("/raw", "]]>"),)},
    framing="space",
)
"""MiniCPM5: values may stand in CDATA sections."""

HERMES = CallForm(
    syntax="json",
    openings=(TOOL_START,),
    marks=(
        *_BLOCK,
        *(Mark("open", sign) for sign in "{["),
        *(Mark("close", sign) for sign in "}]"),
        *(Mark("separator", sign) for sign in "),"),
        Mark("quote", '"'),
    ),
    steps={
        "start": {"block": ("between", "no_action")},
        "between": {
            "open": ("value", "open"),
            "close": ("between", "separate"),
            "separator": ("between", "separate"),
            "block": ("between", "end_before"),
            "/block": ("between", "end_behind"),
        },
        "value": {
            "open": ("value", "deepen"),
            "close": ("value", "close"),
            "separator": ("value", "separator"),
            "quote": ("text", "begin_text"),
            "block": ("between", "close_early"),
            "/block": ("between", "close_early"),
        },
        "text": {"quote": ("value", "end_text"), "escape": ("text", "escape")},
    },
    marks_in={"text": (Mark("quote", '"'), Mark("escape", "\\", r"[\s\S]", longest=1))},
)
"""Hermes, Qwen3, Qwen3-VL and Qwen3-Next: JSON objects, or a list of them, in a block."""

FORMS: Mapping[ToolForm, CallForm] = {
    "qwen3_xml": QWEN3_XML,
    "minicpm5": MINICPM5,
    "hermes": HERMES,
}

ENFORCED: Mapping[ToolForm, CallForm] = {
    **FORMS,
    "qwen3_xml": replace(QWEN3_XML, marks_in={"value": (Mark("/value", "</parameter>"),)}),
}
"""Forms of calls that a grammar enforces: no tag is missing, so none is looked for in values."""

"""Forms of tool calls in tags as data: the marks of each form, and what a mark does in each state.

A new form needs a `CallForm` here. `TagReader` runs all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from vlm_serve.server.answers.pieces import TOOL_END, TOOL_START, ToolForm

Framing = Literal["line", "space"]
"""White space around a value that belongs to the form: one line break on each side, or all."""

Step = tuple[str, str] | tuple[str, str, bool]
Steps = Mapping[str, Mapping[str, Step]]
"""State -> kind of mark -> the next state, the reader's action, and what the action is told.

A mark without a step is text. Before the first value there is no text, so it ends the reading.
"""


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of tool calls.

    Attributes:
        openings: texts that may begin a call.
        marks: pattern of the marks of all states that `marks_in` does not name. A group names the
            kind of each; where the mark contains a name, the group is that name.
        framing: see `Framing`.
    """

    openings: tuple[str, ...]
    marks: str
    steps: Steps
    marks_in: Mapping[str, str] = field(default_factory=dict)
    framing: Framing = "line"


BLOCK_MARKS = f"(?P<block>{TOOL_START})|(?P<end_block>{TOOL_END})"
_QUOTED = r"""(?:"(?P<{0}>[^<>"\n]{{1,256}})"|'(?P<{0}>[^<>'\n]{{1,256}})')>"""
_END_VALUE = "(?P<end_value></parameter>)"

# What may follow a value. A step told False passes over a closing tag that the model left out, so
# that another ending of the call is preferred.
_VALUE: Mapping[str, Step] = {
    "value": ("value", "next_value"),
    "call": ("value", "next_call"),
    "end_value": ("closed", "close", True),
}
_QWEN_VALUE = {
    **_VALUE,
    "block": ("value", "next_block"),
    "end_call": ("ended", "close", False),
}
_MINICPM_VALUE = {**_VALUE, "end_call": ("done", "close", False)}

QWEN3_XML = CallForm(
    openings=(TOOL_START, "<function="),
    marks=rf"{BLOCK_MARKS}|{_END_VALUE}|(?P<end_call></function>)"
    r"|<function=(?P<call>[^<>\n]{1,256})>|<parameter=(?P<value>[^<>\n]{1,256})>",
    steps={
        "start": {"block": ("opened", "go_on"), "call": ("named", "begin_call")},
        "opened": {"call": ("named", "begin_call")},
        "named": {
            "value": ("value", "begin_value"),
            "end_call": ("ended", "extend", True),
            "end_block": ("done", "end_without_values"),
        },
        "value": _QWEN_VALUE,
        "closed": {
            **_QWEN_VALUE,
            "end_call": ("ended", "extend", True),
            "end_block": ("done", "extend", False),
        },
        "ended": {
            **_QWEN_VALUE,
            "block": ("ended", "next_block"),
            "end_block": ("done", "extend", True),
        },
        "done": {**_QWEN_VALUE, "block": ("done", "next_block")},
    },
)
"""Qwen3-Coder, Qwen3.5 and later, MiniCPM-V 4.6."""

MINICPM5 = CallForm(
    openings=('<function name="', "<function name='"),
    marks="<function name="
    + _QUOTED.format("call")
    + "|<param name="
    + _QUOTED.format("value")
    + r"|(?P<end_value></param>)|(?P<end_call></function>)|(?P<raw><!\[CDATA\[)",
    steps={
        "start": {"call": ("named", "begin_call")},
        "named": {"value": ("value", "begin_value"), "end_call": ("done", "extend", True)},
        "value": {**_MINICPM_VALUE, "raw": ("raw", "begin_raw")},
        "raw": {"end_raw": ("unraw", "go_on")},
        "unraw": {
            "end_value": ("closed", "close", True),
            "end_call": ("done", "close", False),
        },
        "closed": {**_MINICPM_VALUE, "end_call": ("done", "extend", True)},
        "done": _MINICPM_VALUE,
    },
    marks_in={"raw": r"(?P<end_raw>\]\]>)"},
    framing="space",
)
"""MiniCPM5: values may stand in CDATA sections."""

FORMS: Mapping[ToolForm, CallForm] = {"qwen3_xml": QWEN3_XML, "minicpm5": MINICPM5}

ENFORCED: Mapping[ToolForm, CallForm] = {
    **FORMS,
    "qwen3_xml": replace(QWEN3_XML, marks_in={"value": _END_VALUE}),
}
"""Forms of calls that a grammar enforces: no tag is missing, so none is looked for in values."""

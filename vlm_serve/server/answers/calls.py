"""Makes the readers of an answer's tool calls."""

from __future__ import annotations

from vlm_serve.server.answers.call_forms import FORMS
from vlm_serve.server.answers.call_reader import CallReader
from vlm_serve.server.answers.json_calls import JsonReader
from vlm_serve.server.answers.pieces import TOOL_START, ToolForm, Tools
from vlm_serve.server.answers.tag_calls import TagReader

_NESTED_READINGS = 8


class ReaderMaker:
    """Makes readers for one answer.

    Args:
        single: at most one call is read.
        enforced: a grammar enforces the calls outside of thoughts.

    Attributes:
        openings: texts that may begin a call.
    """

    def __init__(
        self, form: ToolForm, tools: Tools, *, single: bool = False, enforced: bool = False
    ) -> None:
        self._form, self._tools, self._single = form, tools, single
        self._enforced = enforced
        self.openings = FORMS[form].openings if form in FORMS else (TOOL_START,)
        self._nested: list[TagReader] = []

    def reader(self, *, thought: bool, streamed: bool) -> CallReader:
        """Make a reader for a text that begins with one of the openings.

        Args:
            thought: the text is inside a thought, which `</think>` may end anywhere.
            streamed: long arguments are told before the call is complete.
        """
        enforced = self._enforced and not thought
        options = {"thought": thought, "streamed": streamed, "single": self._single}
        options["enforced"] = enforced
        if self._form not in FORMS:
            return JsonReader(self._tools, **options)
        # Text with a quoted call may be read twice. This bounds the time of an answer.
        nested = sum(reader.nested for reader in self._nested)
        nesting = nested < _NESTED_READINGS
        reader = TagReader(self._form, self._tools, nesting=nesting, **options)
        self._nested = [*(each for each in self._nested if each.nested), reader]
        return reader

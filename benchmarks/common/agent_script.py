"""What agents say and are told: sessions of tool calls, with answers as a template writes them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.preprocess.text.template import ChatTemplate

Message = dict[str, Any]

_TEXT = (
    "order shelf number river paper check the of and is list red open value result first stone "
    "next place again small light water"
)
_WORDS = _TEXT.split()
OPENING, CLOSING = "<|im_start|>assistant\n", "<|im_end|>"


def _tool(name: str, **parameters: str) -> Message:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": f"Does {name}.", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("search", query="string", limit="integer"),
    _tool("read_file", path="string"),
    _tool("edit", path="string", old="string", new="string"),
    _tool("run", command="string", timeout="number"),
]


@dataclass(frozen=True, slots=True)
class Script:
    """One session: what its model says at each step.

    Attributes:
        number: of the session.
        calls: tool calls for each of its two questions, before an answer in words.
        picture: a URL that comes with the first question.
    """

    number: int
    calls: int
    picture: str | None = None

    @property
    def steps(self) -> int:
        """Number of answers."""
        return 2 * (self.calls + 1)

    def question(self, step: int) -> list[Message]:
        """What the user asks before a step; nothing where a tool has answered."""
        if step % (self.calls + 1):
            return []
        text = f"Session {self.number}, task {step}: {self._words('task', step, 30)}."
        if self.picture is None or step:
            return [{"role": "user", "content": text}]
        shown = {"type": "image_url", "image_url": {"url": self.picture}}
        return [{"role": "user", "content": [shown, {"type": "text", "text": text}]}]

    def result(self, step: int, call: str) -> Message:
        """What the tool that a step has called returns."""
        return {"role": "tool", "tool_call_id": call, "content": self._words("tool", step, 60)}

    def answer(self, step: int) -> Message:
        """What the model means to say."""
        rng = random.Random(f"answer {self.number} {step}")
        said: Message = {"role": "assistant", "content": ""}
        said["reasoning_content"] = self._words("thought", step, rng.randint(20, 80))
        if step % (self.calls + 1) == self.calls:
            return said | {"content": self._words("words", step, 40)}
        function = rng.choice(TOOLS)["function"]
        arguments = {
            name: self._words(name, step, 6) if kind["type"] == "string" else rng.randint(1, 99)
            for name, kind in function["parameters"]["properties"].items()
        }
        call = {"name": function["name"], "arguments": arguments}
        return said | {"tool_calls": [{"id": "call0000", "type": "function", "function": call}]}

    def _words(self, what: str, step: int, count: int) -> str:
        rng = random.Random(f"{what} {self.number} {step}")
        return " ".join(rng.choice(_WORDS) for _ in range(count))


def written(template: ChatTemplate, said: Message, prompt: str) -> str:
    """Return an answer as a model writes it that has learned the template: the template's own text
    behind the beginning of the answer, up to its end.

    Args:
        prompt: the rendered prompt, which may have opened a thought.
    """
    question = {"role": "user", "content": "x"}
    text = template.render([question, said], tools=TOOLS, add_generation_prompt=False)
    answer = text[text.index(OPENING) + len(OPENING) :]
    answer = answer[: answer.index(CLOSING)]
    begun = prompt[prompt.rindex(OPENING) + len(OPENING) :]
    return answer.removeprefix(begun)


def sent_back(message: Mapping[str, Any], *, thoughts: bool) -> Message:
    """Return the parsed answer as a client sends it back.

    Args:
        thoughts: with its reasoning, as agents do whose template keeps it.
    """
    kept = ("role", "content", "tool_calls", *(("reasoning_content",) if thoughts else ()))
    return {key: message[key] for key in kept if message.get(key) is not None}


def called(message: Mapping[str, Any]) -> Sequence[str]:
    """Return the ids of an answer's calls."""
    for call in message.get("tool_calls") or ():
        json.loads(call["function"]["arguments"])
    return [call["id"] for call in message.get("tool_calls") or ()]

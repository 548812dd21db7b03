"""`vlm-serve chat` without a question: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm_serve.commands.chat_media import Part, dragged, named, part_of
from vlm_serve.commands.chat_models import ChatModel, Message, reuse_line
from vlm_serve.commands.chat_printer import Printer, dimmed
from vlm_serve.errors import ContextLengthError, VlmServeError
from vlm_serve.options.declared import did_you_mean

HELP = """\
A line is a question; \"\"\" begins and ends one of several lines. Drag pictures and videos into it,
or write their paths.
  /image FILE|URL   attach a picture to the next question
  /video FILE|URL   attach a video
  /clear            begin anew
  /save FILE        write the conversation: .json in OpenAI's form, else as text
  /model [NAME]     choose the model or adapter that answers, or list them
  /exit             end (also Ctrl-D)
Ctrl-C stops an answer."""


class Conversation:
    """A conversation, and the commands that change it.

    Args:
        model: answers.
        parts: media attached to the first question.
        shown: thoughts are printed.
    """

    def __init__(self, model: ChatModel, parts: list[Part], *, shown: bool) -> None:
        self._model = model
        self._shown = shown
        self._messages: list[Message] = []
        self._attached = parts
        self._commands: dict[str, Callable[[str], None]] = {
            "image": lambda source: self._attach("image", source),
            "video": lambda source: self._attach("video", source),
            "clear": self._clear,
            "save": self._save,
            "model": self._choose,
            "help": lambda _: print(HELP),
        }

    def run(self) -> None:
        """Read lines and answer them until the input ends."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # It gives input() its editing and its earlier lines.
        print(dimmed(f"{self._model.name}. /help lists commands, Ctrl-D ends.", sys.stdout))
        while True:
            try:
                line = _whole()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print(dimmed("\nCtrl-D ends.", sys.stdout))
                continue
            if line in ("/exit", "/quit", "/bye"):
                return
            try:
                self.take(line)
            except VlmServeError as error:
                print(f"vlm-serve: {error.message}", file=sys.stderr)

    def take(self, line: str) -> None:
        """Run a command or answer a question. Raises VlmServeError; the conversation goes on."""
        text, parts = dragged(line)
        if line.startswith("/") and not parts:
            name, _, value = line[1:].partition(" ")
            if name not in self._commands:
                close = did_you_mean("/" + name, ["/" + known for known in self._commands])
                raise VlmServeError(f"there is no /{name}{close or '; /help lists all'}")
            self._commands[name](value.strip())
        elif line.startswith(("/image ", "/video ")):
            self._attach(line[1:6], line[7:].strip())
        elif text:
            self._answer(text, parts)
        elif parts:
            self._attached += parts
            print(dimmed("attached to the next question", sys.stdout))

    def _answer(self, text: str, parts: list[Part]) -> None:
        content: Any = [*self._attached, *parts, {"type": "text", "text": text}]
        question = {"role": "user", "content": content if len(content) > 1 else text}
        messages = [*self._messages, question]
        printer = Printer(shown=self._shown)
        stopped = False
        try:
            for delta in self._model.stream(messages):
                printer.print(delta)
        except KeyboardInterrupt:
            stopped = True
        except ContextLengthError as error:
            raise VlmServeError(f"{error.message}; /clear begins anew") from None
        except VlmServeError as error:
            raise named(error, messages) from None
        printer.end()
        if stopped and not printer.text:
            return
        answer: Message = {"role": "assistant", "content": printer.text}
        if printer.reasoning:
            answer["reasoning"] = printer.reasoning
        self._messages = [*messages, answer]
        self._attached = []
        last = printer.last
        note = "stopped" if stopped or last is None else reuse_line(last.usage)
        print(dimmed(f"({note})", sys.stdout))

    def _attach(self, kind: str, source: str) -> None:
        if not source:
            raise VlmServeError(f"/{kind} needs a file or a URL")
        _, parts = dragged(source)
        self._attached += parts or [part_of(kind, source.strip("'\""), "/")]
        print(dimmed("attached to the next question", sys.stdout))

    def _clear(self, _: str) -> None:
        self._messages, self._attached = [], []
        print(dimmed("a new conversation", sys.stdout))

    def _save(self, name: str) -> None:
        if not name:
            raise VlmServeError("/save needs the name of a file")
        as_json = Path(name).suffix == ".json"
        text = json.dumps(self._messages, indent=2, ensure_ascii=False, default=str)
        text = text if as_json else "\n\n".join(map(_as_text, self._messages))
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise VlmServeError(f"/save {name}: {error.strerror}") from None
        print(dimmed(f"{len(self._messages)} messages in {name}", sys.stdout))

    def _choose(self, name: str) -> None:
        if name and name not in self._model.names:
            close = did_you_mean(name, self._model.names)
            raise VlmServeError(f"there is no model {name!r}{close or '; /model lists all'}")
        self._model.name = name or self._model.name
        shown = [self._model.name] if name else self._model.names
        print("\n".join(f"{'*' if each == self._model.name else ' '} {each}" for each in shown))


def _as_text(message: Message) -> str:
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part[part["type"]] for part in content]
    return f"## {message['role']}\n\n" + "\n".join(map(str, parts))


def _whole() -> str:
    """Read a line, or several between triple quotation marks."""
    line = input("> ").strip()
    if not line.startswith('"""'):
        return line
    lines = [line[3:]]
    while not lines[-1].rstrip().endswith('"""'):
        lines.append(input(". "))
    lines[-1] = lines[-1].rstrip()[:-3]
    return "\n".join(lines).strip()

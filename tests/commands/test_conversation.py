"""A conversation in the terminal: what its lines do, and docs/chat.md's own transcript."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from peft_folders import random_adapter

from vlm_serve import EngineConfig, Pipeline
from vlm_serve.commands.chat_media import dragged
from vlm_serve.commands.chat_models import LocalModel, Message
from vlm_serve.commands.conversation import Conversation
from vlm_serve.errors import ConfigError, VlmServeError

ROOT = Path(__file__).parents[2]
STAR = ROOT / "examples" / "media" / "star.png"
ESCAPED = str(STAR).replace(" ", "\\ ")
"""As a terminal writes a dragged file, wherever this checkout lies."""
DEMO = ROOT / "vlm_serve" / "demo" / "dense"
GREEDY: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0}


class Kept(LocalModel):
    """A local model that notes what it is asked."""

    asked: list[Sequence[Message]]

    def stream(self, messages: Sequence[Message]) -> Iterator[Any]:
        self.asked.append(messages)
        return super().stream(messages)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    adapter = random_adapter(DEMO, tmp_path_factory.mktemp("adapter"), 0)
    config = EngineConfig(cache_memory="64MiB", threads=1, lora_modules=(f"loud={adapter}",))
    with Pipeline("demo", config) as pipe:
        kept = Kept(pipe, "demo", GREEDY)
        kept.asked = []
        yield kept


@pytest.fixture
def talk(model: Kept) -> Conversation:
    model.asked.clear()
    model.name = "demo"
    return Conversation(model, [], shown=True)


def test_a_conversation_has_a_history(
    talk: Conversation, model: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take("Hello")
    said = capsys.readouterr().out
    talk.take("Hello")
    roles = [message["role"] for message in model.asked[-1]]
    assert roles == ["user", "assistant", "user"]
    assert said.startswith(model.asked[-1][1]["content"])
    assert re.search(r"\(\d+ of \d+ prompt tokens reused, \d+ generated\)", said)
    talk.take("/clear")
    talk.take("Hello")
    assert len(model.asked[-1]) == 1


@pytest.mark.parametrize(
    "line",
    [
        f"{ESCAPED} What color is it?",
        f"'{STAR}' What color is it?",
        f"What color is it? {STAR.as_uri()}",
    ],
)
def test_pictures_are_dragged_into_a_line(talk: Conversation, model: Kept, line: str) -> None:
    talk.take(line)
    image, text = model.asked[-1][0]["content"]
    assert image == {"type": "image", "image": STAR} and text["text"] == "What color is it?"


def test_paths_with_spaces_and_of_other_files(tmp_path: Path) -> None:
    picture = tmp_path / "a b.png"
    picture.write_bytes(STAR.read_bytes())
    escaped = str(picture).replace(" ", "\\ ")
    part = {"type": "image", "image": picture}
    for line in (escaped, f'"{picture}"', f"file://{str(picture).replace(' ', '%20')}"):
        assert dragged(f"see {line} now") == ("see  now", [part])
    (tmp_path / "notes.txt").write_text("text")
    for plain in (f"see {tmp_path}/notes.txt", "see nosuch.png", "it's 5 o'clock", "a \\", "~x y"):
        assert dragged(plain) == (plain, [])


def test_media_are_attached_to_the_next_question(talk: Conversation, model: Kept) -> None:
    talk.take(f"/image {STAR}")
    talk.take(ESCAPED)
    talk.take(f"/video {STAR.parent / 'change.mp4'}")
    assert not model.asked
    talk.take("What is it?")
    assert [part["type"] for part in model.asked[-1][0]["content"]] == [
        *("image", "image", "video", "text")
    ]
    talk.take("And now?")
    assert isinstance(model.asked[-1][-1]["content"], str)


def test_adapters_are_chosen(
    talk: Conversation, model: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take("/model")
    assert capsys.readouterr().out == "* demo\n  loud\n"
    talk.take("/model loud")
    assert model.name == "loud"
    talk.take("Hello")
    with pytest.raises(VlmServeError, match="did you mean loud"):
        talk.take("/model lout")


def test_a_conversation_is_saved(talk: Conversation, tmp_path: Path) -> None:
    talk.take(f"{ESCAPED} What color is it?")
    talk.take(f"/save {tmp_path / 'talk.json'}")
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"][0] == {"type": "image", "image": str(STAR)}
    talk.take(f"/save {tmp_path / 'talk.md'}")
    assert (tmp_path / "talk.md").read_text().startswith(f"## user\n\n{STAR}\nWhat color is it?\n")
    with pytest.raises(VlmServeError, match="File exists"):
        talk.take(f"/save {tmp_path / 'talk.md'}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/imag x", "there is no /imag; did you mean /image"),
        ("/x", "/help lists all"),
        ("/image", "needs a file or a URL"),
        ("/image nosuch.png", "^/image nosuch.png: No such file"),
        ("/save", "needs the name of a file"),
    ],
)
def test_a_wrong_command_is_told(talk: Conversation, line: str, said: str) -> None:
    with pytest.raises((VlmServeError, ConfigError), match=said):
        talk.take(line)


def test_an_error_loses_neither_history_nor_media(
    talk: Conversation, model: Kept, tmp_path: Path
) -> None:
    talk.take("Hello")
    talk.take(f"/image {STAR}")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(VlmServeError, match="text.png: not an image"):
        talk.take(f"'{tmp_path / 'text.png'}' What is it?")
    with pytest.raises(VlmServeError, match="/clear begins anew"):
        talk.take("word " * 40000)
    talk.take("What color is it?")
    assert len(model.asked[-1]) == 3 and model.asked[-1][2]["content"][0]["image"] == STAR


class Terminal:
    """`vlm-serve chat` behind a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "vlm_serve", "chat", *arguments]
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT
        )
        os.close(theirs)
        self._said = ""

    def until(self, wanted: str) -> str:
        """Return what is said up to a text."""
        end = time.monotonic() + 120
        while wanted not in self._said:
            assert time.monotonic() < end, self._said
            if select.select([self._ours], [], [], 1)[0]:
                self._said += os.read(self._ours, 1 << 16).decode().replace("\r\n", "\n")
        before, found, self._said = self._said.partition(wanted)
        return before + found

    def type(self, line: str) -> None:
        os.write(self._ours, line.encode())


SMALL = ("--cache-memory", "64MiB", "--threads", "1", "--temperature", "0")


@pytest.mark.processes
def test_the_documents_transcript_is_what_a_terminal_shows() -> None:
    document = (ROOT / "docs" / "chat.md").read_text(encoding="utf-8")
    transcript = re.findall(r"```\n\$ vlm-serve chat demo\n(.*?)```", document, re.S)[0]
    terminal = Terminal("demo", *SMALL)
    said = "demo. " + terminal.until("\n> ").partition("demo. ")[2]
    for line in re.findall(r"^> (.+)$", transcript, re.M):
        terminal.type(line + "\n")
        said += terminal.until("\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    assert said.removesuffix("> ") == transcript


@pytest.mark.processes
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on() -> None:
    terminal = Terminal("demo", *SMALL)
    terminal.until("\n> ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("Ctrl-D ends.")
    terminal.type('"""Count\nto three"""\n')
    terminal.until("generated)\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0

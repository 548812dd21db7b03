"""`vlm-serve chat`: the answer alone on standard output, the thought beside it for people."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import running

from vlm_serve.cli import build_parser, main
from vlm_serve.commands import chat as chat_command
from vlm_serve.commands.chat import is_model
from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig

SMALL = ("--cache-memory", "64MiB", "--threads", "1")
THINKING = ("--chat-template-kwargs", '{"enable_thinking": true}')
THOUGHT, ANSWER = "They talk to me.", "Hello! Ask me about a picture or a video."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def chat(*arguments: str) -> int:
    return main(["chat", "demo", "Hello", "--temperature", "0", *SMALL, *arguments])


def test_the_answer_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(*THINKING) == 0
    assert capsys.readouterr() == (f"{ANSWER}\n", "")
    assert chat() == 0
    assert capsys.readouterr() == (f"{ANSWER}\n", "")


def test_the_thought_is_shown_beside_it_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(*THINKING, "--show-reasoning") == 0
    assert capsys.readouterr() == (f"{ANSWER}\n", f"{THOUGHT}\n\n")


def test_a_thought_that_takes_all_tokens_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(*THINKING, "--max-tokens", "5") == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    assert err == (
        "vlm-serve: there is no answer: the thought took all 5 tokens; allow more with "
        "--max-tokens\n"
    )
    assert chat("--max-tokens", "3") == 0, "an answer that is cut is one"
    out, err = capsys.readouterr()
    assert out.strip() and ANSWER.startswith(out.strip()) and err == ""


@pytest.mark.parametrize(
    ("flags", "variables", "shown"),
    [
        ((), {}, f"\x1b[2m{THOUGHT}\x1b[22m\n\n"),
        ((), {"NO_COLOR": "1"}, f"{THOUGHT}\n\n"),
        (("--no-show-reasoning",), {}, ""),
    ],
)
def test_a_terminal_shows_the_thought_dimly(
    flags: tuple[str, ...],
    variables: dict[str, str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert chat(*THINKING, *flags) == 0
    assert out.getvalue() == f"{ANSWER}\n"
    assert err.getvalue().replace("\x1b[22m\x1b[2m", "") == shown


@pytest.mark.processes
def test_a_pipe_gets_the_answer_alone_though_errors_go_to_a_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vlm_serve.cli", "chat", "demo", "Hello", *SMALL, *THINKING]
    done = subprocess.run(
        [*command, "--temperature", "0"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        timeout=120,
        check=True,
    )
    os.close(theirs)
    assert done.stdout == f"{ANSWER}\n"
    with open(ours, "rb", buffering=0) as terminal:
        try:
            said = terminal.read(1 << 16) or b""
        except OSError:  # Nothing was written, and the other end is closed.
            said = b""
    assert THOUGHT.encode() not in said


def test_the_parser_is_the_server_s_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(*THINKING, "--reasoning-parser", "none") == 0
    assert capsys.readouterr().out == f"{THOUGHT}\n</think>\n\n{ANSWER}\n"
    seen: dict[str, Any] = {}
    monkeypatch.setattr(chat_command, "chat", lambda *_, **given: seen.update(given) or 0)
    monkeypatch.setenv("VLM_SERVE_REASONING_PARSER", "deepseek_r1")
    assert chat() == 0
    assert seen["reasoning_parser"] == "deepseek_r1"
    options = build_parser().parse_args(["chat", "demo", "hi", "--reasoning-parser", "qwen3"])
    assert options.reasoning_parser == "qwen3"
    with pytest.raises(SystemExit):
        build_parser().parse_args(["chat", "demo", "hi", "--reasoning-parser", "qwen4"])
    asked = ["eval", "video", "demo", "--data", "x.csv", "--reasoning-parser", "none"]
    assert build_parser().parse_args(asked).reasoning_parser == "none"


@pytest.mark.parametrize(
    ("word", "model"),
    [
        ("demo", True),
        ("demo-moe", True),
        ("Qwen/Qwen3.5-4B", True),
        ("unsloth/Qwen3.5-4B-GGUF:Q4_K_M", True),
        ("./nosuch", True),
        ("~/models/x", True),
        ("model.gguf", True),
        ("Hello", False),
        ("Why and/or what?", False),
        ("Where?", False),
    ],
)
def test_the_only_word_is_a_model_or_a_question(word: str, model: bool, tmp_path: Path) -> None:
    assert is_model(word) == model
    options = build_parser().parse_args(["chat", word, "--threads", "1"])
    assert (options.model, options.question) == ((word, None) if model else (None, word))
    assert is_model(str(tmp_path)), "a folder that exists is one"


@pytest.mark.parametrize("words", [["demo", "-"], ["demo"]])
def test_standard_input_is_a_question(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", *words, "--temperature", "0", *SMALL]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n"


@pytest.mark.parametrize("question", ["", "  ", "-"])
def test_an_empty_question_is_refused(
    question: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", "demo", question]) == 2
    assert "the question is empty" in capsys.readouterr().err


def test_a_running_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    star = str(Path(__file__).parents[2] / "examples" / "media" / "star.png")
    engine = Engine.from_checkpoint("demo", EngineConfig(cache_memory="64MiB", threads=1))
    with running(engine, names=("demo",)) as server:
        address = ("--base-url", server.url, "--temperature", "0")
        assert main(["chat", "Hello", *address]) == 0
        assert capsys.readouterr() == (f"{ANSWER}\n", "")
        assert main(["chat", "demo", "What color is it?", "--image", star, *address]) == 0
        assert capsys.readouterr().out == "Red.\n"
        for url in (server.url + "/v1", server.url.removeprefix("http://")):
            assert main(["chat", "demo", "Hello", "--base-url", url, "--max-tokens", "2"]) == 0
        capsys.readouterr()
        assert main(["chat", "nosuch", "Hello", *address]) == 1
        assert "has no model 'nosuch', but demo" in capsys.readouterr().err
        assert main(["chat", "demo", "Hello", *address, "--temperature", "300"]) == 1
        assert "answers 400: temperature must be" in capsys.readouterr().err
    assert main(["chat", "demo", "Hello", *address]) == 1
    assert "refused" in capsys.readouterr().err


def test_an_address_without_a_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://127.0.0.1:9", "nonsense://x"):
        assert main(["chat", "demo", "Hello", "--base-url", url]) == 1
        assert url in capsys.readouterr().err

"""The compiling process: bounded, replaced after it was ended, and asked once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import platform
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_tree import processes_below

import vlm_serve
from vlm_serve.errors import (
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
    VlmServeError,
)
from vlm_serve.grammar import compiler as compiling
from vlm_serve.grammar.compiler import GrammarCompiler
from vlm_serve.grammar.state import GrammarState
from vlm_serve.grammar.worker import send
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.structured_outputs import StructuredOutputs

WIDTH = 768
SLOW = StructuredOutputs(json={"type": "integer", "multipleOf": 999_983})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(vlm_serve.__file__).parent / "demo" / "dense")


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=60.0)
    yield compiler
    compiler.close()


def test_one_that_takes_too_long_is_ended_and_the_next_one_runs(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.warm()
    assert compiler._process is not None
    before = compiler._process._process
    with (
        monkeypatch.context() as patch,
        pytest.raises(InvalidRequestError, match="longer than 0.3 s|more than 512 MiB"),
    ):
        patch.setattr(compiler._process, "_seconds", 0.3)
        compiler.compile(SLOW)
    assert compiler._process._process is before, "it would take seconds to start again"
    form = StructuredOutputs(regex="ab")
    assert compiler.find(form) is None
    compiled = compiler.compile(form).compiled
    found = compiler.find(form)
    assert found is not None
    assert found.compiled is compiled


def test_nobody_finds_what_others_have_compiled(compiler: GrammarCompiler) -> None:
    """How long it takes would tell that somebody uses that pattern."""
    form = StructuredOutputs(regex="abc|abd")
    compiled = compiler.compile(form, b"", b"alice").compiled
    assert compiler.find(form, b"", b"bob") is None
    assert compiler.find(form) is None
    assert compiler.compile(form, b"", b"bob").compiled is not compiled
    found = compiler.find(form, b"", b"alice")
    assert found is not None and found.compiled is compiled


def test_a_warm_compiler_does_not_wait_for_its_process(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.warm()
    monkeypatch.setattr(compiling, "START_SECONDS", 0.0)
    compiler.warm()
    compiler.compile(StructuredOutputs(regex="ab"))


def test_one_that_could_not_start_says_so_and_starts_later(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(VlmServeError, match="did not start"):
        patch.setattr(compiling, "START_SECONDS", 0.0)
        compiler.warm()
    compiler.compile(StructuredOutputs(regex="ab"))


def test_a_process_that_was_killed_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a host without memory, for example. The next process gets the task, once."""
    compiler.warm()
    assert compiler._process is not None and compiler._process._process is not None
    compiler._process._process.kill()
    compiler.compile(StructuredOutputs(regex="ab"))

    def killed(stream: Any, task: dict[str, Any]) -> None:
        send(stream, task)
        if "source" in task:
            compiler._process._process.kill()  # type: ignore[union-attr]

    monkeypatch.setattr(compiling, "send", killed)
    with pytest.raises(OverloadedError, match="was ended, twice"):
        compiler.compile(SLOW)
    monkeypatch.undo()
    compiler.compile(StructuredOutputs(regex="abc"))


@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_is_killed_while_it_starts_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Give the task to the next process, once, as when one ends later."""
    left = iter(range(times))

    def killed(stream: Any, task: dict[str, Any]) -> None:
        send(stream, task)
        if "tokenizer" in task and next(left, None) is not None:
            compiler._process._process.kill()  # type: ignore[union-attr]

    monkeypatch.setattr(compiling, "send", killed)
    if times == 2:
        with pytest.raises(OverloadedError, match="was ended, twice"):
            compiler.compile(StructuredOutputs(regex="ab"))
    compiler.compile(StructuredOutputs(regex="ab"))


def test_a_machine_without_room_for_a_process_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", full)
        with pytest.raises(OverloadedError, match="did not start"):
            compiler.compile(StructuredOutputs(regex="ab"))
        with pytest.raises(OverloadedError, match="did not start"):
            compiler.warm()
        patch.setattr(compiling, "Pipe", full)
        with pytest.raises(OverloadedError, match="did not start"):
            compiler.compile(StructuredOutputs(regex="ab"))
    compiler.compile(StructuredOutputs(regex="ab"))


def test_a_start_that_takes_all_its_time_is_not_repeated(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = []

    def stopped(stream: Any, task: dict[str, Any]) -> None:
        if "tokenizer" in task:
            tokenizers.append(task)
            compiler._process._process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        send(stream, task)

    monkeypatch.setattr(compiling, "START_SECONDS", 1.0)
    monkeypatch.setattr(compiling, "send", stopped)
    with pytest.raises(OverloadedError):
        compiler.compile(StructuredOutputs(regex="ab"))
    assert len(tokenizers) == 2, "of the task, and of the warm one for the next"
    monkeypatch.undo()


def test_a_grammar_whose_own_process_was_killed_is_no_fault_of_its_text(
    compiler: GrammarCompiler,
) -> None:
    """Kill the forked child that compiles it, as a host without memory does first."""
    compiler.warm()
    assert compiler._process is not None and compiler._process._process is not None
    before = compiler._process._process
    done = threading.Event()

    def kill(number: int) -> None:
        while not done.wait(0.01):
            for pid in processes_below(before.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    for number in (signal.SIGKILL, signal.SIGTERM):
        done.clear()
        killer = threading.Thread(target=kill, args=(number,))
        killer.start()
        try:
            with pytest.raises(OverloadedError, match="was ended, twice"):
                compiler.compile(SLOW)
        finally:
            done.set()
            killer.join()
    assert compiler._process._process is before
    compiler.compile(StructuredOutputs(regex="abc"))


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
@pytest.mark.parametrize("times", [1, 2])
def test_a_grammar_is_blamed_for_two_crashes(
    compiler: GrammarCompiler, number: int, times: int
) -> None:
    """One may come from outside, or be the machine's fault."""
    compiler.warm()
    assert compiler._process is not None and compiler._process._process is not None
    server = compiler._process._process.pid
    done = threading.Event()

    def kill() -> None:
        killed: set[int] = set()
        while len(killed) < times and not done.wait(0.001):
            for pid in {*processes_below(server)} - killed:
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        if times == 1:
            compiler.compile(StructuredOutputs(json={"type": "integer", "multipleOf": 99_991}))
        else:
            with pytest.raises(InvalidRequestError, match="needs more than"):
                compiler.compile(SLOW)
    finally:
        done.set()
        killer.join()


def test_nothing_starts_after_the_end(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    start = subprocess.Popen
    closing = threading.Thread(target=compiler.close)

    def watched(*arguments: Any, **options: Any) -> Any:
        started.append(start(*arguments, **options))
        closing.start()
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", watched)
    with contextlib.suppress(EngineClosedError):  # unless it was ready before that
        compiler.warm()
    closing.join()
    assert [each.poll() is not None for each in started] == [True]
    for ask in (compiler.warm, partial(compiler.compile, StructuredOutputs(regex="ab"))):
        with pytest.raises(EngineClosedError):
            ask()
    assert len(started) == 1


def test_text_before_the_grammar_is_free(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="ab"), b"</think>")
    state = GrammarState(grammar, tokenizer.token_bytes, WIDTH)
    for token in tokenizer.encode("Anything at all </think>"):
        state.accept(token)
    assert not state.waiting
    for token in tokenizer.encode_plain("ab"):
        assert not state.finished
        state.accept(token)
    state.accept(min(tokenizer.eos_ids))
    assert state.finished


def test_white_space_behind_the_mark_is_enforced(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(StructuredOutputs(regex="ab"), b"</think>\n\n")
    (line, _), end = tokenizer.encode_plain("\n\n"), tokenizer.encode("</think>")[0]
    state = GrammarState(grammar, tokenizer.token_bytes, WIDTH)
    assert state.allowed() is None
    with state.ahead():
        state.accept(end)
        for _ in range(2):
            assert allowed_tokens(state) == [line]
            state.accept(line)
        assert line not in allowed_tokens(state)
    assert state.waiting and state.allowed() is None
    for token in (end, line, line, *tokenizer.encode_plain("ab"), min(tokenizer.eos_ids)):
        assert not state.finished
        state.accept(token)
    assert state.finished and not state.over_limit


@pytest.mark.parametrize(
    ("token", "forced"),
    [(b"x</think>", b"\n\n"), (b"</think>\n", b"\n"), (b"</think>\n\n", b""),
     (b"</think>\n\na", b""), (b"</think>a", b""), (b"</think> ", b"")],
)  # fmt: skip
def test_a_token_may_reach_beyond_the_mark(
    compiler: GrammarCompiler, tokenizer: Tokenizer, token: bytes, forced: bytes
) -> None:
    """Nothing is put before an answer that has begun with something else already."""
    grammar = compiler.compile(StructuredOutputs(regex="a*b"), b"</think>\n\n")
    state = GrammarState(grammar, lambda at: token if at < 0 else tokenizer.token_bytes(at), WIDTH)
    state.accept(-1)
    assert not state.waiting and not state.finished
    assert b"".join(map(tokenizer.token_bytes, state.forced)) == forced
    for each in (*state.forced, *tokenizer.encode_plain("b"), min(tokenizer.eos_ids)):
        state.accept(each)
    assert state.finished and not state.over_limit


def allowed_tokens(state: GrammarState) -> list[int]:
    bits = state.allowed()
    assert bits is not None
    return [int(at) for at in np.flatnonzero(np.unpackbits(bits, bitorder="little"))]


def test_what_a_grammar_was_made_from_counts_too(compiler: GrammarCompiler) -> None:
    """It is what the grammar is found by, and may be much longer."""
    compiler.warm()
    for letter in "ab":
        before = compiler.num_bytes
        compiler.compile(StructuredOutputs(json={"type": "null", "description": letter * 50_000}))
        assert compiler.num_bytes >= before + 50_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its allocator can be asked")
def test_a_grammar_counts_as_much_as_it_takes(tokenizer: Tokenizer) -> None:
    letters = random.Random(0)
    words = tuple("".join(letters.choices("abcdefghijklmnop", k=150)) for _ in range(300))
    with contextlib.closing(
        GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=60.0)
    ) as compiler:
        compiler.compile(StructuredOutputs(regex="a"))
        counted, taken = compiler.num_bytes, allocated()
        compiler.compile(StructuredOutputs(choice=words))
        taken = allocated() - taken
        assert taken > 200_000, "too small to tell"
        assert taken <= 1.1 * (compiler.num_bytes - counted)


def allocated() -> int:
    """Bytes that this process has of its C library."""

    class Info(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                         "uordblks", "fordblks", "keepcost")
        ]  # fmt: skip

    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Info
    gc.collect()
    found = ask()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its allocator can be asked")
def test_the_process_keeps_nothing_of_long_texts(tokenizer: Tokenizer) -> None:
    with contextlib.closing(
        GrammarCompiler(tokenizer, WIDTH, tokenizer.eos_ids, seconds=60.0)
    ) as compiler:
        compiler.compile(StructuredOutputs(regex="ab"))
        compiling = compiler._process
        assert compiling is not None
        running = compiling._process
        assert running is not None
        before = anonymous(running.pid)
        for letter in "abc":
            schema = {"type": "null", "description": letter * 20_000_000}
            tag = {"type": "json_schema", "json_schema": schema}
            source = json.dumps({"type": "structural_tag", "format": tag})
            compiling.compile({"kind": "structural_tag", "source": source})
        deadline = time.monotonic() + 60  # it answers before it gives back
        while (kept := anonymous(running.pid) - before) > 8 << 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept <= 8 << 20


def anonymous(process: int) -> int:
    """Bytes of memory that belong to no file."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

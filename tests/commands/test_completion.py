"""Completion in real shells: what they offer is what the parser accepts."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vlm_serve
from vlm_serve.cli import main
from vlm_serve.commands.completion import SHELLS, script

ROOT = Path(vlm_serve.__file__).parents[1]

CASES = [
    (("",), {"serve", "plan", "eval", "completion"}, {"--help", "longbench"}),
    (("pla",), {"plan"}, {"serve"}),
    (("serve", "--native-k"), {"--native-kernels"}, {"--no-native-kernels"}),
    (("serve", "demo", "--native-kernels", ""), {"auto", "build"}, {"serve"}),
    (("serve", "--log-level", "w"), {"warning"}, {"error"}),
    (("eval", ""), {"longbench", "video", "lmms"}, {"serve"}),
    (("eval", "lmms", "--through", ""), {"server", "pipeline"}, {"lmms"}),
    (("completion", ""), set(SHELLS), {"serve"}),
]
"""Words before the cursor, what is offered among others, and what is not."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The scripts by shell, beside a command that runs this checkout."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        (folder / shell).write_text(script(shell))
    command = folder / "vlm-serve"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vlm_serve.cli "$@"\n')
    command.chmod(0o755)
    return {shell: folder / shell for shell in SHELLS}


def with_command(scripts: dict[str, Path]) -> dict[str, str]:
    """The environment of a shell that finds the command and this checkout."""
    path = f"{scripts['bash'].parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


def program(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell}")
    return found


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script(shell)


def test_nothing_of_it_is_loaded_when_nobody_completes() -> None:
    text = "import sys; from vlm_serve.cli import main; main(['models']); "
    text += "print('argcomplete' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", text], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(("words", "offered", "others"), CASES)
def test_in_bash(
    scripts: dict[str, Path], words: tuple[str, ...], offered: set[str], others: set[str]
) -> None:
    text = (
        'source "$1"; shift; COMP_LINE="vlm-serve $*"; COMP_POINT=${#COMP_LINE}; '
        "_python_argcomplete vlm-serve; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = [program("bash"), "--norc", "-c", text, "bash", str(scripts["bash"]), *words]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=with_command(scripts)
    )
    said = set(done.stdout.split())
    assert offered <= said and not others & said and not done.stderr


@pytest.mark.parametrize(("words", "offered", "others"), CASES)
def test_in_fish(
    scripts: dict[str, Path], words: tuple[str, ...], offered: set[str], others: set[str]
) -> None:
    text = f'source "{scripts["fish"]}"; complete -C "vlm-serve {" ".join(words)}"'
    command = [program("fish"), "--no-config", "-c", text]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=with_command(scripts)
    )
    said = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert offered <= said and not others & said and not done.stderr


def test_in_zsh(scripts: dict[str, Path], tmp_path: Path) -> None:
    """In a terminal, since zsh completes nowhere else."""
    zsh = program("zsh")
    pid, terminal = pty.fork()
    if pid == 0:
        variables = {**with_command(scripts), "HOME": str(tmp_path), "TERM": "dumb", "PS1": "% "}
        os.execve(zsh, ["zsh", "-f", "-i"], variables)
    try:
        begin = f"autoload -U compinit; compinit -u -D; source {scripts['zsh']}; echo rea''dy\n"
        assert "ready" in typed(terminal, begin, "ready")
        for words, whole in (
            ("vlm-serve comple\t", "completion "),
            ("vlm-serve serve --log-level de\t", "debug "),
            ("vlm-serve eval lmms --include-p\t", "--include-path "),
        ):
            assert whole in typed(terminal, f"\x15{words}", whole)
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def typed(terminal: int, keys: str, awaited: str) -> str:
    """Type keys and return what the terminal shows until then, for some seconds at most."""
    os.write(terminal, keys.encode())
    shown, deadline = "", time.monotonic() + 20
    while awaited not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 65536).decode(errors="replace")
    return shown

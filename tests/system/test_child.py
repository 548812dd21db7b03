"""What the commands import, and what the processes that they start do: nothing of the folder that
they were started in."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
import pytest
from planted import FOREIGN, LATER, STANDARD, imported, plant
from process_tree import processes_below
from server_process import ServerProcess, server_process
from serving import wait_for
from sweeps import quick

from vlm_serve.system import child
from vlm_serve.system.links import LINKS

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ("--device", "cpu", "--cache-memory", "32MiB", "--max-model-len", "2048", "--threads", "1")
SAFE = (sys.executable, "-P", "-m", "vlm_serve.cli")
"""As the console script: this process itself does not look into the current folder."""
UNSET = {"PYTHONSAFEPATH": ""}
SECONDS = 120.0


def picture() -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 48), "red").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 4, "temperature": 0, **fields}


def structured() -> dict[str, Any]:
    """A request that a grammar is compiled for."""
    return chat("Say it.", structured_outputs={"regex": "(yes|no)"})


def with_picture() -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": picture()}}
    return chat([image, {"type": "text", "text": "What is this?"}])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "started-here"
    made.mkdir()
    return made


def ask(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=SECONDS, trust_env=False) as client:
        # A gateway listens before its replicas have told it of themselves.
        wait_for(lambda: client.get("/ready").status_code == 200)
        for body in (structured(), with_picture()):
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text


@contextmanager
def started(
    folder: Path, *arguments: str, command: str = "serve", start: tuple[str, ...] = SAFE
) -> Iterator[ServerProcess]:
    """A server whose log is shown if it does not start."""
    log = folder.parent / "log"
    try:
        with (
            log.open("w") as file,
            server_process(
                "demo",
                *SMALL,
                *arguments,
                start=start,
                cwd=folder,
                command=command,
                environment=UNSET,
                log=file,
            ) as server,
        ):
            yield server
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from error


@pytest.mark.parametrize("ranks", quick([1, 2], 1, pytest.mark.processes))
def test_serve_imports_nothing_from_the_current_folder(folder: Path, ranks: int) -> None:
    ran = plant(folder, (*FOREIGN, *STANDARD, "vlm_serve"))
    with started(folder, "--tensor-parallel-size", str(ranks)) as server:
        ask(server)
    assert imported(ran) == []


@pytest.mark.ray
def test_deploy_imports_nothing_from_the_current_folder(folder: Path) -> None:
    pytest.importorskip("ray")
    ran = plant(folder, (*FOREIGN, *STANDARD, "vlm_serve"))
    arguments = ("--replicas", "1", "--shutdown-timeout", "1", "--tensor-parallel-size", "2")
    kept = ("--disk-cache-path", "kept")
    with started(folder, *arguments, *kept, command="deploy") as server:
        ask(server)
        assert (folder / "kept").is_dir(), "a relative path leads from there all the same"
    assert imported(ran) == []


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SAFE, *arguments],
        cwd=folder,
        env={**os.environ, **UNSET, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.processes
def test_a_batch_imports_nothing_from_the_current_folder(folder: Path) -> None:
    ran = plant(folder, (*FOREIGN, *STANDARD, "vlm_serve"))
    asked, output = folder.parent / "in.jsonl", folder.parent / "out.jsonl"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate((structured(), with_picture()))
    ]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(folder, "run-batch", "-i", str(asked), "-o", str(output), *SMALL)
    assert done.returncode == 0, done.stderr
    assert imported(ran) == []


@pytest.mark.processes
def test_other_commands_import_nothing_from_the_current_folder(folder: Path) -> None:
    ran = plant(folder, (*FOREIGN, *STANDARD, "vlm_serve"))
    report = str(folder.parent / "report.html")
    for arguments, status in (
        (("doctor",), 0),
        (("plan", "demo"), 0),
        (("models",), 0),
        (("chat", "--model", "demo", "--max-tokens", "2", *SMALL, "What?"), 0),
        # lmms-eval is not installed beside this package; its process has started by then.
        (("eval", "lmms", "demo", "--tasks", "none", "-o", report, *SMALL), 1),
    ):
        done = run(folder, *arguments)
        assert done.returncode == status, (arguments, done.stderr)
    assert imported(ran) == []


@pytest.fixture
def tree(folder: Path) -> Path:
    """A source tree that is not installed."""
    for name in ("vlm_serve", "cache", "kernels", "preprocess"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    return folder


@pytest.mark.parametrize("command", quick(["serve", "deploy"], 1, pytest.mark.ray))
def test_a_source_tree_is_found_and_nothing_beside_its_package(tree: Path, command: str) -> None:
    if command == "deploy":
        pytest.importorskip("ray")
    ran = plant(tree, (*FOREIGN, *LATER))
    start = (sys.executable, "-m", "vlm_serve.cli")
    with started(tree, command=command, start=start) as server:
        ask(server)
        lines = list(processes_below(server.process.pid).values())
    assert imported(ran) == []
    ours = [line for line in lines if "child.py" in line]
    assert ours
    assert all(str(tree) in line for line in ours), "another package's children"


@pytest.mark.parametrize("option", [("-m", "app"), ("-mapp",), ("-Bm", "app.__main__")])
def test_a_program_that_uses_the_package_keeps_its_folder(
    folder: Path, option: tuple[str, ...]
) -> None:
    """Python imports the package that it is to run before it says which one that is."""
    (folder / "app").mkdir()
    (folder / "app" / "__init__.py").write_text("import vlm_serve\n")
    (folder / "app" / "__main__.py").write_text("import beside\n")
    (folder / "beside.py").write_text("import sys; print('beside', sys.argv[1:])\n")
    done = subprocess.run(
        [sys.executable, *option, "-m", "vlm_serve.cli"],
        cwd=folder,
        env={**os.environ, **UNSET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "beside ['-m', 'vlm_serve.cli']\n", done.stderr


@pytest.mark.parametrize(
    "option",
    quick(
        [("-m", "vlm_serve.cli"), ("-mvlm_serve.cli",), ("-Bm", "vlm_serve.cli")],
        1,
        pytest.mark.processes,
    ),
)
def test_the_command_line_leaves_the_current_folder_alone(
    folder: Path, option: tuple[str, ...]
) -> None:
    ran = plant(folder, (*FOREIGN, *LATER))
    done = subprocess.run(
        [sys.executable, *option, "models"],
        cwd=folder,
        env={**os.environ, **UNSET},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert imported(ran) == []


CONSOLE = (
    "import sys; sys.argv[0] = '/usr/bin/vlm-serve'; from vlm_serve.cli import main; main(); "
    "print(*sys.path, sep='\\n')"
)


@pytest.mark.parametrize("text", quick([":{0}", "{0}:", "{0}::", ":"], 1, pytest.mark.processes))
@pytest.mark.parametrize("start", [("-m", "vlm_serve.cli"), ("-P", "-m", "vlm_serve.cli"), ()])
def test_a_colon_too_many_brings_nothing_of_the_current_folder(
    folder: Path, text: str, start: tuple[str, ...]
) -> None:
    named = folder.parent / "named"
    named.mkdir()
    ran = plant(folder, (*FOREIGN, *LATER))
    done = subprocess.run(
        [sys.executable, *(start or ("-P", "-c", CONSOLE)), "models"],
        cwd=folder,
        env={**os.environ, **UNSET, "PYTHONPATH": text.format(named)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert imported(ran) == []
    if not start:
        assert (str(named) in done.stdout.splitlines()) == ("{0}" in text), "it is wanted"


@pytest.mark.processes
def test_a_current_folder_that_is_named_stays(folder: Path) -> None:
    for text in (f":{folder}", ".:", "::."):
        done = subprocess.run(
            [sys.executable, "-P", "-c", CONSOLE, "models"],
            cwd=folder,
            env={**os.environ, **UNSET, "PYTHONPATH": text},
            capture_output=True,
            text=True,
            check=False,
        )
        assert str(folder) in done.stdout.splitlines(), done.stderr


def test_what_a_user_has_put_on_the_path_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for empty entries, which mean the current folder."""
    named = folder.parent / "named"
    named.mkdir()
    (named / "wanted.py").touch()
    ran = plant(folder, ("json",))
    monkeypatch.chdir(folder)
    program = "import json, sys; sys.exit('wanted' not in sys.modules and 1)"
    (named / "sitecustomize.py").write_text("import wanted\n")
    for text in (f"{named}", f":{named}", f"{named}:", "../named", "::../named::"):
        monkeypatch.setenv("PYTHONPATH", text)
        subprocess.run([sys.executable, "-P", "-c", program], env=child.environment(), check=True)
    assert imported(ran) == []
    monkeypatch.setenv("PYTHONPATH", "")
    subprocess.run([sys.executable, "-c", "import json"], env=child.environment(), check=True)
    assert imported(ran) == []


def test_a_child_has_its_arguments_and_its_variables() -> None:
    line = child.command("vlm_serve.commands.doctor", "first", "")
    assert line[0] == sys.executable and line[-3:] == ["vlm_serve.commands.doctor", "first", ""]
    assert child.environment(ONE="1")["ONE"] == "1"


def test_the_package_may_lie_in_a_folder_of_another_name(tmp_path: Path) -> None:
    """Where packages are kept by their digest, and linked to."""
    folder = tmp_path / "1f0c"
    (folder / "system").mkdir(parents=True)
    for name in ("__init__.py", "system/child.py", "system/links.py", "system/version.py"):
        shutil.copy(ROOT / "vlm_serve" / name, folder / name)
    for name in LINKS:
        (folder / name).mkdir()
    (folder / "said.py").write_text("print(__name__, __package__)\n")
    (tmp_path / "vlm_serve").symlink_to(folder)
    started = tmp_path / "vlm_serve" / "system" / "child.py"
    line = [sys.executable, "-P", str(started), "vlm_serve.said"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.stdout == "__main__ vlm_serve\n", done.stderr

"""Checks a release as people get it: `make release-check`.

    PYTHONPATH=tests python release/check.py [--pythons PYTHON ...] [--wheels FOLDER]

Builds the source distribution and the wheels, has twine check them, and installs this
architecture's wheel into an empty environment of each Python. There the demo must be served, and
answer a question about a picture, with no compiler on the path and nothing compiled.

Pythons are those of 3.11 to 3.14 on the path, or the named ones. `--wheels` names a folder of CPU
builds of torch in place of PyTorch's index. Needs the public index of packages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import wheels
from install import ANSWER, PATIENCE, QUESTION, ask, check_size, healthy, index_of, stranger
from ports import free_port
from torch_index import find_problem, pinned_version

from vlm_serve.kernels.native_processor import architecture

PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
USABLE = "import ensurepip, venv, platform; print(platform.python_version())"
SHIPPED = "of the installed wheel"
"""How `vlm-serve doctor` begins to describe kernels that the wheel carries."""


class CheckFailed(Exception):
    """The release is not as it should be; the message says where."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check everything; return 1 for the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="PYTHON")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=wheels.ROOT / "dist", metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        found = usable(options.pythons)
        built = build_all(options.out)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlm-serve-")))
            index = CPU_INDEX
            if options.wheels is not None:
                index = stack.enter_context(index_of(options.wheels, folder / "index"))
            check_text(built, folder)
            (wheel,) = (each for each in built if each.name.endswith(f"{architecture()}.whl"))
            for version, python in found.items():
                check_python(version, python, wheel, folder / version, index)
    except (CheckFailed, subprocess.CalledProcessError) as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    print(f"the release is as it should be, for Python {', '.join(found)}")
    return 0


def usable(pythons: Sequence[str]) -> dict[str, str]:
    """Return the interpreters that can make an environment: version -> path or name.

    Raises:
        CheckFailed: there is none.
    """
    found = {}
    for python in pythons:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            command = [python, "-c", USABLE]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[done.stdout.strip()] = python
    if not found:
        raise CheckFailed(f"none of {', '.join(pythons)} can make a virtual environment")
    return found


def build_all(out: Path) -> list[Path]:
    """Build the source distribution and all wheels into a folder, and return their paths.

    Raises:
        CheckFailed: one cannot be built; the reason has been printed.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("vlm_serve-*.whl"), *out.glob("vlm_serve-*.tar.gz")):
        old.unlink()
    if wheels.main(["--out", str(out)]):
        raise CheckFailed("a wheel cannot be built")
    return sorted(out.glob("vlm_serve-*"))


def check_text(built: list[Path], folder: Path) -> None:
    """Have twine check the metadata and the text for a package index. Raises CalledProcessError."""
    python = environment(sys.executable, folder / "twine")
    variables = stranger(os.environ, folder)
    subprocess.run([*pip(python), "install", "--quiet", "twine"], check=True, env=variables)
    command = [python, "-m", "twine", "check", "--strict", *map(str, built)]
    subprocess.run(command, check=True, env=variables)


def check_python(version: str, python: str, wheel: Path, folder: Path, index: str) -> None:
    """Install the wheel for one interpreter and ask the demo.

    Args:
        version: of the interpreter.
        python: its path or name.
        wheel: this architecture's wheel.
        folder: a new folder for the environment, and the server's home.
        index: of CPU builds of torch, if it is within reach.

    Raises:
        CheckFailed: something is not as it should be.
        subprocess.CalledProcessError: it cannot be installed.
    """
    home = folder / "home"
    home.mkdir(parents=True)
    installed, variables = environment(python, folder / "venv"), stranger(os.environ, home)
    beside = [] if find_problem(index, pinned_version()) else ["--extra-index-url", index]
    # A stand-in has the pinned torch alone.
    pinned = [] if index == CPU_INDEX else [f"torch=={pinned_version()}"]
    command = [*pip(installed), "install", "--quiet", *beside, *pinned, str(wheel)]
    subprocess.run(command, check=True, env=variables)
    program = str(Path(installed).parent / "vlm-serve")
    empty = folder / "no compiler here"
    empty.mkdir()
    bare = {name: value for name, value in variables.items() if name != "CXX"}
    bare["PATH"] = str(empty)
    said = subprocess.run(
        [program, "doctor"], check=True, env=bare, cwd=empty, capture_output=True, text=True
    ).stdout
    kernels = next(line.split(maxsplit=1)[1] for line in said.splitlines() if "kernels " in line)
    if not kernels.startswith(SHIPPED):
        raise CheckFailed(f"Python {version}: the kernels are {kernels}")
    began = time.monotonic()
    with serving(program, bare, empty) as url:
        print(f"Python {version} listens after {time.monotonic() - began:.1f} s: {kernels}")
        answer = ask(url)
    if answer != ANSWER:
        raise CheckFailed(f"Python {version}: {QUESTION} {answer}")
    if (home / ".cache" / "vlm-serve" / "native").exists():
        raise CheckFailed(f"Python {version}: something was compiled")
    check_size(folder / "venv", must_be_small=False)


def environment(python: str, folder: Path) -> str:
    """Make a virtual environment and return its interpreter's path. Raises CalledProcessError."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "python")


def pip(python: str) -> list[str]:
    """Return the words that begin a command of an environment's pip."""
    return [python, "-m", "pip", "--disable-pip-version-check"]


@contextmanager
def serving(program: str, variables: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Serve the demo; the URL, once it listens. Raises CheckFailed if it does not come to that."""
    port = free_port()
    command = [program, "serve", "demo", "--port", str(port)]
    process = subprocess.Popen(command, env=dict(variables), cwd=folder)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
    try:
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise CheckFailed("the demo does not come to a server that listens")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=120)


if __name__ == "__main__":
    sys.exit(main())

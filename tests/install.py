"""Installs with `make serve` as on a machine without configuration, and asks about a picture.

    make test-install    (python tests/install.py [--here | --wheels FOLDER] [--torchvision])

What git tracks is copied into a fresh folder, which is the home folder as well; of the environment,
whatever configures how packages are installed is left out. The server that `make serve` starts must
answer a question about a picture; then all is removed.

`--here` asks the server of this checkout instead, as it is installed. `--wheels` names a folder
with a CPU build of torch, which an index on loopback serves: a stand-in for PyTorch's index of such
builds, which the Makefile must then have chosen. `--torchvision` runs the test files that use
torchvision as well, by `make test`: its wheel is built for torch with CUDA. Needs the public index
of packages, and up to 8 GB of disk for a while.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dockerfile import ROOT
from ports import free_port
from resolution import public_environment

PICTURE, QUESTION, ANSWER = "examples/media/star.png", "What color is the star?", "The star is red."
CPU_BYTES = 2_600_000_000
"""The most that an environment without CUDA may take of a disk."""
PATIENCE = 30 * 60.0
"""Seconds until everything is downloaded, kernels are compiled and the server listens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--here", action="store_true", help="ask the server of this checkout")
    where.add_argument("--wheels", type=Path, metavar="FOLDER", help="with a CPU build of torch")
    parser.add_argument(
        "--torchvision", action="store_true", help="run the test files that use torchvision too"
    )
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlm-serve-install-")))
        words = []
        if options.wheels is not None:
            url = stack.enter_context(index_of(options.wheels, folder / "index"))
            words.append(f"CPU_INDEX={url}")
        checkout = ROOT if options.here else copied(folder / "vlm-serve")
        environment = stranger(os.environ, folder)
        begun = time.monotonic()
        with serving(checkout, environment, words) as url:
            print(f"installed and listening after {time.monotonic() - begun:.0f} s", flush=True)
            said = ask(url)
        assert said == ANSWER, f"{QUESTION} {said}"
        print("the server has answered", flush=True)
        check_size(checkout / ".venv", must_be_small=options.wheels is not None)
        if options.torchvision:
            files = f"ARGS={' '.join(using_torchvision(checkout))}"
            command = ["make", "test", f"PYTHON={python()}", files, *words]
            subprocess.run(command, cwd=checkout, env=environment, check=True)


def using_torchvision(checkout: Path) -> list[str]:
    """Return the test files that use torchvision, most of them through the oracle.

    Files about packages and about the house only speak of it.
    """
    uses = re.compile(
        r"prepare_(torchvision|models)|torchvision\.ops|oracle\.(processor|model|greedy|logits)\b"
    )
    files = sorted((checkout / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(checkout)) for path in files if uses.search(path.read_text("utf-8"))
    ]


def copied(target: Path) -> Path:
    """Copy what git tracks into a folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, path, follow_symlinks=False)
    return target


def stranger(variables: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return an environment without this machine's configuration and without the Makefile's own
    variables; nothing that is downloaded is kept, in the home folder neither.

    `make test-install ARGS=...` exports ARGS to this script: without this, the `make serve` that it
    starts would pass them on to the server.
    """
    ours = re.compile(r"(VLM_SERVE|XDG_|HF_)")
    kept = {name: value for name, value in outside_make(variables).items() if not ours.match(name)}
    own = {"HOME": str(home), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    return public_environment(kept) | own


def outside_make(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a `make` that runs this has exported."""
    names = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(("MAKE", "MFLAGS")) and name not in names
    }


@contextmanager
def index_of(wheels: Path, folder: Path) -> Iterator[str]:
    """The address of an index of packages with the folder's wheels of torch."""
    page = folder / "torch"
    page.mkdir(parents=True)
    for path in wheels.glob("torch-*+cpu-*.whl"):
        (page / path.name).symlink_to(path.resolve())
    handler = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Handler(SimpleHTTPRequestHandler):
    """Says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(checkout: Path, environment: Mapping[str, str], words: list[str]) -> Iterator[str]:
    """Serves with `make serve`; the URL, once it listens.

    Raises:
        SystemExit: it cannot be installed, or does not start or end in order.
    """
    port = free_port()
    process = subprocess.Popen(
        ["make", "serve", f"PYTHON={python()}", f"PORT={port}", *words],
        cwd=checkout,
        env=dict(environment),
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE
    try:
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("make serve does not come to a server that listens")
            time.sleep(1.0)
        yield url
    finally:
        process.terminate()  # make passes it on, and waits for the server
        process.wait(timeout=120)


def python() -> Path:
    """Return the interpreter that this environment was made with."""
    return Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}"


def healthy(url: str) -> bool:
    """Tell whether a server listens there and is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10):
            return True
    except OSError:
        return False


def ask(url: str) -> str:
    """Return the answer to the question about the picture."""
    picture = base64.b64encode((ROOT / PICTURE).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": QUESTION},
    ]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
    return said


def check_size(environment: Path, *, must_be_small: bool) -> None:
    """Print what an environment takes of the disk.

    Raises:
        SystemExit: it has a build of torch for CPUs and is too large, or has none and must have.
    """
    used = 512 * sum(path.lstat().st_blocks for path in environment.rglob("*"))
    (torch,) = environment.glob("lib/python*/site-packages/torch-*.dist-info")
    cuda = any(environment.glob("lib/python*/site-packages/nvidia"))
    print(f"{torch.stem}, {'with' if cuda else 'without'} CUDA: {used / 1e9:.2f} GB", flush=True)
    if cuda and must_be_small:
        raise SystemExit("the index of builds for CPUs has not been taken")
    if not cuda and used > CPU_BYTES:
        raise SystemExit(f"that is more than {CPU_BYTES / 1e9} GB")


if __name__ == "__main__":
    main()

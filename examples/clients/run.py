"""Try clients against a server, each in an environment of its own, and print a table.

    python examples/clients/run.py                    # all of clients.toml
    python examples/clients/run.py codex openai --strict
    python examples/clients/run.py openai --base-url http://127.0.0.1:8000/v1 --model demo
    python examples/clients/run.py --demo             # what tries/demo.py has, without a script
    python examples/clients/run.py --turn 7           # a few small ones, others with each number

Without --base-url it starts a server of the demo model whose answers to some questions come from
script.json (tests/scripted_server.py): HTTP, templates, parsers and cache are real. With --demo the
model answers by itself, as `vlm-serve serve demo` does. Packages are installed into --cache, from
pinned versions. A client without registry or node is skipped by name. Behind each result stand the
client's APIs and how much of a turn its next turn had from the cache, as recorder.py saw them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recorder import Recorder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRIES = HERE / "tries"
TOKENIZER = ROOT / "vlm_serve" / "demo" / "dense"
PICTURE = HERE.parent / "media" / "heart.png"
STEP = re.compile(r"^(ok|MODEL|FAIL) (.*)$", re.MULTILINE)
UNREACHED = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH|ENOTCACHED"
    r"|NewConnectionError|NameResolutionError|ConnectTimeoutError|dns error|tcp connect error"
)
A_TURN, TURN_SECONDS = 4, 150
"""Small clients of one turn, and the time after which no further one begins."""
LIMIT, LONG = 300, 900
"""Seconds for a client; the longer one where the model reads and writes everything itself."""
SERVER = (
    "--port",
    "0",
    "--max-model-len",
    "65536",
    "--allow-long-max-model-len",
    "--response-store",
    "64MiB",
)


class SkippedError(Exception):
    """The client cannot be had here."""


@dataclass(frozen=True)
class Client:
    """One entry of clients.toml."""

    name: str
    fields: Mapping[str, Any]

    @property
    def version(self) -> str:
        return str(self.fields.get("version") or ", ".join(self.fields.get("pip", ())))

    @property
    def script(self) -> Path:
        return TRIES / str(self.fields.get("script") or f"{self.name.replace('-', '_')}.py")


def of_turn(clients: list[Client], turn: int) -> list[Client]:
    """Return the small clients of a turn: all have been taken after as few turns as possible."""
    small = [client for client in clients if client.fields.get("small")]
    return [small[(turn * A_TURN + at) % len(small)] for at in range(min(A_TURN, len(small)))]


def read_clients() -> list[Client]:
    entries = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))
    return [Client(name, fields) for name, fields in entries.items()]


def called(command: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with a bound; all its output is one text."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        **options,
    )


def installed(folder: Path, wanted: str, commands: list[list[str]]) -> None:
    """Run the commands that install, unless the same was installed before."""
    done = folder / "installed"
    if done.is_file() and done.read_text() == wanted:
        return
    for command in commands:
        made = called(command, 900, cwd=folder)
        if made.returncode and UNREACHED.search(made.stdout):
            raise SkippedError("no registry of packages within reach")
        if made.returncode and "EBADPLATFORM" in made.stdout:
            raise SkippedError("no package for this system")
        if made.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{made.stdout[-2000:]}")
    done.write_text(wanted)


def python_of(client: Client) -> str:
    """Return this Python, or a newer one on the path if the client needs it."""
    oldest = int(client.fields.get("python", "3.0").split(".")[1])
    if sys.version_info[1] >= oldest:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(oldest, 15)]
    found = [shutil.which(name) for name in names]
    kept = Path.home() / ".pyenv" / "versions"
    found += [str(path) for name in names for path in sorted(kept.glob(f"*/bin/{name}"))]
    for python in filter(None, found):  # a shim of pyenv is there, but does not run
        if not called([python, "--version"], 30).returncode:
            return python
    raise SkippedError(f"it needs Python 3.{oldest}")


def command_of(client: Client, cache: Path) -> tuple[list[str], str]:
    """Install a client; return the start of its script, and the folders of its commands."""
    if "node" in client.fields:
        if not (shutil.which("node") and shutil.which("npm")):
            raise SkippedError("no node and npm")
        source, folder = HERE / "node" / client.fields["node"], cache / client.fields["node"]
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, folder)
        lock = (source / "package-lock.json").read_text(encoding="utf-8")
        verb = client.fields.get("npm", "ci")
        installed(folder, lock, [["npm", verb, "--no-audit", "--no-fund", "--fetch-retries", "1"]])
        places = client.fields.get("binaries", [".bin"])
        binaries = os.pathsep.join(str(folder / "node_modules" / each) for each in places)
        if client.script.suffix == ".py":
            return [sys.executable, str(client.script)], binaries
        for each in TRIES.glob("*.mjs"):
            shutil.copy(each, folder)
        return ["node", str(folder / client.script.name)], binaries
    packages = [str(each) for each in client.fields.get("pip", ())]
    folder = cache / f"py-{client.fields.get('environment', client.name)}"
    folder.mkdir(parents=True, exist_ok=True)
    python = str(folder / "bin" / "python")
    install = ["pip", "install", "--quiet"]
    if uv := shutil.which("uv"):
        make = [
            uv,
            "venv",
            "--quiet",
            "--allow-existing",
            "--python",
            python_of(client),
            str(folder),
        ]
        install = [uv, *install, "--python", python]
    else:
        make = [python_of(client), "-m", "venv", str(folder)]
        install = [python, "-m", *install, "--retries", "1"]
    commands = [make, [*install, *packages]]
    installed(folder, "\n".join(packages), commands)
    return [python, str(client.script)], str(folder / "bin")


def tried(
    client: Client, cache: Path, url: str, model: str, script: Path, limit: float
) -> tuple[str, str]:
    """Try one client; return "pass", "model", "skip" or "fail", and what it did.

    Args:
        script: what is run in its environment, if that is Python's.
        limit: seconds.
    """
    try:
        command, binaries = command_of(client, cache)
        command[-1] = str(script) if script.suffix == ".py" else command[-1]
    except SkippedError as error:
        return "skip", str(error)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return "fail", str(error)
    with tempfile.TemporaryDirectory(prefix="client-") as work:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        environment |= {
            "BASE_URL": url,
            "CLIENT": client.name,
            "MODEL": model,
            "PICTURE": str(PICTURE),
            "PWD": work,
            "TOKENIZER": str(TOKENIZER),
            "HOME": work,
            "PATH": f"{binaries}{os.pathsep}{environment['PATH']}",
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": url,
        }
        try:
            ran = called(command, limit, cwd=work, env=environment)
        except subprocess.TimeoutExpired as error:
            return "fail", f"not done after {limit:.0f} s: {str(error.output)[-1500:]}"
    steps = STEP.findall(ran.stdout)
    words = ", ".join(f"{'' if kind == 'ok' else kind + ' '}{text}" for kind, text in steps)
    if ran.returncode or not steps or any(kind == "FAIL" for kind, _ in steps):
        return "fail", f"{words}\n{ran.stdout[-3000:]}"
    return ("model" if any(kind == "MODEL" for kind, _ in steps) else "pass"), words


@contextlib.contextmanager
def own_server(log: Path, *, scripted: bool) -> Iterator[str]:
    """Serve the demo, perhaps with the answers of script.json; yield the base URL."""
    command = [sys.executable, str(ROOT / "tests" / "scripted_server.py")]
    command += [str(HERE / "script.json"), "demo", *SERVER]
    if not scripted:
        command = [sys.executable, "-m", "vlm_serve.cli", "serve", "demo", "--port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"URL +(http://\S+/v1)", line):
                yield found.group(1)
                return
        raise RuntimeError(f"the server ended early:\n{log.read_text()[-2000:]}")
    finally:
        process.terminate()
        process.communicate(timeout=60)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="clients (default: all)")
    parser.add_argument("--base-url", help="a running server's, with /v1")
    parser.add_argument("--model", default="demo")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--cache", type=Path, default=home / "vlm-serve" / "clients")
    parser.add_argument("--strict", action="store_true", help="the model's failures fail it too")
    parser.add_argument("--demo", action="store_true", help="ask the demo model itself")
    parser.add_argument("--turn", type=int, help="also the small clients of this number's turn")
    options = parser.parse_args(arguments)
    known = {
        each.name: each for each in read_clients() if each.fields.get("demo") or not options.demo
    }
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such clients: {', '.join(unknown)}; known: {', '.join(known)}")
    extra = [] if options.turn is None else of_turn(list(known.values()), options.turn)
    names = options.names or ([] if extra else list(known))
    chosen = [known[name] for name in names]
    chosen += [client for client in extra if client not in chosen]
    cache = options.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    failed = 0
    with contextlib.ExitStack() as stack:
        url = options.base_url or stack.enter_context(
            own_server(cache / "server.log", scripted=not options.demo)
        )
        began = time.monotonic()
        for client in chosen:
            if client.name not in names and time.monotonic() - began > TURN_SECONDS:
                print(f"{client.name:26} later  its turn had no time left", flush=True)
                continue
            script = TRIES / "demo.py" if options.demo else client.script
            limit = LONG if options.demo else client.fields.get("seconds", LIMIT)
            with Recorder(url) as seen:
                verdict, words = tried(client, cache, seen.url, options.model, script, limit)
            failed += verdict == "fail" or (options.strict and verdict == "model")
            wires = f"[{', '.join(seen.wires)}; turn 2: {seen.second_turn() or 'none'}]"
            print(f"{client.name:26} {verdict:6} {client.version:40} {words} {wires}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

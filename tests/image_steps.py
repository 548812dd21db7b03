"""Goes through the Dockerfile without a container: in a root folder that `debootstrap` makes anew.

    sudo python tests/image_steps.py [--arg TORCH_INDEX=] [--share /etc/pip.conf] [--base FOLDER]

Every RUN is run in it with chroot, as written, every COPY copies what git tracks; then the server
is started as the image would start it, asked for its health by the image's own HEALTHCHECK, asked a
question, and ended by SIGTERM. Mounts live in a namespace of their own and end with the process.

`--arg` gives a build argument. `--share` names files and folders of this machine that downloads
need (a pip configuration, certificates, a folder of packages): they are seen at the same place
inside. `--base` is a finished root folder of debootstrap, which is copied. Variables of the
environment that begin with PIP_ or name a proxy are passed on. Needs root, debootstrap, 6 GB of
disk and a few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from dockerfile import ROOT, Instruction, arguments, read

MIRROR = "http://deb.debian.org/debian"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATIENCE = 300.0
"""Seconds until the server has compiled its kernels and answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--share", action="append", default=[], type=Path, metavar="PATH")
    parser.add_argument("--base", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if os.environ.get("VLM_IMAGE_STEPS") != "alone":
        os.environ["VLM_IMAGE_STEPS"] = "alone"
        os.execvp(
            "unshare",
            ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv],
        )
    given = dict(each.split("=", 1) for each in options.arg)
    with tempfile.TemporaryDirectory(prefix="vlm-serve-image-") as folder:
        image = Image(Path(folder) / "root", arguments(given))
        image.begin(options.base, options.share)
        try:
            for instruction in read():
                image.follow(instruction)
            image.try_out()
        finally:
            image.end()
    print("every step of the Dockerfile was run, and the server has answered")


class Image:
    """A root folder that grows by instructions."""

    def __init__(self, root: Path, args: dict[str, str]) -> None:
        self._root = root
        self._args = args
        self._env = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("PIP_") or name.lower().endswith("_proxy")
        } | {"PATH": PATH}
        self._folder = "/"
        self._user = "root"
        self._told: dict[str, Instruction] = {}
        self._mounts: list[Path] = []

    def begin(self, base: Path | None, shared: list[Path]) -> None:
        """The base image, and what a container would see of its host."""
        suite = re.fullmatch(r"debian:(\w+)(-slim)?", self._args["BASE"])
        if suite is None:
            raise SystemExit(f"BASE is {self._args['BASE']}; only Debian can be made here")
        if base is not None:
            subprocess.run(["cp", "--archive", str(base), str(self._root)], check=True)
        else:
            command = ["debootstrap", "--variant=minbase", suite[1], str(self._root), MIRROR]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.copy("/etc/resolv.conf", self._root / "etc")
        self._mount("proc", self._root / "proc", "--types", "proc")
        for path in shared:
            inside = self._root / path.relative_to("/")
            if path.is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
            self._mount(str(path.resolve()), inside, "--bind", "--read-only")

    def _mount(self, what: str, where: Path, *options: str) -> None:
        subprocess.run(["mount", *options, what, str(where)], check=True)
        self._mounts.append(where)

    def end(self) -> None:
        """Nothing of this machine is left below the folder, which can be removed."""
        for path in reversed(self._mounts):
            subprocess.run(["umount", "--lazy", str(path)], check=True)

    def follow(self, instruction: Instruction) -> None:
        name, text = instruction.name, instruction.text
        print(f"{name} {text[:90]}", flush=True)
        if name == "RUN":
            begun = time.monotonic()
            subprocess.run(self._inside(["/bin/sh", "-c", text], self._args), check=True)
            print(f"    {time.monotonic() - begun:.0f} s", flush=True)
        elif name == "COPY":
            self._copy(instruction.words[:-1], instruction.words[-1])
        elif name == "WORKDIR":
            self._folder = text
            (self._root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            self._user = text
        elif name == "ENV":
            variable, value = text.split("=", 1)
            self._env[variable] = value
        elif name in ("HEALTHCHECK", "ENTRYPOINT", "CMD"):
            self._told[name] = instruction
        elif name not in ("ARG", "FROM", "EXPOSE"):
            raise SystemExit(f"{name} is not known here")

    def _copy(self, sources: list[str], target: str) -> None:
        """What git tracks of the sources, a folder's content into the target."""
        for source in sources:
            listed = subprocess.run(
                ["git", "ls-files", source], cwd=ROOT, check=True, capture_output=True, text=True
            )
            for name in listed.stdout.splitlines():
                inner = Path(name).relative_to(source) if (ROOT / source).is_dir() else name
                path = self._root / self._folder.lstrip("/") / target / inner
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, path, follow_symlinks=False)

    def _inside(self, command: list[str], more: dict[str, str]) -> list[str]:
        """The command in the root folder, with this environment and nothing else of ours."""
        home = "/root" if self._user == "root" else f"/home/{self._user}"
        env = {"HOME": home} | self._env | more
        return [
            *("env", "-i", *(f"{name}={value}" for name, value in env.items())),
            *("chroot", f"--userspec={self._user}", str(self._root)),
            *("/usr/bin/env", f"--chdir={self._folder}", *command),
        ]

    def try_out(self) -> None:
        """Starts the server, on a port of its own, asks it a question, and ends it.

        Raises:
            SystemExit: it does not start, answers nothing or does not end in order.
        """
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
        start = [*self._told["ENTRYPOINT"].words, *self._told["CMD"].words]
        server = subprocess.Popen(self._inside(start, {"VLM_SERVE_PORT": port}))
        check = self._told["HEALTHCHECK"].text.split("CMD ", 1)[1].replace("8000", port)
        deadline = time.monotonic() + PATIENCE
        try:
            while subprocess.run(
                self._inside(json.loads(check), {}), stderr=subprocess.DEVNULL, check=False
            ).returncode:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server does not start")
                time.sleep(1.0)
            print(f"    {ask(port)}")
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(timeout=90)
        if status:
            raise SystemExit(f"the server ended with status {status}")


def ask(port: str) -> str:
    """The answer to a question without a picture."""
    body = {"messages": [{"role": "user", "content": "Who drew this?"}], "max_tokens": 16}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
    return said


if __name__ == "__main__":
    main()

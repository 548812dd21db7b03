"""Resolves all that `make` and the Dockerfile install, as a machine without configuration would.

    make test-resolution    (python tests/resolution.py [--constraints FILE])

Every extra of pyproject.toml with the pins of constraints.txt, and what the Makefile installs
without dependencies, for every supported Python on x86-64 and aarch64: everything must be there as
a wheel, nothing may contradict, and nothing may come without a pin. Asks the public index of
packages; installs nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from dockerfile import ROOT

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
"""glibc 2.31, which llguidance's wheels need: Debian 11, Ubuntu 20.04, RHEL 9 and later."""
CUDA = re.compile(r"nvidia-|cuda-")
"""Packages that follow from a build of torch, which are others in other builds: torch pins them."""
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """Something installed in one step.

    Attributes:
        name: for people.
        options: of `uv pip compile`, its sources among them.
        text: requirements that are no file.
    """

    name: str
    options: tuple[str, ...]
    text: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--uv", default=str(Path(sys.executable).with_name("uv")), help="uv itself")
    options = parser.parse_args()
    wanted = [*extras(options.constraints), *without_dependencies(options.constraints)]
    pinned = pins(options.constraints)
    cases = list(product(wanted, PYTHONS, PLATFORMS))
    with tempfile.TemporaryDirectory(prefix="vlm-serve-resolution-") as folder:
        # Its own cache: what an index says is remembered for minutes, and this shall ask.
        environment = {**public_environment(os.environ), "UV_CACHE_DIR": folder}

        def ask(case: tuple[Wanted, str, str]) -> str:
            return find_problem(options.uv, *case, pinned, environment)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            problems = list(pool.map(ask, cases))
    for (what, python, platform), problem in zip(cases, problems, strict=True):
        if problem:
            print(f"{what.name}, Python {python}, {platform}:\n{problem}\n")
    if failed := sum(map(bool, problems)):
        raise SystemExit(f"{failed} of {len(cases)} resolutions failed")
    print(f"all {len(cases)} resolutions succeeded")


def extras(constraints: Path) -> Iterator[Wanted]:
    """Yield the package alone, with each of its extras, and with all of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = (str(ROOT / "pyproject.toml"), "--no-build", "--constraint", str(constraints))
    yield Wanted("no extra", own)
    for name in project["optional-dependencies"]:
        yield Wanted(f"extra {name}", (*own, "--extra", name))
    yield Wanted("all extras", (*own, "--all-extras"))


def without_dependencies(constraints: Path) -> Iterator[Wanted]:
    """Yield what the Makefile installs with `--no-deps` beside the pins.

    torchvision is resolved with what it depends on all the same: the torch that it was built for
    must be the pinned one. Of packages that are built here, or that go into a folder of their own,
    the version must exist.
    """
    for line in no_deps_lines():
        built = "--no-build-isolation" in line
        if built:
            own: tuple[str, ...] = ("--no-deps",)
        elif "--target" in line:
            own = ("--no-deps", "--no-build")
        else:
            own = ("--no-build", "--constraint", str(constraints))
        for name, version in re.findall(r"([\w.-]+)==([\w.]+)", line):
            yield Wanted(name, ("-", *own), f"{name}=={version}\n")
        for path in re.findall(r"--requirement (\S+)", line):
            yield Wanted(path, (str(ROOT / path), "--no-deps", "--no-build"))


def no_deps_lines() -> list[str]:
    """Return the Makefile's lines that install something fixed without its dependencies."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "--no-deps" in line and "--index-url" not in line]


def pins(constraints: Path) -> dict[str, str]:
    """Return the version of every package in a file of pins, by its normalised name."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    found = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normalised(name): version for name, version in found}


def normalised(name: str) -> str:
    """Return a package's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def public_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment's variables without those that configure how packages are installed;
    certificates and proxies stay, without which nobody may be asked."""
    kept = {"PIP_CERT", "PIP_PROXY"}
    ours = re.compile(r"(PIP|UV|PYTHON|VIRTUAL_ENV|CONDA|XDG_CONFIG|TORCH_INDEX)")
    return {
        name: value for name, value in variables.items() if name in kept or not ours.match(name)
    }


def find_problem(
    uv: str,
    wanted: Wanted,
    python: str,
    platform: str,
    pinned: Mapping[str, str],
    environment: Mapping[str, str],
) -> str:
    """Return why something cannot be installed there as it is pinned; an empty text: it can."""
    command = [
        *(uv, "pip", "compile", "--no-config", "--quiet", "--no-header", "--no-annotate"),
        # Named, so that it does not look for others of this machine.
        *("--python", sys.executable, "--python-version", python, "--python-platform", platform),
        *wanted.options,
    ]
    done = subprocess.run(
        command,
        input=wanted.text,
        env=dict(environment),
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return done.stderr.strip() or f"uv ended with status {done.returncode}"
    if "--no-deps" in wanted.options:
        return ""
    loose = [
        line for line in unpinned(done.stdout.splitlines(), pinned) if line != wanted.text.strip()
    ]
    return f"not in the constraints: {', '.join(loose)}" if loose else ""


def unpinned(resolved: Sequence[str], pinned: Mapping[str, str]) -> Iterator[str]:
    """Yield what has been resolved without a pin, besides what follows from the build of torch."""
    for line in resolved:
        name = normalised(re.split(r"[=\[; ]", line)[0])
        if name not in pinned and not CUDA.match(name):
            yield line


if __name__ == "__main__":
    main()

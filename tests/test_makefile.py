"""What `make` does before it starts anything, with a stand-in for Python that installs nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from dockerfile import arguments
from install import outside_make

ROOT = Path(__file__).resolve().parent.parent
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit
echo "$*" >> "$LOG"
case "$1" in release/*) echo "$CHOSEN"; exit;; esac
case "$*" in *"$FAILS"*) exit 1;; esac
sleep 0.3
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin"
cp "$0" "$3/bin/python"
printf '#!/bin/sh\\necho served >> "$LOG"\\n' > "$3/bin/vlm-serve"
chmod +x "$3/bin/vlm-serve"
"""


CPU_INDEX = "https://index.test/cpu"
make = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


class Checkout:
    """A fresh one, with the stand-in.

    Args:
        folder: an empty one.
        chosen: the index that the script which is asked for one prints.
        fails: whatever is started with these words in its arguments fails.
    """

    def __init__(self, folder: Path, chosen: str = "", fails: str = "no such words") -> None:
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        (folder / "docs" / "site").mkdir(parents=True)
        shutil.copy(ROOT / "docs" / "site" / "requirements.txt", folder / "docs" / "site")
        self._folder, self._python, self._log = folder, folder / "python", folder / "log"
        self._python.write_text(PYTHON)
        self._python.chmod(0o755)
        self._environment = {
            **outside_make(os.environ),
            "LOG": str(self._log),
            "CHOSEN": chosen,
            "FAILS": fails,
        }
        self._environment.pop("TORCH_INDEX", None)

    def start(
        self, *words: str, target: str = "serve", **environment: str
    ) -> subprocess.Popen[str]:
        """Starts `make` with these words and variables."""
        return subprocess.Popen(
            ["make", target, f"PYTHON={self._python}", f"CPU_INDEX={CPU_INDEX}", *words],
            cwd=self._folder,
            env={**self._environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def log(self) -> list[str]:
        """Read what the stand-in was told to do, without what no test is about."""
        lines = self._log.read_text().splitlines()
        return [re.sub(r"^-m pip --disable-pip-version-check ", "", line) for line in lines]


@make
@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
def test_two_at_once_in_a_fresh_checkout_install_once(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    running = [checkout.start() for _ in range(2)]
    for process in running:
        process.communicate(timeout=120)
    assert [process.returncode for process in running] == [0, 0]
    said = checkout.log()
    assert said[0] == "-m venv .venv"
    assert ["setuptools" in line for line in said[1:4]] == [True, False, False]
    assert said[4:] == ["served", "served"]


def from_index(url: str) -> str:
    how = f"--progress-bar on --constraint constraints.txt --no-deps --index-url {url}"
    return f"install {how} torch"


@make
@pytest.mark.parametrize(
    ("words", "environment", "chosen", "index"),
    [
        ([], {}, "", ""),
        ([], {}, CPU_INDEX, CPU_INDEX),
        (["TORCH_INDEX="], {}, CPU_INDEX, ""),
        (["TORCH_INDEX=https://own.test/cu128"], {}, CPU_INDEX, "https://own.test/cu128"),
        ([], {"TORCH_INDEX": ""}, CPU_INDEX, ""),
        ([], {"TORCH_INDEX": "https://own.test/cu128"}, "", "https://own.test/cu128"),
    ],
)
def test_torch_alone_comes_from_the_index_that_was_chosen(
    words: list[str], environment: dict[str, str], chosen: str, index: str, tmp_path: Path
) -> None:
    checkout = Checkout(tmp_path, chosen)
    process = checkout.start(*words, **environment)
    process.communicate(timeout=120)
    assert process.returncode == 0
    _, _, *middle, everything, served = checkout.log()
    asked = [] if words or environment else [f"release/torch_index.py {CPU_INDEX}"]
    assert middle == asked + ([from_index(index)] if index else [])
    assert everything.endswith("--editable .[store]") and "index" not in everything
    assert served == "served"


@make
def test_it_says_little_and_where_the_command_is(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, CPU_INDEX)
    said, _ = checkout.start().communicate(timeout=120)
    lines = [line for line in said.splitlines() if not line.startswith("make")]
    assert [line.split()[0] for line in lines] == ["Creating", "Installing", "The", "exec"]
    assert ".venv/bin/vlm-serve; make shell" in said
    loud = [line for line in checkout.log() if "install" in line and "--quiet" not in line]
    assert loud == [from_index(CPU_INDEX)], "only a large download shows its progress"


@make
def test_a_shell_of_make_finds_the_command(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, CPU_INDEX)
    process = checkout.start("ARGS=-c vlm-serve", target="shell", SHELL="/bin/sh")
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert checkout.log()[-1] == "served"


@make
def test_the_site_is_built_by_packages_beside_the_environment(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, CPU_INDEX)
    process = checkout.start(target="docs")
    process.communicate(timeout=120)
    assert process.returncode == 0
    *_, builder, built = checkout.log()
    where = "--target .venv/docs --requirement docs/site/requirements.txt"
    assert builder == f"install --quiet --no-deps --upgrade {where}"
    assert built == "-m sphinx -q -E -W --keep-going -c docs/site . build/site"


@make
def test_addresses_and_folders_may_hold_what_a_shell_takes_apart(tmp_path: Path) -> None:
    index, folder = "https://index.test/cpu?a=1&b=two words", tmp_path / "a folder; echo"
    folder.mkdir()
    checkout = Checkout(folder, index)
    process = checkout.start(f"CPU_INDEX={index}", "PYTHON=./python")
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert checkout.log()[2:4] == [f"release/torch_index.py {index}", from_index(index)]


@make
def test_an_index_that_breaks_off_leaves_the_public_one(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, CPU_INDEX, fails="--index-url")
    process = checkout.start()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "so torch comes from pip's default index" in said
    assert [line.split()[-1] for line in checkout.log()[-3:]] == ["torch", ".[store]", "served"]


@make
def test_without_a_network_it_says_what_is_missing(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, CPU_INDEX, fails="setuptools")
    process = checkout.start()
    _, said = process.communicate(timeout=120)
    assert process.returncode
    assert "no index of packages is within reach of pip" in said
    assert "setuptools" in checkout.log()[-1], "nothing else is tried"


@make
def test_an_index_that_somebody_named_must_do(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, fails="--index-url")
    process = checkout.start("TORCH_INDEX=https://own.test/cu128")
    process.communicate(timeout=120)
    assert process.returncode
    assert checkout.log()[-1] == from_index("https://own.test/cu128")


def test_makefile_and_dockerfile_name_one_index_of_builds_for_cpus() -> None:
    found = re.search(r"^CPU_INDEX \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == arguments({})["TORCH_INDEX"]


@make
def test_chaos_gets_its_seed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    process = checkout.start("ARGS=--seed 7 --minutes 2", target="chaos")
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert checkout.log()[-1] == "benchmarks/chaos.py --seed 7 --minutes 2"

"""Compile the Triton kernels ahead of time and check what their machine code takes and shows.

    python benchmarks/aot.py [--only PART,...] [--models 4B,...] [--targets sm_90,...]
    python benchmarks/aot.py --check [--all] [--write] [--tritons pinned,3.6.0]

No GPU is needed: the ops are called at the shapes of the shared checkpoints and of LFM2, Nemotron 3
and Granite 4, their launches are recorded instead of run, and each distinct specialisation is
compiled for each target. Without `--check` that is printed. The check compares each kernel with the
limits of `common/aot_limits.py` and with its row in `aot.json.xz`. It compiles only kernels that
have changed since; with `--all` every one. `--write` keeps the new rows and writes aot.md.

Other versions of Triton than the installed one lie in `.venv/triton-VERSION`, which
`make .venv/triton-3.6.0/installed` fills; each is checked by a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

# Triton decides at import whether kernels are compiled or interpreted.
os.environ["TRITON_INTERPRET"] = "0"
# The kernels beside this file, whatever is installed.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import triton
from common.aot_cases import cases
from common.aot_hybrids import hybrids

from benchmarks.common import aot_kept
from benchmarks.common.aot_compile import TARGETS, Usage, compile_launch, specialisation
from benchmarks.common.aot_limits import breaches, worse
from benchmarks.common.aot_page import write_page
from vlm_serve.kernels.dispatch import triton_everywhere
from vlm_serve.kernels.triton_support import Launch, record_launches

ROOT = Path(__file__).resolve().parent.parent
PINNED = "pinned"
MODELS = "4B,27B,35B-A3B"
TRITONS = f"{PINNED},3.6.0"


def record(target: str, only: Sequence[str], models: Sequence[str]) -> dict[str, list[Launch]]:
    """Every distinct launch of the cases on a target, by the names of case and kernel."""
    found: dict[str, dict[object, Launch]] = {}
    seen: set[object] = set()
    for label, call in chain(cases(models), hybrids()):
        with triton_everywhere(), record_launches(TARGETS[target][0]) as launches:
            call()
        for launch in launches:
            name = f"{label}: {launch.kernel.__name__.strip('_')}"
            key = specialisation(launch)
            if key not in seen and any(part in name for part in only):
                seen.add(key)
                found.setdefault(name, {})[key] = launch
    return {name: list(each.values()) for name, each in found.items()}


def compile_all(name: str, launches: Sequence[Launch], target: str) -> Usage:
    """Compile a kernel's variants, print each, and return the worst in each respect."""
    worst = None
    for launch in launches:
        began = time.perf_counter()
        usage = compile_launch(launch, target)
        print(f"{target:7} {name:60} {usage} {time.perf_counter() - began:.1f} s", flush=True)
        worst = usage if worst is None else worst.worst(usage)
    assert worst is not None
    return worst


class Check:
    """The check of one version of Triton, the imported one.

    Args:
        everything: compile kernels that have not changed too.
        keep: write each new row at once, so that a run that is cut goes on where it was.
    """

    def __init__(self, *, everything: bool, keep: bool) -> None:
        self._everything, self._keep = everything, keep
        self._rows = aot_kept.read(triton.__version__)
        self.compiled = self.as_before = 0
        self.faults: list[str] = []

    def run(self, target: str, only: Sequence[str], models: Sequence[str]) -> None:
        """Check a target's kernels."""
        kept_rows = self._rows.setdefault(target, {})
        found = record(target, only, models)
        for name, launches in found.items():
            self._check(name, launches, target)
        if only == [""] and models == MODELS.split(","):
            for gone in kept_rows.keys() - found.keys():
                del kept_rows[gone]
        self._write()

    def _check(self, name: str, launches: Sequence[Launch], target: str) -> None:
        rows, key = self._rows[target], aot_kept.digest(launches)
        kept = rows.get(name)
        before = None if kept is None else aot_kept.usage_of(kept)
        if before is not None and kept["digest"] == key and not self._everything:
            self.as_before += 1
            usage = before
        else:
            self.compiled += 1
            try:
                usage = compile_all(name, launches, target)
            except Exception as error:
                self.faults.append(f"{target} {name}: {type(error).__name__}: {error}")
                return
        staged = any(launch.options["num_stages"] > 1 for launch in launches)
        faults = [] if before is None else worse(usage, before)
        faults += breaches(name, target, usage, staged=staged)
        self.faults += [f"{target} {name}: {each}" for each in faults]
        if usage is not before:
            rows[name] = aot_kept.row(key, len(launches), usage)
            self._write()

    def _write(self) -> None:
        if self._keep:
            ordered = {target: self._rows[target] for target in TARGETS if target in self._rows}
            aot_kept.write(triton.__version__, ordered)


def elsewhere(version: str, arguments: Sequence[str]) -> int:
    """Check with another version of Triton, in a process of its own."""
    folder = ROOT / ".venv" / f"triton-{version}"
    if not (folder / "installed").exists():
        print(f"no {folder}: make .venv/triton-{version}/installed", file=sys.stderr)
        return 1
    command = [sys.executable, __file__, *arguments, "--tritons", PINNED]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only kernels whose name contains one of these")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--check", action="store_true", help="compare with limits and kept rows")
    parser.add_argument("--all", action="store_true", help="compile unchanged kernels too")
    parser.add_argument("--write", action="store_true", help="keep the rows, and write aot.md")
    parser.add_argument("--tritons", default=TRITONS, help="versions to check with")
    arguments = parser.parse_args()
    targets, only = arguments.targets.split(","), arguments.only.split(",")
    models = arguments.models.split(",")
    if not arguments.check:
        for target in targets:
            for name, launches in record(target, only, models).items():
                compile_all(name, launches, target)
        return 0
    failed = 0
    tritons = arguments.tritons.split(",")
    for version in tritons:
        if version != PINNED:
            failed |= elsewhere(version, sys.argv[1:])
            continue
        check = Check(everything=arguments.all, keep=arguments.write)
        for target in targets:
            check.run(target, only, models)
        for fault in check.faults:
            print(f"Triton {triton.__version__}: {fault}", file=sys.stderr)
        failed |= bool(check.faults)
        print(
            f"Triton {triton.__version__}: {check.compiled} kernels compiled, {check.as_before} as "
            f"before, {len(check.faults)} faults",
            flush=True,
        )
    if arguments.write:
        write_page()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

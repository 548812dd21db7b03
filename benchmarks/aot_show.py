"""Print what the machine code of the Triton kernels takes, as it was kept at the last check.

    python benchmarks/aot_show.py [PART ...] [--since REV]

A line has registers a thread / bytes spilled a thread (stores and loads) / bytes of shared memory /
programs that fit a multiprocessor, and behind a semicolon buffers / copies in flight of pipelined
loops; the worst of all variants each, whose number is in brackets. With `--since` only what git's
revision had otherwise is printed, behind "-", and what is now, behind "+".
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.aot_compile import Usage
from benchmarks.common.aot_kept import FILE, Rows, parse, usage_of


def lines(kept: dict[str, Rows], parts: list[str]) -> dict[str, str]:
    """Return what each kernel takes, by version, target and name."""
    rows = {
        f"{version} {target:6} {name}": f"{_text(usage_of(row))} ({row['variants']})"
        for version, targets in kept.items()
        for target, kernels in targets.items()
        for name, row in kernels.items()
    }
    return {key: text for key, text in rows.items() if all(part in key for part in parts)}


def _text(usage: Usage) -> str:
    text = f"{usage.registers} / {usage.spilled} / {usage.shared} / {usage.programs}"
    return text + (f"; {usage.buffers} / {usage.ahead}" if usage.loops else "")


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the lines that differ, those before in front of those now."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            found += [f"- {key}: {before[key]}"] if key in before else []
            found += [f"+ {key}: {now[key]}"] if key in now else []
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="of a version, a target, a case or a kernel")
    parser.add_argument("--since", metavar="REV", help="only what has changed since a revision")
    arguments = parser.parse_args()
    now = lines(parse(FILE.read_bytes()), arguments.parts)
    if arguments.since is None:
        print("\n".join(f"{key}: {text}" for key, text in now.items()))
        return 0
    shown = ["git", "show", f"{arguments.since}:./{FILE.name}"]
    done = subprocess.run(shown, cwd=FILE.parent, capture_output=True, check=False)
    if done.returncode:
        print(done.stderr.decode().strip(), file=sys.stderr)
        return 1
    found = changes(lines(parse(done.stdout), arguments.parts), now)
    print("\n".join(found) if found else "nothing has changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fuzz the API with schemathesis and our OpenAPI document: no 5xx, nothing undocumented.

    pip install schemathesis
    python benchmarks/fuzz_api.py [--examples 110] [--seed 1]

Serves the demo model on a free port. Every operation gets the boundary values of its fields, then
110 random cases: some 3 000 cases in all (a few minutes). Run by hand: schemathesis brings more
packages than the rest of the tests together.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from server_process import server_process

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)
SERVE = ("demo", "--cache-memory", "128MiB", "--max-model-len", "512")
REQUEST_SECONDS = 60  # many cases generate up to the end of the context


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=110, help="random cases per operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Beside the interpreter first: a virtual environment that is not activated has it there.
    folder = str(Path(sys.executable).parent)
    program = shutil.which("schemathesis", path=folder) or shutil.which("schemathesis")
    if program is None:
        parser.error("schemathesis is not installed: pip install schemathesis")
    with server_process(*SERVE) as server:
        fuzz = [program, "run", f"{server.url}/openapi.json", "--phases", "coverage,fuzzing"]
        fuzz += ["--checks", CHECKS, "--seed", str(options.seed)]
        fuzz += ["--max-examples", str(options.examples)]
        fuzz += ["--request-timeout", str(REQUEST_SECONDS)]
        fuzz += ["--exclude-path", "/v1/cache/events"]  # a stream that never ends
        with tempfile.TemporaryDirectory() as there:  # it leaves a folder where it runs
            return subprocess.run(fuzz, check=False, cwd=there).returncode


if __name__ == "__main__":
    sys.exit(main())

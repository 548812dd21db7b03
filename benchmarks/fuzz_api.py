"""Fuzz the API with schemathesis and our OpenAPI document: no 5xx, nothing undocumented.

    pip install schemathesis
    python benchmarks/fuzz_api.py [--examples 110] [--seed 1]

Serves the demo model on a free port, with files, batches and stored responses. Every operation gets
the boundary values of its fields, then 110 random cases; `common/fuzz/hooks.py` puts ids that exist
and fragments of requests into half of them. Run by hand: schemathesis brings more packages than the
rest of the tests together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
from server_process import server_process

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)
SERVE = ("demo", "--cache-memory", "128MiB", "--max-model-len", "512", "--response-store", "4MiB")
SERVE += ("--batch-store", "16MiB")
KNOWN = 30
"""Files, batches and responses that exist when it begins; the cases delete some."""
REQUEST_SECONDS = 240  # many cases generate up to the end of the context
EMPTYING = "flush|reset_prefix_cache"
"""Paths of operations that forget stored responses: they come last."""


def make_ids(url: str) -> dict[str, list[str]]:
    """Return ids of files, batches and responses that the server has made."""
    ids: dict[str, list[str]] = {"file_id": [], "batch_id": [], "response_id": []}
    with httpx.Client(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client:

        def made(path: str, **content: Any) -> str:
            answer = client.post(path, **content)
            answer.raise_for_status()
            return str(answer.json()["id"])

        for number in range(KNOWN):
            body = {"messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 9}
            line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
            files = {"file": ("in.jsonl", json.dumps(line).encode() + b"\n{" * (number % 3 == 0))}
            file = made("/v1/files", data={"purpose": "batch"}, files=files)
            batch = {"input_file_id": file, "endpoint": line["url"], "completion_window": "24h"}
            ids["file_id"].append(file)
            ids["batch_id"].append(made("/v1/batches", json=batch))
            answer = {"input": f"{number}", "max_output_tokens": 9}
            ids["response_id"].append(made("/v1/responses", json=answer))
    return ids


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
        streams = ["--exclude-path", "/v1/cache/events"]  # they never end
        rounds = [
            [*fuzz, *streams, "--exclude-path-regex", EMPTYING],
            [*fuzz, "--include-path-regex", EMPTYING],
        ]
        hooks = Path(__file__).parent / "common" / "fuzz" / "hooks.py"
        environment = {
            "SCHEMATHESIS_HOOKS": str(hooks),
            "FUZZ_IDS": json.dumps(make_ids(server.url)),
        }
        with tempfile.TemporaryDirectory() as there:  # it leaves a folder where it runs
            done = [
                subprocess.run(each, check=False, cwd=there, env=os.environ | environment)
                for each in rounds
            ]
        if server.process.poll() is not None:
            print("the server has ended")
            return 1
        return max(each.returncode for each in done)


if __name__ == "__main__":
    sys.exit(main())

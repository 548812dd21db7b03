"""Stands in for lmms-eval, which is installed apart: asks the server that it is told of the same
question twice and writes samples as lmms-eval does. The task is what happens: "fine", "failed" (one
request), "silent" (no samples, status 0), "crash" or "slow"."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

QUESTION = "A red star and a green triangle are in the picture. " * 8 + "Who drew this?"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "model_args", "tasks", "output_path", "include_path", "limit"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--log_samples", action="store_true", required=True)
    given = parser.parse_args()
    assert given.model == "openai"
    if given.tasks == "crash":
        sys.exit("there is no such task")
    if given.tasks == "slow":
        time.sleep(60)
    if given.tasks == "silent":
        print("an error that is only logged")
        return
    settings = dict(pair.split("=", 1) for pair in given.model_args.split(","))
    folder = Path(given.output_path) / "eval"
    folder.mkdir(parents=True)
    with (folder / f"20260101_120000_samples_{given.tasks}.jsonl").open("w") as file:
        for number in range(int(given.limit or 2)):
            sample = ask(settings, number)
            if given.tasks == "failed" and number == 1:
                sample["filtered_resps"] = "[LMMS_EVAL_REQUEST_FAILED after 1 retries] no video"
            file.write(json.dumps(sample) + "\n")


def ask(settings: dict[str, str], number: int) -> dict[str, Any]:
    body = {
        "model": settings["model_version"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = httpx.post(
        f"{settings['base_url']}/chat/completions", json=body, timeout=60, trust_env=False
    )
    found = answer.raise_for_status().json()
    usage = found["usage"]
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    return {
        "doc_id": number,
        "target": "?",
        "filtered_resps": found["choices"][0]["message"]["content"],
        "token_counts": [counts],
        "right": float(number),
    }


if __name__ == "__main__":
    main()

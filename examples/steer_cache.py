"""Steer the cache with OpenAI's client: mark, prewarm, read what was reused, and ask why not more.

vlm-serve serve demo &
pip install openai
python examples/steer_cache.py [--base-url http://127.0.0.1:8000/v1]
"""

from __future__ import annotations

import argparse
from typing import Any

try:
    from openai import OpenAI
except ModuleNotFoundError:
    raise SystemExit("this example needs OpenAI's library: pip install openai") from None

RULES = "You look after a library. " + "Answer in one sentence, and name the shelf. " * 12
QUESTIONS = ("Where are the maps?", "Where are the globes?", "Where is the door?")


def request(question: str, *, marked: bool, text: str = RULES) -> list[dict[str, Any]]:
    """Return rules and a question in one message, with a mark between them or without."""
    rules: dict[str, Any] = {"type": "input_text", "text": text}
    if marked:
        rules["prompt_cache_breakpoint"] = {"mode": "explicit"}
    return [{"role": "user", "content": [rules, {"type": "input_text", "text": question}]}]


def ask(client: OpenAI, model: str, given: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a response and its cache report."""
    response = client.responses.create(
        model=model,
        input=given,
        max_output_tokens=24,
        temperature=0,
        extra_body={"cache_report": True, **options},
    )
    return response, getattr(response, "cache_report", None) or {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = client.models.list().data[0].id

    # The prompt is computed up to the mark and beyond, and kept; no answer is made.
    prewarm = {"prompt_cache_options": {"prewarm": True, "ttl": "30m"}}
    warmed, report = ask(client, model, request(QUESTIONS[0], marked=True), **prewarm)
    written = warmed.usage.input_tokens_details.cache_write_tokens
    print(f"prewarmed: {written} tokens written, {warmed.usage.output_tokens} generated")
    for mark in report["marks"]:
        print(f"  {mark['kept_tokens']} tokens are kept for {mark['seconds']:.0f} s")

    for question, marked in zip(QUESTIONS[1:], (True, False), strict=True):
        response, report = ask(client, model, request(question, marked=marked))
        how = "with the mark" if marked else "without it"
        cached = response.usage.input_tokens_details.cached_tokens
        print(f"{how}: {cached} of {response.usage.input_tokens} tokens from the cache")
        print(f"  why not more: {report['reason']}")

    # What has a client changed since an earlier request of its own?
    changed = request(QUESTIONS[1], marked=True, text="Today is Monday. " + RULES)
    compared = {"prompt_cache_options": {"comparison_response_id": warmed.id}}
    response, _ = ask(client, model, changed, **compared)
    why = response.model_dump()["prompt_cache_diagnostics"]
    print(f"with a date in front: {why['reason']}, {why['cache_missed_tokens']} tokens missed")


if __name__ == "__main__":
    main()

"""Coding agents on the command line: each changes a file in its folder."""

from __future__ import annotations

from pathlib import Path

from common import CLIENT, KEY, MODEL, URL, holds, ran, step


def aider() -> None:
    Path("one.txt").write_text("zero\n")
    options = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings")
    options += ("--analytics-disable", "--edit-format", "whole", "--no-pretty")
    with step("edits a file over a stream"):
        text = ran(
            "aider",
            *options,
            "--model",
            f"openai/{MODEL}",
            "--message",
            "AIDER WRITE one",
            "one.txt",
            OPENAI_API_BASE=URL,
            OPENAI_API_KEY=KEY,
        )
        holds(text, "Applied edit to one.txt")
        holds(Path("one.txt").read_text(), "one")


def mini_swe_agent() -> None:
    settings = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    with step("runs a command, and submits"):
        ran(
            "mini",
            "--yolo",
            "--exit-immediately",
            "--model",
            f"hosted_vllm/{MODEL}",
            "--task",
            "BASH WRITE one",
            HOSTED_VLLM_API_BASE=URL,
            HOSTED_VLLM_API_KEY=KEY,
            **settings,
        )
        holds(Path("one.txt").read_text(), "one")


def qwen_code() -> None:
    options = ("--yolo", "--bare", "--auth-type", "openai", "--model", MODEL)
    options += ("--openai-base-url", URL, "--openai-api-key", KEY)
    for word, *more in (("one",), ("two", "--continue")):
        with step(f"writes {word}"):
            made = ran(
                "qwen",
                *options,
                *more,
                "--prompt",
                f"QWEN WRITE {word}",
                QWEN_CODE_MAX_OUTPUT_TOKENS="4096",
            )
            holds(made, f"The tool says {word}")
            holds(Path(f"{word}.txt").read_text(), word)


globals()[CLIENT.replace("-", "_")]()

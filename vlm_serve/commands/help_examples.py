"""Examples at the head of the help of every command."""

from __future__ import annotations

import argparse

EXAMPLES: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {
    ("serve",): (
        ("vlm-serve serve demo", "the built-in model, on http://127.0.0.1:8000"),
        ("vlm-serve serve checkpoint/ --cache-memory 4GiB --api-key secret", "a model of your own"),
        ("vlm-serve serve checkpoint/ --device cuda", "on a GPU, with the extra `gpu`"),
    ),
    ("deploy",): (("vlm-serve deploy checkpoint/ --replicas 2", "two engines behind one address"),),
    ("plan",): (
        ("vlm-serve plan checkpoint/ --cache-memory 8GiB", "memory, types and arithmetic"),
        ("vlm-serve plan Qwen/Qwen3.5-4B --json", "of a hub's model, for a program"),
    ),
    ("models",): (("vlm-serve models", "families of models and their features"),),
    ("doctor",): (("vlm-serve doctor", "this machine, and what would compute here"),),
    ("run-batch",): (
        ("vlm-serve run-batch -i requests.jsonl -o answers.jsonl", "goes on after a kill"),
    ),
    ("video-qa",): (
        (
            'vlm-serve video-qa -i clips/ -o answers.csv --question "What happens?"',
            "one question about every video of a folder",
        ),
    ),
    ("eval", "longbench"): (
        ("vlm-serve eval longbench checkpoint/ --data hub", "needs a network"),
    ),
    ("eval", "video"): (
        ("vlm-serve eval video checkpoint/ --data questions.csv", "questions of your own"),
    ),
    ("eval", "lmms"): (
        ("vlm-serve eval lmms checkpoint/ --tasks mmmu_val --limit 50", "with lmms-eval"),
    ),
    ("chat",): (
        ("vlm-serve chat demo", "a conversation, with pictures by their paths"),
        ("vlm-serve chat --base-url http://127.0.0.1:8000", "with a running server"),
        ('vlm-serve chat --image photo.jpg "What is this?"', "one answer, then it ends"),
        ('vlm-serve chat --model checkpoint/ "Name three rivers."', "text alone"),
        ('vlm-serve chat --show-reasoning "Why?"', "and its thought, beside it"),
    ),
    ("completion",): (
        ('eval "$(vlm-serve completion bash)"', "in ~/.bashrc"),
        ("vlm-serve completion fish | source", "in fish's config.fish"),
    ),
}
"""Commands and their examples: a command line and its effect."""


def add_examples(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> None:
    """Put the examples at the head of the help of a parser and of all commands below it."""
    examples = EXAMPLES.get(path, ())
    if examples:
        lines = (f"  {command}\n      {effect}" for command, effect in examples)
        parser.description = "\n".join(("examples:", *lines)).replace("%", "%%")
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, choice in action.choices.items():
                add_examples(choice, (*path, name))

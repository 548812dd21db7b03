"""Arguments of `vlm-serve eval`, and their choices."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import options_of
from vlm_serve.options.flags import add_options, positive
from vlm_serve.server.config import SPLITTING

Adder = Callable[[argparse.ArgumentParser], None]
_COMPARED = "enable_prefix_caching"
PARTS = ("direct", "two-turn", "two-turn-omitting", "scoring")
"""Parts of LongBench v2."""
DEFAULT_PARTS = ("direct", "two-turn", "scoring")
DECODING = ("greedy", "seeded")
"""Decoding of answers."""
THROUGH = ("server", "pipeline")
"""Interfaces between lmms-eval and the model."""


def add_eval_commands(
    commands: Any, run: Callable[[argparse.Namespace], int], model: Adder
) -> None:
    """Add `eval` with its benchmarks; `model` adds the arguments for the model."""
    parser = commands.add_parser("eval", help="compare answers with and without prefix caching")
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")

    longbench = benchmarks.add_parser(
        "longbench", help="LongBench v2: questions about long documents"
    )
    _add_choices(longbench, "--part", PARTS, "kind of questions", ", ".join(DEFAULT_PARTS))
    text = "maximum reasoning tokens in the first turn"
    _add_number(longbench, "--reasoning-tokens", 1024, text)
    data_help = "a JSON or JSON lines file in LongBench v2's form; hub fetches the published one"
    _finish(longbench, "longbench", run, model, ("FILE|hub", data_help), temperature=0.1)

    video = benchmarks.add_parser("video", help="questions about videos, several of each")
    data = ("FILE", ".csv or .jsonl with video, question, answer and, if wanted, choices")
    _finish(video, "video", run, model, data, temperature=0.7)
    _add_lmms(benchmarks, run, model)


def _add_lmms(benchmarks: Any, run: Callable[[argparse.Namespace], int], model: Adder) -> None:
    lmms = benchmarks.add_parser("lmms", help="tasks of lmms-eval, which is installed separately")
    lmms.set_defaults(run=run, benchmark="lmms")
    lmms.add_argument("--tasks", required=True, metavar="A,B", help="as for lmms-eval")
    _add_choices(lmms, "--through", THROUGH, "interface to the model")
    lmms.add_argument("--include-path", type=Path, metavar="DIR", help="folder of additional tasks")
    lmms.add_argument(
        "--lmms-eval",
        default="",
        metavar="COMMAND",
        help="command that starts lmms-eval in another environment: its python with "
        "-m vlm_serve.eval.lmms_run (default: this python)",
    )
    _add_number(lmms, "--max-frames", 8, "frames per video")
    _add_number(lmms, "--limit", None, "only the first N samples per task")
    _add_number(lmms, "--timeout", 3600, "time limit for each run of lmms-eval", "SECONDS")
    _add_common(lmms, "lmms", model)


def _finish(
    parser: argparse.ArgumentParser,
    name: str,
    run: Callable[[argparse.Namespace], int],
    model: Adder,
    data: tuple[str, str],
    *,
    temperature: float,
) -> None:
    """Add the arguments of benchmarks without a harness; `data`: metavar and help of --data."""
    parser.set_defaults(run=run, benchmark=name)
    parser.add_argument("--lora", metavar="NAME", help="answer with this one of --lora-modules")
    parser.add_argument("--data", required=True, metavar=data[0], help=data[1])
    _add_choices(parser, "--decoding", DECODING, "decoding of answers")
    _add_number(parser, "--max-tokens", 128, "maximum tokens per answer")
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="X",
        help=f"temperature of seeded answers (default: {temperature})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of seeded answers (default: 0)")
    _add_number(parser, "--limit", None, "only the first N questions")
    _add_number(parser, "--concurrency", 1, "documents or videos to process concurrently")
    _add_common(parser, name, model)


def _add_number(
    parser: argparse.ArgumentParser, flag: str, default: int | None, text: str, metavar: str = "N"
) -> None:
    """Add a flag with a whole number above 0; no number means all."""
    shown = f"{text} (default: {default or 'all'})"
    parser.add_argument(flag, type=positive, default=default, metavar=metavar, help=shown)


def _add_choices(
    parser: argparse.ArgumentParser,
    flag: str,
    choices: Sequence[str],
    text: str,
    default: str = "both",
) -> None:
    """Add a flag that may be repeated."""
    shown = f"{text}; may be repeated (default: {default})"
    parser.add_argument(flag, action="append", choices=choices, help=shown)


def _add_common(parser: argparse.ArgumentParser, name: str, model: Adder) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(f"eval-{name}.html"),
        metavar="FILE",
        help=f"the report; a .json copy lies beside it (default: eval-{name}.html)",
    )
    model(parser)
    add_options(parser, SPLITTING)
    add_options(parser, [option for option in options_of(EngineConfig) if option.name != _COMPARED])
